"""`prepare_data.py` of mathematics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.facts import a_line_says, says
from tests.recipes import hub
from tests.recipes.preparing import (
    prepare,
    report,
    rows,
    run,
    script,
    write,
)
from verl_ext.rewards import boxed_math


# MATH: columns problem, level, type, solution; MATH-500: problem, solution, answer, subject, level, unique_id
def math(solution: str, level: str = "Level 5") -> dict[str, Any]:
    return {"problem": "What is it?", "level": level, "type": "Algebra", "solution": solution}


MATH500 = [
    {
        "problem": "Half of one?",
        "solution": r"It is $\boxed{\frac{1}{2}}$.",
        "answer": r"\frac{1}{2}",
        "subject": "Algebra",
        "level": 2,
        "unique_id": "test/algebra/1.json",
    }
]


def math_folder(folder: Path, train: list[dict[str, Any]]) -> Path:
    write(folder / "MATH-lighteval/data/train-00000-of-00001.parquet", train)
    write(folder / "MATH-lighteval/data/test-00000-of-00001.parquet", [math(r"\boxed{0}")])
    write(folder / "MATH-500/test.jsonl", MATH500)
    return folder


def prepare_math(source: Path, target: Path, *levels: int) -> str:
    module = script("math")
    return prepare("math", source, target, plan=module.plan(levels or module.LEVELS))


def test_maths_from_clones_of_both(tmp_path: Path) -> None:
    source = math_folder(
        tmp_path / "maths", [math(r"first \boxed{3}, no: $\boxed{x^2+1}$."), math(r"\boxed{5}", "Level ?")]
    )
    prepare_math(source, tmp_path / "out")
    train, test = rows(tmp_path / "out/train.parquet"), rows(tmp_path / "out/math500.parquet")
    assert [row["reward_model"]["ground_truth"] for row in train] == ["x^2+1", "5"]
    assert [row["extra_info"]["level"] for row in train] == [5, 0]
    assert test[0]["reward_model"]["ground_truth"] == r"\frac{1}{2}"
    assert test[0]["data_source"] == "HuggingFaceH4/MATH-500"
    assert boxed_math.compute_score("d", r"\boxed{0.5}", test[0]["reward_model"]["ground_truth"])["score"] == 1


def test_maths_boxes_without_braces_framed_boxes_and_repeating_decimals_are_golds(tmp_path: Path) -> None:
    solutions = [r"so $x = \boxed 12$.", r"Hence $\fbox{6}$.", r"It is $\boxed{0.\overline{72}}$.", r"$\boxed5$"]
    prepare_math(math_folder(tmp_path / "maths", [math(text) for text in solutions]), tmp_path / "out")
    golds = [row["reward_model"]["ground_truth"] for row in rows(tmp_path / "out/train.parquet")]
    assert golds == ["12", "6", r"0.\overline{72}", "5"]
    for solution, gold in zip(solutions, golds, strict=True):
        assert boxed_math.compute_score("d", solution, gold)["score"] == 1


def test_maths_levels_leave_out_what_was_not_asked_for_and_say_so(tmp_path: Path) -> None:
    solutions = [math(rf"\boxed{{{n}}}", f"Level {n}") for n in (1, 2, 3, 4, 5)]
    text = prepare_math(math_folder(tmp_path / "maths", solutions), tmp_path / "out", 3, 4, 5)
    assert a_line_says(text, "train.parquet", "3 rows", "2 filtered")
    assert [row["extra_info"]["index"] for row in rows(tmp_path / "out/train.parquet")] == [2, 3, 4]
    assert report(tmp_path / "out")["splits"]["train"]["not_asked_for"] == 2
    assert len(rows(tmp_path / "out/math500.parquet")) == 1


def test_maths_bad_rows_are_named(tmp_path: Path) -> None:
    from verl_ext.errors import DataError

    bad = [
        math("it is 3"),
        math(r"\boxed{3"),
        math(r"\boxed{}"),
        math(r"\boxed{" + "9" * 3000 + "}"),
        math(r"\boxed{3}", "hard"),
        math(r"\boxed{3}"),
        math(r"$\boxed{3}$, that is $\boxed \frac62$"),
        math(r"\boxed 5x+3"),
    ]
    with pytest.raises(DataError) as caught:
        prepare_math(math_folder(tmp_path / "maths", bad), tmp_path / "out")
    message = str(caught.value)
    assert says(message, "7 of 9 rows")
    for index in (0, 1, 2):
        assert a_line_says(message, f"train row {index}", "'solution'", r"\boxed{...}")
    assert a_line_says(message, "train row 3", "'DigitalLearningGmbH/MATH-lighteval'", 3000)
    for index in (6, 7):
        assert a_line_says(message, f"train row {index}", "'DigitalLearningGmbH/MATH-lighteval'", r"\boxed{...}")
    assert a_line_says(message, "train row 4", "'level'", "'hard'", "'Level 1' to 'Level 5'")


def test_maths_from_the_hub_takes_both_data_sets(tmp_path: Path) -> None:
    write(tmp_path / "hub/DigitalLearningGmbH/MATH-lighteval/data/train-00000-of-00001.parquet", [math(r"\boxed{3}")])
    write(tmp_path / "hub/HuggingFaceH4/MATH-500/test.jsonl", MATH500)
    with hub.serving(tmp_path / "hub") as (address, _):
        network = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
        done = run("math", None, tmp_path / "out", "--levels", "5", **network)
    assert done.returncode == 0, done.stderr
    assert len(rows(tmp_path / "out/train.parquet")) == len(rows(tmp_path / "out/math500.parquet")) == 1
