"""Dumps of advantages: the content of the files and their folders, also with verl's own estimators."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

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


def run_with_dump(folder: Path, name: str = "gdpo", step: int = 7, after_step: int = 0) -> Run:
    """Return the run of a trainer that started after a step, at another step."""
    algorithm = {
        "rewards": {"keys": ["acc", "fmt"], "weights": [2.0, 1.0], "accuracy_key": "acc"},
        "verl_ext": {"dump_dir": str(folder)},
    }
    settings = Settings.parse(algorithm)
    config = OmegaConf.create({"algorithm": algorithm | {"adv_estimator": name}})
    trainer = SimpleNamespace(global_steps=step, local_trigger_step=0, config=config)
    return Run(name, settings, build(name, settings), trainer=trainer, after_step=after_step)


def dump_worked_example(run: Run) -> np.ndarray:
    """Compute and dump the worked example of the specification. Return the advantage of each response."""
    fields = {"acc": np.array(ACC), "fmt": np.array(FMT)}
    return call(run.name, [0.0] * 12, UIDS, LENGTHS, components=fields, run=run).rows


def dump_steps(run: Run, steps: list[int]) -> None:
    """Compute and dump the worked example in each of the steps."""
    for step in steps:
        run.trainer.global_steps = step
        dump_worked_example(run)


def files_of(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def read_only_file(folder: Path) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """Return the columns of the only file, and its metadata."""
    (path,) = folder.rglob("*.parquet")
    table = parquet.read_table(path)
    return table.to_pydict(), json.loads(table.schema.metadata[b"verl_ext"])


def test_a_file_has_the_rewards_groups_and_advantage_of_each_trajectory(tmp_path: Path) -> None:
    advantages = dump_worked_example(run_with_dump(tmp_path / "new"))
    assert files_of(tmp_path / "new") == ["from-0-0/advantages-00000007-000.parquet"]
    table, _ = read_only_file(tmp_path / "new")
    assert table["uid"] == UIDS
    assert table["step"] == [7] * 12
    assert table["reward/acc"] == ACC
    assert table["group_mean/fmt"] == [0.5] * 4 + [0.75] * 4 + [0.25] * 4
    # The accuracies [1000] and [1110] deviate from their mean by 0.75 once and by 0.25 three times.
    std = ((0.75**2 + 3 * 0.25**2) / 3) ** 0.5
    assert table["group_std/acc"] == pytest.approx([std] * 8 + [0.0] * 4)
    assert table["group_varies/acc"] == [True] * 8 + [False] * 4
    assert table["total"] == [3.0, 1.0, 0.0, 0.0, 3.0, 2.0, 3.0, 1.0, 0.0, 1.0, 0.0, 0.0]
    assert table["tokens"] == LENGTHS
    assert table["responses"] == [4] * 12
    np.testing.assert_array_equal(table["advantage"], advantages)
    assert not {"accuracy", "estimator", "raw/acc"} & table.keys()


def test_the_metadata_of_a_file_has_the_settings_of_the_run(tmp_path: Path) -> None:
    dump_worked_example(run_with_dump(tmp_path))
    _, metadata = read_only_file(tmp_path)
    assert metadata["estimator"] == "gdpo"
    assert metadata["step"] == 7
    assert metadata["update"] == 0
    settings = Settings.parse(metadata["algorithm"], loss_agg_mode=metadata["loss_agg_mode"])
    assert settings.rewards.weights == (2.0, 1.0)


def test_a_file_has_the_accuracy_and_the_update_within_the_step(tmp_path: Path) -> None:
    run = run_with_dump(tmp_path, "hadw")
    run.trainer.local_trigger_step = 1
    dump_worked_example(run)
    table, metadata = read_only_file(tmp_path)
    assert files_of(tmp_path) == ["from-0-0/advantages-00000007-001.parquet"]
    assert table["update"] == [1] * 12
    assert metadata["update"] == 1
    assert table["accuracy"] == ACC


def test_each_start_and_resume_has_its_own_folder(tmp_path: Path) -> None:
    dump_steps(run_with_dump(tmp_path, after_step=0), [1, 2, 3])
    dump_steps(run_with_dump(tmp_path, after_step=2), [3, 4])
    dump_steps(run_with_dump(tmp_path, after_step=2), [3])
    dump_steps(run_with_dump(tmp_path, after_step=0), [1])
    assert files_of(tmp_path) == [
        "from-0-0/advantages-00000001-000.parquet",
        "from-0-0/advantages-00000002-000.parquet",
        "from-0-0/advantages-00000003-000.parquet",
        "from-0-1/advantages-00000001-000.parquet",
        "from-2-0/advantages-00000003-000.parquet",
        "from-2-0/advantages-00000004-000.parquet",
        "from-2-1/advantages-00000003-000.parquet",
    ]


def test_each_file_states_when_its_run_started_and_when_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter(range(1, 100))
    monkeypatch.setattr(dump, "time", SimpleNamespace(time=lambda: float(next(seconds))))
    dump_steps(run_with_dump(tmp_path, after_step=0), [1, 2])
    dump_steps(run_with_dump(tmp_path, after_step=2), [3, 4])
    paths = sorted(tmp_path.rglob("*.parquet"))
    metadata = [json.loads(parquet.read_schema(path).metadata[b"verl_ext"]) for path in paths]
    assert [entry["step"] for entry in metadata] == [1, 2, 3, 4]
    assert [entry["after_step"] for entry in metadata] == [0, 0, 2, 2]
    started = [entry["started_at"] for entry in metadata]
    written = [entry["written_at"] for entry in metadata]
    assert started[0] == started[1]
    assert started[2] == started[3]
    assert started[0] < written[0] < written[1] < started[2] < written[2] < written[3]


def test_two_simultaneous_starts_have_different_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mkdir = Path.mkdir

    def mkdir_after_other_start(path: Path, *args: Any, **options: Any) -> None:
        if path.name == "from-0-0":
            mkdir(path, parents=True, exist_ok=True)
        mkdir(path, *args, **options)

    monkeypatch.setattr(Path, "mkdir", mkdir_after_other_start)
    dump_worked_example(run_with_dump(tmp_path / "new"))
    assert files_of(tmp_path / "new") == ["from-0-1/advantages-00000007-000.parquet"]


@pytest.mark.parametrize("kind", [OSError, ValueError])  # pyarrow raises errors of several kinds
def test_a_failing_disk_stops_the_dump_but_not_the_run(
    kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise kind("No space left on device")

    monkeypatch.setattr(DumpFolder, "save", fail)
    run = run_with_dump(tmp_path)
    with caplog.at_level(logging.WARNING, "verl_ext"):
        for _ in range(2):
            assert dump_worked_example(run).any()
    (record,) = caplog.records
    assert says(record.getMessage(), f"algorithm.verl_ext.dump_dir={tmp_path}", "No space left on device", "no more")


class DumpOfVerl(NamedTuple):
    """The metrics and the dumped rows of a batch whose advantages verl has computed."""

    metrics: dict[str, float]
    rows: list[dict[str, Any]]

    def column(self, name: str) -> list[Any]:
        return [row[name] for row in self.rows]


# Session a_1 has two outputs, and a row of padding follows.
ROWS_OF_VERL = RowIndex.of_sessions(
    ["a_0_0", "a_1_0", "a_1_1", "pad_0_0", "b_0_0"], np.array([False, False, False, True, False])
)
BATCH_OF_VERL = {
    "response_mask": torch.tensor([[1, 1, 1], [1, 0, 0], [1, 0, 1], [0, 0, 0], [1, 1, 0]]),
    # As with a critic, advantages differ between tokens. A 9 is outside of the mask.
    "advantages": torch.tensor([[0.5, 1.0, 1.5], [2.0, 9.0, 9.0], [4.0, 9.0, 6.0], [9.0, 9.0, 9.0], [-3.0, -1.0, 9.0]]),
    "token_level_scores": torch.tensor(
        [[0.0, 0.0, 1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 2.0], [0.0, 0.0, 0.0], [0.0, 3.0, 0.0]]
    ),
}


@pytest.fixture
def dump_of_verl(tmp_path: Path) -> DumpOfVerl:
    """Return the dump of `BATCH_OF_VERL`, whose advantages verl's gae has computed."""
    settings = Settings.parse({"rewards": {"keys": ["acc"]}, "verl_ext": {"dump_dir": str(tmp_path)}})
    table = Table(
        settings=settings.rewards,
        row_index=ROWS_OF_VERL,
        labels=["a", "a", "b"],
        fields={"acc": np.array([1.0, 0.0, 1.0])},
    )
    run = Run("gae", settings, None, trainer=SimpleNamespace(global_steps=3, local_trigger_step=0))
    record_step_of_verl_estimator(run, table, lambda: BATCH_OF_VERL)
    (path,) = tmp_path.rglob("*.parquet")
    return DumpOfVerl(run.metrics, parquet.read_table(path).to_pylist())


def test_verls_advantages_are_dumped_per_trajectory(dump_of_verl: DumpOfVerl) -> None:
    assert dump_of_verl.column("uid") == ["a", "a", "b"]
    assert dump_of_verl.column("reward/acc") == [1.0, 0.0, 1.0]
    assert dump_of_verl.column("tokens") == [3, 1 + 2, 2]
    assert dump_of_verl.column("total") == [1.0, 2.0, 3.0]
    # The mean over the tokens of the last output of each session.
    mean_advantages = [(0.5 + 1.0 + 1.5) / 3, (4.0 + 6.0) / 2, (-3.0 - 1.0) / 2]
    assert dump_of_verl.column("advantage") == pytest.approx(mean_advantages)
    std_of_a = 0.5**0.5
    assert dump_of_verl.column("group_std/acc") == pytest.approx([std_of_a, std_of_a, 0.0])
    assert dump_of_verl.metrics["reward/acc/mean"] == pytest.approx(2 / 3)


def test_a_batch_of_padding_alone_is_neither_logged_nor_dumped() -> None:
    settings = Settings.parse({"rewards": {"keys": ["acc"]}})
    run = Run("grpo", settings, None)
    rows = RowIndex.of_sessions(["pad_0_0"], np.array([True]))
    record_step_of_verl_estimator(run, Table(settings=settings.rewards, row_index=rows, labels=[]), None)
    assert run.metrics == {}
