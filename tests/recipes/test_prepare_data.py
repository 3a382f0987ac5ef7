"""`prepare_data.py` of GSM8K, and what all recipes' do with files that are missing or torn."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.facts import a_line_says, facts, says
from tests.recipes import hub
from tests.recipes.preparing import (
    CALL,
    GSM8K,
    gsm8k_clone,
    prepare,
    report,
    rlla,
    rows,
    run,
    script,
    toolrl_clone,
    write,
)
from verl_ext.rewards import gsm8k


def test_gsm8k_from_a_clone(tmp_path: Path) -> None:
    text = prepare("gsm8k", gsm8k_clone(tmp_path / "clone"), tmp_path / "out")
    assert "train.parquet: 3 rows" in text
    train = rows(tmp_path / "out/train.parquet")
    assert [row["reward_model"]["ground_truth"] for row in train] == ["18", "1,000", "-5"]
    assert train[1]["extra_info"] == {"split": "train", "index": 1}
    assert train[1]["data_source"] == "openai/gsm8k"
    assert train[1]["reward_model"]["style"] == "rule"
    assert [message["role"] for message in train[0]["prompt"]] == ["system", "user"]
    assert train[0]["prompt"][1]["content"] == "Half of 36?"
    assert len(rows(tmp_path / "out/test.parquet")) == 1
    for row in train:
        truth = row["reward_model"]["ground_truth"]
        answer = f"<think>t</think>\n<answer>{truth}</answer>"
        assert gsm8k.compute_score("d", answer, truth, row["extra_info"])["score"] == 3


def test_the_answer_format_in_the_prompt_is_the_one_that_is_rewarded() -> None:
    shown = script("gsm8k").SYSTEM.partition(":\n")[2]
    assert gsm8k.compute_score("d", shown, "1")["format"] == 1


def test_gsm8k_bad_rows_are_named_with_their_reasons_and_nothing_is_written(tmp_path: Path) -> None:
    bad = [
        *GSM8K,
        {"question": "q", "answer": "no mark"},
        {"question": " ", "answer": "#### 3"},
        {"question": "q", "answer": "#### 1/2"},
        {"question": "q", "answer": None},
    ]
    done = run("gsm8k", gsm8k_clone(tmp_path / "clone", bad), tmp_path / "out")
    assert done.returncode == 1
    assert says(done.stderr, "4 of 8 rows", "--skip_bad_rows")
    assert a_line_says(done.stderr, "train row 3", "'answer'", "'####'")
    assert a_line_says(done.stderr, "train row 4", "'question'", "string")
    assert a_line_says(done.stderr, "train row 5", "'openai/gsm8k'", "'1/2'", "integer")
    assert a_line_says(done.stderr, "train row 6", "'answer'", "string", "'None'")
    assert not (tmp_path / "out").exists()


def test_bad_rows_are_left_out_where_that_is_asked_for_counted_and_listed(tmp_path: Path) -> None:
    bad = [{"question": "q", "answer": "no mark"}, *GSM8K]
    done = run("gsm8k", gsm8k_clone(tmp_path / "clone", bad), tmp_path / "out", "--skip_bad_rows")
    assert done.returncode == 0, done.stderr
    assert " 1 bad rows" in done.stdout
    assert a_line_says(done.stdout, "train row 0", "'answer'", "'####'")
    assert [row["extra_info"]["index"] for row in rows(tmp_path / "out/train.parquet")] == [1, 2, 3]
    counts = report(tmp_path / "out")["splits"]["train"]
    assert (counts["read"], counts["written"], counts["bad"]) == (4, 3, 1)
    assert counts["bad_rows"][0]["index"] == 0
    assert "GSM8K train: 100%" in done.stderr  # the progress bar


def test_a_split_of_bad_rows_alone_is_an_error(tmp_path: Path) -> None:
    clone = gsm8k_clone(tmp_path / "clone", [{"question": "q", "answer": "no mark"}])
    done = run("gsm8k", clone, tmp_path / "out", "--skip_bad_rows")
    assert done.returncode == 1
    assert a_line_says(done.stderr, "no row", "train")


def test_gsm8k_from_jsonl_as_openai_published_it(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write(tmp_path / f"data/{split}.jsonl", GSM8K)
    prepare("gsm8k", tmp_path / "data", tmp_path / "out")
    assert len(rows(tmp_path / "out/test.parquet")) == 3


def test_missing_files_columns_and_torn_files_are_named(tmp_path: Path) -> None:
    from verl_ext.errors import DataError

    with pytest.raises(DataError, match=facts(tmp_path / "nowhere", "https://huggingface.co")):
        prepare("gsm8k", tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=facts("split 'train'", "main/train-*.parquet", "none")):
        prepare("gsm8k", tmp_path / "empty", tmp_path / "out")
    write(tmp_path / "other/train.jsonl", [{"question": "q", "solution": "s"}])
    with pytest.raises(DataError, match=facts("train.jsonl", "row 0", "'answer'", "'question', 'solution'")):
        prepare("gsm8k", tmp_path / "other", tmp_path / "out")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn/train.jsonl").write_text('{"question": "q", "answer": "#### 1"}\n{"question": ')
    with pytest.raises(DataError, match=facts("train.jsonl", "line 2", "JSON")):
        prepare("gsm8k", tmp_path / "torn", tmp_path / "out")
    (tmp_path / "lfs").mkdir()
    (tmp_path / "lfs/train.parquet").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(DataError, match=facts("train.parquet", "git lfs pull")):
        prepare("gsm8k", tmp_path / "lfs", tmp_path / "out")


def test_gsm8k_from_the_hub(tmp_path: Path) -> None:
    gsm8k_clone(tmp_path / "hub/openai/gsm8k")
    with hub.serving(tmp_path / "hub") as (address, fetched):
        network = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
        done = run("gsm8k", None, tmp_path / "out", **network)
        assert done.returncode == 0, done.stderr
        # Of the repository only the files that are read.
        assert sorted(set(fetched)) == ["main/test-00000-of-00001.parquet", "main/train-00000-of-00001.parquet"]
        missing = run("gsm8k", None, tmp_path / "other", "--hub_dataset", "nobody/nothing", **network)
    assert len(rows(tmp_path / "out/train.parquet")) == 3
    assert missing.returncode == 1
    assert "'nobody/nothing'" in missing.stderr
    assert "use --local_dataset_path" in missing.stderr


@pytest.mark.parametrize("recipe", ["tool_calling", "gsm8k"])
def test_verl_reads_the_files(recipe: str, tmp_path: Path) -> None:
    """verl's own data set class on what the script wrote: prompts, and what its reward manager looks for."""
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset

    from recipes.quickstart.prepare_data import make_tokenizer

    source = gsm8k_clone(tmp_path / "in") if recipe == "gsm8k" else toolrl_clone(tmp_path / "in", [rlla(CALL)])
    prepare(recipe, source, tmp_path / "out")
    config = OmegaConf.create({"max_prompt_length": 2048, "filter_overlong_prompts": True})
    data = RLHFDataset(str(tmp_path / "out/train.parquet"), make_tokenizer(), config)
    assert len(data) == len(rows(tmp_path / "out/train.parquet"))
    assert data[0]["raw_prompt"][0]["role"] == "system"
    assert data[0]["index"] == 0
    assert data[0]["reward_model"]["ground_truth"]
