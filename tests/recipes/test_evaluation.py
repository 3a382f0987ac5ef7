"""Summaries of what verl dumps while validating, and pass@k."""

from __future__ import annotations

import json
import random
import shlex
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.facts import a_line_says
from tests.recipes import launchers
from verl_ext.errors import DataError
from verl_ext.recipes.evaluation.__main__ import main
from verl_ext.recipes.evaluation.passes import pass_at_k, passes


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(counts: tuple[int, int, int]) -> None:
    right, samples, k = counts
    subsets = list(combinations([True] * right + [False] * (samples - right), k))
    assert pass_at_k(right, samples, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_pass_at_k_of_large_numbers_is_finite() -> None:
    assert pass_at_k(1, 4096, 2048) == pytest.approx(0.5)


@pytest.mark.parametrize(("right", "samples", "k"), [(0, 4, 5), (0, 4, 0), (5, 4, 1), (-1, 4, 1)])
def test_what_does_not_exist_is_refused(right: int, samples: int, k: int) -> None:
    with pytest.raises(DataError, match="pass@"):
        pass_at_k(right, samples, k)


def test_ks_are_powers_of_two_and_the_fewest_samples() -> None:
    assert list(passes([(1, 16), (0, 12)])) == [1, 2, 4, 8, 12]
    assert list(passes([(1, 8)])) == [1, 2, 4, 8]
    assert list(passes([(1, 1)])) == [1]


def record(uid: str | None, correctness: float, **more: Any) -> dict[str, Any]:
    made = {
        "input": "q",
        "output": "a",
        "gts": "1",
        "score": correctness,
        "step": 5,
        "correctness": correctness,
        **more,
    }
    return made if uid is None else {**made, "uid": uid}


def dump(folder: Path, records: list[dict[str, Any]], step: int = 5) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / f"{step}.jsonl").write_text("".join(json.dumps(found) + "\n" for found in records))
    return folder


def summary(folder: Path, *arguments: str) -> dict[str, Any]:
    assert main([str(folder), "--json", str(folder / "out.json"), *arguments]) == 0
    (found,) = json.loads((folder / "out.json").read_text()).values()
    return found


def test_answers_are_grouped_by_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [record(f"p{p}_{s}_0", float(s < right)) for p, right in ((0, 1), (1, 0)) for s in range(4)]
    random.Random(0).shuffle(records)
    found = summary(dump(tmp_path / "d", records), "--right", "correctness")
    assert (found["answers"], found["prompts"]) == (8, 2)
    assert found["mean"] == {"score": 0.125, "correctness": 0.125}
    assert found["pass"] == {"1": 0.125, "2": 0.25, "4": 0.5}
    shown = capsys.readouterr().out
    assert a_line_says(shown, "8 answers", "2 prompts")
    assert "pass@4" in shown


def test_of_an_answer_in_parts_the_last_counts(tmp_path: Path) -> None:
    records = [record("p_0_0", 0.0), record("p_0_10", 1.0), record("p_0_9", 0.0)]
    found = summary(dump(tmp_path / "d", records), "--right", "correctness")
    assert (found["answers"], found["pass"]) == (1, {"1": 1.0})


def test_without_keys_the_same_question_is_the_same_prompt(tmp_path: Path) -> None:
    """As the legacy trainer dumps."""
    records = [record(None, 1.0), record(None, 0.0), record(None, 0.0, input="other"), record(None, 0.0, input="other")]
    found = summary(dump(tmp_path / "d", records), "--right", "correctness")
    assert found["pass"] == {"1": 0.25, "2": 0.5}


def test_above_says_what_is_right_and_unscored_answers_have_no_part_in_a_mean(tmp_path: Path) -> None:
    records = [record("p_0_0", 3.0, length=float("nan")), record("q_0_0", 2.5, length=0.5)]
    found = summary(dump(tmp_path / "d", records), "--right", "correctness", "--above", "2.999")
    assert found["pass"] == {"1": 0.5}
    assert found["mean"]["length"] == 0.5


def test_a_reward_that_no_answer_has_is_null_in_the_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [record("p_0_0", 1.0, length=float("nan"))]
    assert summary(dump(tmp_path / "d", records))["mean"]["length"] is None
    assert a_line_says(capsys.readouterr().out, "length", "not scored")


def test_the_last_step_is_read_or_the_one_that_is_asked_for(tmp_path: Path) -> None:
    dump(tmp_path / "d", [record("p_0_0", 1.0)], step=9)
    folder = dump(tmp_path / "d", [record("p_0_0", 0.0)], step=10)
    (folder / "metrics.jsonl").write_text("{}\n")
    assert summary(folder)["mean"]["correctness"] == 0
    assert summary(folder, "--step", "9")["mean"]["correctness"] == 1


def test_the_folder_of_the_json_is_made_and_one_that_cannot_be_does_not_lose_the_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = dump(tmp_path / "d", [record("p_0_0", 1.0)])
    assert main([str(folder), "--json", str(tmp_path / "new/deep/out.json")]) == 0
    assert json.loads((tmp_path / "new/deep/out.json").read_text())
    capsys.readouterr()
    for wrong in (Path("/dev/null/x/out.json"), folder):
        assert main([str(folder), "--json", str(wrong)]) == 1
        said = capsys.readouterr()
        assert a_line_says(said.out, "1 answers", "1 prompts")
        assert a_line_says(said.err, wrong, "cannot be written")
        assert len(said.err.splitlines()) == 1


WRONG = {
    "no dump": ([], "--step=7", "holds no dump of step 7; found steps '5'"),
    "an unknown reward": (
        [record("p_0_0", 1.0)],
        "--right=correct",
        "unknown reward 'correct' (did you mean 'correctness'?)",
    ),
    "different rewards": ([record("p_0_0", 1.0), record("q_0_0", 1.0, extra=1)], "--above=1", "different rewards"),
    "another file": ([{"step": 1}], "--above=1", "line 1"),
    "an empty file": ([], "--above=1", "is empty"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_read_is_said(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records, argument, message = WRONG[case]
    assert main([str(dump(tmp_path / "d", records)), argument]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variables", "response"),
    [
        ({}, 1024),
        ({"ALGORITHM": "dgpo", "DGAE": "False", "BALANCE": "none"}, 1024),
        ({"ALGORITHM": "hadw", "LOSS": "gspo"}, 4096),
        ({"ALGORITHM": "drgrpo"}, 3000),
        ({"ALGORITHM": "grpo", "SETUP": "hadw"}, 4096),
    ],
)
def test_a_model_is_evaluated_with_the_lengths_of_its_training(
    variables: dict[str, str], response: int, tmp_path: Path
) -> None:
    given = {**variables, "DRY_RUN": "1", "EVALUATION_DIR": str(tmp_path / "e"), "PASS_SAMPLES": "2"}
    done = launchers.run_script("evaluate.sh", "math", **given)
    assert done.returncode == 0, done.stderr
    commands = [shlex.split(line) for line in done.stdout.splitlines()]
    assert len(commands) == 2  # greedy, and sampled for pass@k
    for command in commands:
        assert f"data.max_response_length={response}" in command
        assert "data.max_prompt_length=1024" in command  # at 512 the longest problems would be left out
        assert "algorithm.adv_estimator=grpo" in command
