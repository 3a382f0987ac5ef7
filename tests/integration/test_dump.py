"""Dumped advantages: what stands in the files, and where they are; also beside verl's own estimators."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from tests.batches import ACC, FMT, LENGTHS, UIDS
from tests.calls import call
from tests.facts import says
from verl_ext import Settings, build
from verl_ext.advantages import dump
from verl_ext.advantages.dump import DumpFolder
from verl_ext.advantages.log import record_step_of_verl_estimator
from verl_ext.advantages.table import Table
from verl_ext.core.row_index import RowIndex
from verl_ext.run import Run

parquet = pytest.importorskip("pyarrow.parquet")
FIELDS = {"acc": np.array(ACC), "fmt": np.array(FMT)}


def made(folder: Path, name: str = "gdpo", step: int = 7, start: int = 0, **more: Any) -> Run:
    """The run of a trainer at a step."""
    algorithm = {"rewards": {"keys": ["acc", "fmt"], "weights": [2.0, 1.0], "accuracy_key": "acc"}, **more}
    algorithm["verl_ext"] = {"dump_dir": str(folder)}
    settings, config = Settings.parse(algorithm), OmegaConf.create({"algorithm": algorithm | {"adv_estimator": name}})
    trainer = SimpleNamespace(global_steps=step, local_trigger_step=0, config=config)
    return Run(name, settings, build(name, settings), trainer=trainer, after_step=start)


def dumped(run: Run) -> np.ndarray:
    return call(run.name, [0.0] * 12, UIDS, LENGTHS, components=FIELDS, run=run).rows


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def read(folder: Path) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """The columns of the only file, and its metadata."""
    (path,) = folder.rglob("*.parquet")
    table = parquet.read_table(path)
    return table.to_pydict(), json.loads(table.schema.metadata[b"verl_ext"])


def test_a_file_holds_the_rewards_the_groups_and_the_advantage_of_every_trajectory(tmp_path: Path) -> None:
    rows = dumped(made(tmp_path / "new"))
    assert files(tmp_path / "new") == ["from-0-0/advantages-00000007-000.parquet"]
    table, about = read(tmp_path / "new")
    assert table["uid"] == UIDS
    assert set(table["step"]) == {7}
    assert table["reward/acc"] == ACC
    assert table["group_mean/fmt"] == [0.5] * 4 + [0.75] * 4 + [0.25] * 4
    assert table["group_std/acc"] == pytest.approx([0.5] * 8 + [0.0] * 4)  # 3/4 of three parts: 0.25
    assert table["group_varies/acc"] == [True] * 8 + [False] * 4
    assert table["total"] == [2 * a + f for a, f in zip(ACC, FMT, strict=True)]
    assert table["tokens"] == LENGTHS
    assert table["responses"] == [4] * 12
    np.testing.assert_array_equal(table["advantage"], rows)
    assert not {"accuracy", "estimator", "raw/acc"} & table.keys()
    assert (about["estimator"], about["step"], about["update"]) == ("gdpo", 7, 0)
    assert Settings.parse(about["algorithm"], loss_agg_mode=about["loss_agg_mode"]).rewards.weights == (2.0, 1.0)


def test_a_file_holds_the_accuracy_and_the_update_within_the_step(tmp_path: Path) -> None:
    run = made(tmp_path, "hadw")
    run.trainer.local_trigger_step = 1
    dumped(run)
    table, about = read(tmp_path)
    assert files(tmp_path) == ["from-0-0/advantages-00000007-001.parquet"]
    assert (set(table["update"]), about["update"]) == ({1}, 1)
    assert table["accuracy"] == ACC


def test_each_start_and_each_resume_has_a_folder_and_nothing_is_deleted(tmp_path: Path) -> None:
    for start, steps in ((0, (1, 2, 3)), (2, (3, 4)), (2, (3,)), (0, (1,))):
        run = made(tmp_path, start=start)
        for step in steps:
            run.trainer.global_steps = step
            dumped(run)
    expected = ["from-0-0 1", "from-0-0 2", "from-0-0 3", "from-0-1 1", "from-2-0 3", "from-2-0 4", "from-2-1 3"]
    assert files(tmp_path) == [f"{a}/advantages-{int(b):08d}-000.parquet" for a, b in map(str.split, expected)]


def test_every_file_states_when_its_start_began_and_when_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dump, "time", SimpleNamespace(time=map(float, range(1, 100)).__next__))
    for start in (0, 2):
        run = made(tmp_path, start=start)
        for step in (start + 1, start + 2):
            run.trainer.global_steps = step
            dumped(run)
    paths = sorted(tmp_path.rglob("*.parquet"))
    metadata = [json.loads(parquet.read_schema(path).metadata[b"verl_ext"]) for path in paths]
    assert [(entries["step"], entries["after_step"]) for entries in metadata] == [(1, 0), (2, 0), (3, 2), (4, 2)]
    began = [entries["started_at"] for entries in metadata]
    written = [entries["written_at"] for entries in metadata]
    assert began[0] == began[1] < written[0] < written[1] < began[2] == began[3] < written[2] < written[3]


def test_two_starts_at_once_have_a_folder_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mkdir = Path.mkdir

    def second(path: Path, *args: Any, **more: Any) -> None:
        if path.name == "from-0-0":  # the other start is a moment earlier
            mkdir(path, parents=True, exist_ok=True)
        mkdir(path, *args, **more)

    monkeypatch.setattr(Path, "mkdir", second)
    dumped(made(tmp_path / "new"))
    assert files(tmp_path / "new") == ["from-0-1/advantages-00000007-000.parquet"]


@pytest.mark.parametrize("kind", [OSError, ValueError])  # pyarrow's errors are of several kinds
def test_a_disk_that_fails_stops_the_dump_and_not_the_run(
    kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise kind("No space left on device")

    monkeypatch.setattr(DumpFolder, "save", full)
    run = made(tmp_path)
    with caplog.at_level(logging.WARNING, "verl_ext"):
        for _ in range(2):
            assert dumped(run).any()
    (record,) = caplog.records
    assert says(record.getMessage(), f"algorithm.verl_ext.dump_dir={tmp_path}", "No space left on device", "no more")


KEYS = ["a_0_0", "a_1_0", "a_1_1", "pad_0_0", "b_0_0"]
"""Session a_1 has two outputs; a row of padding stands in between."""
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 0, 1], [0, 0, 0], [1, 1, 0]])
ADVANTAGES = torch.tensor([[0.5, 1.0, 1.5], [2.0, 9.0, 9.0], [4.0, 9.0, 6.0], [9.0, 9.0, 9.0], [-3.0, -1.0, 9.0]])
"""As with a critic, they differ from token to token; the 9 are outside of the mask."""
SCORES = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 2.0], [0.0, 0.0, 0.0], [0.0, 3.0, 0.0]])


def watched(folder: Path) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """The metrics, and the rows of the dump."""
    rows = RowIndex.of_sessions(KEYS, np.array([key.startswith("pad") for key in KEYS]))
    settings = Settings.parse({"rewards": {"keys": ["acc"]}, "verl_ext": {"dump_dir": str(folder)}})
    fields = {"acc": np.array([1.0, 0.0, 1.0])}
    rewards = Table(settings=settings.rewards, row_index=rows, labels=["a", "a", "b"], fields=fields)
    run = Run("gae", settings, None, trainer=SimpleNamespace(global_steps=3, local_trigger_step=0))
    given = {"advantages": ADVANTAGES, "response_mask": MASK, "token_level_scores": SCORES}
    record_step_of_verl_estimator(run, rewards, lambda: given)
    (path,) = folder.rglob("*.parquet")
    return run.metrics, parquet.read_table(path).to_pylist()


def test_each_trajectory_has_its_own_reward_tokens_score_and_mean_advantage(tmp_path: Path) -> None:
    metrics, found = watched(tmp_path)
    assert [(row["uid"], row["reward/acc"]) for row in found] == [("a", 1.0), ("a", 0.0), ("b", 1.0)]
    assert [row["tokens"] for row in found] == [3, 3, 2]  # of both outputs of the session
    assert [row["total"] for row in found] == [1.0, 2.0, 3.0]
    assert [row["advantage"] for row in found] == pytest.approx([1.0, 5.0, -2.0])
    assert [row["group_std/acc"] for row in found] == pytest.approx([0.5**0.5, 0.5**0.5, 0.0])
    assert metrics["reward/acc/mean"] == pytest.approx(2 / 3)


def test_a_batch_of_padding_alone_has_nothing_to_show() -> None:
    run = Run("grpo", Settings.parse({"rewards": {"keys": ["acc"]}}), None)
    record_step_of_verl_estimator(
        run,
        Table(settings=run.settings.rewards, row_index=RowIndex.of_sessions(["pad_0_0"], np.array([True])), labels=[]),
        None,
    )
    assert run.metrics == {}
