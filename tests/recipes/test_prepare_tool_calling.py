"""`prepare_data.py` of tool calling."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.facts import a_line_says, says
from tests.recipes.preparing import (
    CALL,
    RESPONSE,
    prepare,
    rlla,
    rows,
    run,
    toolrl_clone,
    write,
)
from verl_ext.rewards import tool_calling


@pytest.mark.parametrize("below", ["", "dataset/rlla_4k"])
def test_tool_calling_from_a_clone(tmp_path: Path, below: str) -> None:
    clone = toolrl_clone(tmp_path / "clone", [rlla(CALL), rlla(RESPONSE, 1)])
    prepare("tool_calling", clone / below, tmp_path / "out")
    train = rows(tmp_path / "out/train.parquet")
    assert [row["reward_model"]["ground_truth"] for row in train] == [CALL, RESPONSE]
    assert train[0]["prompt"] == rlla(CALL)["prompt"]
    assert train[1]["extra_info"] == {"split": "train", "index": 1}
    assert train[0]["data_source"] == "rlla"
    for row in train:
        truth = row["reward_model"]["ground_truth"]
        expected = 4 if truth == CALL else 1
        assert tool_calling.compute_score("rlla", truth, truth, row["extra_info"])["score"] == expected


def test_tool_calling_bad_rows_are_named(tmp_path: Path) -> None:
    from verl_ext.errors import DataError

    bad = [
        rlla(CALL),
        rlla(CALL.replace('{"name"', '{"nam"'), 1),
        rlla("just text", 2),
        rlla(CALL, 3, prompt=[]),
        rlla(CALL, 4, prompt=[{"role": "user", "content": ""}]),
    ]
    clone = toolrl_clone(tmp_path / "clone", bad)
    with pytest.raises(DataError) as caught:
        prepare("tool_calling", clone, tmp_path / "out")
    message = str(caught.value)
    assert says(message, "4 of 6 rows")
    assert a_line_says(message, "train row 1", "'rlla'", "tool call 1", "string 'name'")
    assert a_line_says(message, "train row 2", "'rlla'", "well-formed")
    assert a_line_says(message, "train row 3", "prompt", "no message")
    assert a_line_says(message, "train row 4", "prompt", "role")


def test_tool_calling_from_the_raw_file_makes_the_split_of_toolrl(tmp_path: Path) -> None:
    records = [{"instruction": f"i{n}", "input": f" u{n}\n", "output": CALL} for n in range(160)]
    write(tmp_path / "clone/dataset/rlla_4k_raw/rlla_rl.json", records)
    done = run("tool_calling", tmp_path / "clone", tmp_path / "out", "--raw")
    assert done.returncode == 0, done.stderr
    # ToolRL's dataset/rlla_4k_raw/rlla.py: np.random.seed(31415), np.random.shuffle(dataset), 2 % for the test.
    shuffled = list(range(160))
    np.random.RandomState(31415).shuffle(shuffled)
    test_rows = int(160 * 0.02)
    assert test_rows == 3
    train, test = rows(tmp_path / "out/train.parquet"), rows(tmp_path / "out/test.parquet")
    assert [row["extra_info"]["index"] for row in train] == shuffled[:-3]
    assert [row["extra_info"]["index"] for row in test] == shuffled[-3:]
    assert [message["content"] for message in test[0]["prompt"]] == [f"i{shuffled[-3]}", f" u{shuffled[-3]}\n"]
    assert test[0]["ability"] == "math"


def test_tool_calling_is_on_no_hub_and_says_where_it_is(tmp_path: Path) -> None:
    done = run("tool_calling", None, tmp_path / "out")
    assert done.returncode == 1
    assert says(done.stderr, "https://github.com/qiancheng0/ToolRL", "--local_dataset_path")
