"""Summaries of the responses that verl dumps in validation, and pass@k."""

import json
import random
from dataclasses import dataclass
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.common.evaluation import main, pass_at_k, passes
from tests.facts import a_line_says


@st.composite
def counts_of_a_prompt(draw):
    """Return the number of correct responses, the number of responses, and k."""
    samples = draw(st.integers(1, 8))
    correct = draw(st.integers(0, samples))
    k = draw(st.integers(1, samples))
    return correct, samples, k


@given(counts_of_a_prompt())
def test_pass_at_k_is_the_fraction_of_subsets_with_a_correct_response(counts):
    correct, samples, k = counts
    responses = [True] * correct + [False] * (samples - correct)
    subsets = list(combinations(responses, k))
    subsets_with_a_correct_response = [subset for subset in subsets if any(subset)]
    fraction = len(subsets_with_a_correct_response) / len(subsets)
    assert pass_at_k(correct, samples, k) == pytest.approx(fraction, abs=1e-12)


@pytest.mark.parametrize(
    ("samples_per_prompt", "ks"), [((16, 12), [1, 2, 4, 8, 12]), ((8,), [1, 2, 4, 8]), ((1,), [1])]
)
def test_ks_are_powers_of_two_and_the_fewest_samples(samples_per_prompt, ks):
    responses = [[True] * samples for samples in samples_per_prompt]
    assert list(passes(responses)) == ks


def record(uid, correctness, **more):
    """Return a line of verl's dump. RayPPOTrainer dumps no uid."""
    fields = {"input": "q", "output": "a", "gts": "1", "step": 5, "correctness": correctness, **more}
    return fields if uid is None else {**fields, "uid": uid}


def write_dump(folder, records, step=5):
    """Write the dump of a step, and return its folder."""
    folder.mkdir(exist_ok=True)
    (folder / f"{step}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return folder


def shuffled_records():
    """Return four responses to each of two prompts. Only the first response to prompt 0 is correct."""
    first_of_prompt_0 = [record("p0_0_0", 1.0)]
    others_of_prompt_0 = [record(f"p0_{sample}_0", 0.0) for sample in (1, 2, 3)]
    prompt_1 = [record(f"p1_{sample}_0", 0.0) for sample in (0, 1, 2, 3)]
    records = first_of_prompt_0 + others_of_prompt_0 + prompt_1
    random.Random(0).shuffle(records)
    return records


NAN = float("nan")


@dataclass(frozen=True)
class SummaryCase:
    """The records of a dump, and a part of its summary."""

    records: list[dict]
    summary: dict[str, object]
    arguments: tuple[str, ...] = ()


SUMMARIES = {
    "the responses to a prompt are one group": SummaryCase(
        shuffled_records(),
        {"responses": 8, "prompts": 2, "mean": {"correctness": 0.125}, "pass": {"1": 0.125, "2": 0.25, "4": 0.5}},
    ),
    "the last output of a response counts": SummaryCase(
        [record("p_0_0", 0.0), record("p_0_10", 1.0), record("p_0_9", 0.0)],
        {"responses": 1, "pass": {"1": 1.0}},
    ),
    "without uids, the same question is the same prompt": SummaryCase(
        [
            record(None, 1.0, input="q"),
            record(None, 0.0, input="q"),
            record(None, 0.0, input="r"),
            record(None, 0.0, input="r"),
        ],
        {"prompts": 2, "pass": {"1": 0.25, "2": 0.5}},
    ),
    "values above the threshold are correct": SummaryCase(
        [record("p_0_0", 3.0), record("q_0_0", 2.5)],
        {"pass": {"1": 0.5}, "mean": {"correctness": 2.75}},
        arguments=("--accuracy-threshold", "2.999"),
    ),
    "responses that are not scored are excluded from a mean": SummaryCase(
        [record("p_0_0", 3.0, length=NAN, other=NAN), record("q_0_0", 2.5, length=0.5, other=NAN)],
        {"mean": {"correctness": 2.75, "length": 0.5}},
    ),
}


@pytest.mark.parametrize("case", SUMMARIES.values(), ids=SUMMARIES)
def test_summary_of_the_last_step(case, tmp_path, capsys):
    folder = write_dump(tmp_path / "dump", case.records)
    write_dump(folder, [record("p_0_0", 7.0)], step=4)
    (folder / "metrics.jsonl").write_text("{}\n")
    json_file = tmp_path / "new/summary.json"
    options = ("--accuracy-key", "correctness", "--json", str(json_file))
    assert main([str(folder), *options, *case.arguments]) == 0
    (summary,) = json.loads(json_file.read_text()).values()
    for name, value in case.summary.items():
        assert summary[name] == value
    printed = capsys.readouterr().out
    assert a_line_says(printed, folder / "5.jsonl", summary["responses"], summary["prompts"])
    assert "pass@1" in printed


def test_folder_without_a_dump_is_an_error(tmp_path, capsys):
    assert main([str(tmp_path), "--accuracy-key", "correctness"]) == 1
    assert "<step>.jsonl" in capsys.readouterr().err


def test_unknown_accuracy_is_an_error(tmp_path, capsys):
    folder = write_dump(tmp_path / "dump", [record("p_0_0", 1.0)])
    assert main([str(folder), "--accuracy-key", "correct"]) == 1
    assert "'correct'" in capsys.readouterr().err
