"""Summaries of what verl dumps while it validates, and pass@k."""

import json
import random
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.common.evaluation import main, pass_at_k, passes
from tests.facts import a_line_says


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n), st.integers(1, n))))
def test_pass_at_k_is_the_fraction_of_subsets_with_a_correct_response(counts):
    correct, samples, k = counts
    subsets = list(combinations([True] * correct + [False] * (samples - correct), k))
    assert pass_at_k(correct, samples, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


@pytest.mark.parametrize(("samples", "ks"), [((16, 12), [1, 2, 4, 8, 12]), ((8,), [1, 2, 4, 8]), ((1,), [1])])
def test_ks_are_powers_of_two_and_the_fewest_samples(samples, ks):
    assert list(passes([[True] * count for count in samples])) == ks


def record(uid, correctness, **more):
    made = {"input": "q", "output": "a", "gts": "1", "step": 5, "correctness": correctness, **more}
    return made if uid is None else {**made, "uid": uid}


def dump(folder, records, step=5):
    folder.mkdir(exist_ok=True)
    (folder / f"{step}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return folder


SHUFFLED = [record(f"p{p}_{s}_0", float(s < right)) for p, right in ((0, 1), (1, 0)) for s in range(4)]
random.Random(0).shuffle(SHUFFLED)
nan = float("nan")

# records, arguments, what is in the summary
SUMMARIES = {
    "the responses to a prompt are one group": (
        SHUFFLED,
        [],
        {"responses": 8, "prompts": 2, "mean": {"correctness": 0.125}, "pass": {"1": 0.125, "2": 0.25, "4": 0.5}},
    ),
    "of a response with several outputs the last counts": (
        [record("p_0_0", 0.0), record("p_0_10", 1.0), record("p_0_9", 0.0)],
        [],
        {"responses": 1, "pass": {"1": 1.0}},
    ),
    "without keys, as RayPPOTrainer dumps, the same question is the same prompt": (
        [record(None, right, input=text) for text, right in (("q", 1.0), ("q", 0.0), ("r", 0.0), ("r", 0.0))],
        [],
        {"prompts": 2, "pass": {"1": 0.25, "2": 0.5}},
    ),
    "values above the threshold are correct, and unscored responses are excluded from a mean": (
        [record("p_0_0", 3.0, length=nan, other=nan), record("q_0_0", 2.5, length=0.5, other=nan)],
        ["--accuracy-threshold", "2.999"],
        {"pass": {"1": 0.5}, "mean": {"correctness": 2.75, "length": 0.5}},
    ),
}


@pytest.mark.parametrize("case", SUMMARIES)
def test_a_summary(case, tmp_path, capsys):
    records, arguments, expected = SUMMARIES[case]
    folder = dump(tmp_path / "d", records)
    dump(folder, [record("p_0_0", 7.0)], step=4)  # an earlier step, which does not count
    (folder / "metrics.jsonl").write_text("{}\n")
    options = ["--accuracy-key", "correctness", "--json", str(tmp_path / "new/out.json"), *arguments]
    assert main([str(folder), *options]) == 0
    (summary,) = json.loads((tmp_path / "new/out.json").read_text()).values()
    assert {name: summary[name] for name in expected} == expected
    shown = capsys.readouterr().out
    assert a_line_says(shown, folder / "5.jsonl", summary["responses"], summary["prompts"])
    assert "pass@1" in shown


WRONG = {
    "no dump": (None, "<step>.jsonl"),
    "an unknown reward": ([record("p_0_0", 1.0)], "'correct'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_summarized_is_an_error(case, tmp_path, capsys):
    records, message = WRONG[case]
    folder = tmp_path if records is None else dump(tmp_path / "d", records)
    assert main([str(folder), "--accuracy-key", "correct"]) == 1
    assert message in capsys.readouterr().err
