"""Dumped advantages: what stands in the files, how large they get, and the report on them."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.batches import ACC, FMT, LENGTHS, UIDS
from tests.calls import call
from tests.facts import a_line_says, facts, says
from tests.integration.configs import compose
from verl_ext.cli import main
from verl_ext.core.state import RunState
from verl_ext.errors import ConfigurationError
from verl_ext.integration.advantage import dump
from verl_ext.integration.advantage.context import StepContext
from verl_ext.integration.config.checks import check_run
from verl_ext.integration.trainers.attach import attach, load_state

parquet = pytest.importorskip("pyarrow.parquet")
FIELDS = {"acc": np.array(ACC), "fmt": np.array(FMT)}
KEYS = "+algorithm.rewards.keys=[acc,fmt]"


def dumped(folder, name="gdpo", step=7, update=0, version=None, state=None, uids=UIDS, **settings):
    config = {
        "rewards": {"keys": ["acc", "fmt"], "weights": [2.0, 1.0]},
        "verl_ext": {"dump_dir": str(folder)} | settings,
    }
    trainer = SimpleNamespace(global_steps=step, local_trigger_step=update, current_param_version=version)
    context = StepContext(trainer=trainer, fields=FIELDS)
    return call(name, [0.0] * 12, uids, LENGTHS, config=config, context=context, state=state)


def test_a_file_holds_the_rewards_the_groups_and_the_advantage_of_every_trajectory(tmp_path):
    found = dumped(tmp_path / "new")
    (path,) = (tmp_path / "new").iterdir()
    assert path.name == "advantages-00000007-000.parquet"
    table = parquet.read_table(path).to_pydict()
    assert table["uid"] == UIDS
    assert set(table["step"]) == {7}
    assert set(table["estimator"]) == {"gdpo"}
    assert table["reward/acc"] == ACC
    assert table["group_mean/fmt"] == [0.5] * 4 + [0.75] * 4 + [0.25] * 4
    assert table["group_std/acc"] == pytest.approx([0.5] * 8 + [0.0] * 4)  # 3/4 of three parts: 0.25
    assert table["group_varies/acc"] == [True] * 8 + [False] * 4
    assert table["total"] == [2 * a + f for a, f in zip(ACC, FMT, strict=True)]
    assert table["tokens"] == LENGTHS
    assert table["responses"] == [4] * 12
    np.testing.assert_array_equal(table["advantage"], found.rows)
    assert "accuracy" not in table


def test_uids_that_are_tensors_are_written_by_value(tmp_path):
    dumped(tmp_path, uids=[torch.tensor(at // 4) for at in range(12)])
    (path,) = tmp_path.iterdir()
    assert parquet.read_table(path).to_pydict()["uid"] == [str(at // 4) for at in range(12)]


def test_the_accuracy_is_there_where_the_estimator_looks_at_it(tmp_path):
    dumped(tmp_path, "dgpo")
    (path,) = tmp_path.iterdir()
    assert parquet.read_table(path).to_pydict()["accuracy"] == ACC


def test_the_advantages_are_those_without_a_dump(tmp_path):
    config = {"rewards": {"keys": ["acc", "fmt"], "weights": [2.0, 1.0]}}
    without = call("gdpo", [0.0] * 12, UIDS, LENGTHS, config=config, components=FIELDS)
    np.testing.assert_array_equal(dumped(tmp_path).rows, without.rows)


def test_every_update_of_a_step_has_a_file_and_a_step_that_is_taken_again_replaces_it(tmp_path):
    for step, update in ((1, 0), (1, 1), (2, 0), (1, 0)):
        dumped(tmp_path, step=step, update=update)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"advantages-{step:08d}-{update:03d}.parquet" for step, update in ((1, 0), (1, 1), (2, 0))]


def trainer_at(step, folder, *overrides, **more):
    """A trainer that has loaded the checkpoint of a step, with the estimator's run attached."""
    config = compose("algorithm.adv_estimator=gdpo", KEYS, f"+algorithm.verl_ext.dump_dir={folder}", *overrides)
    trainer = SimpleNamespace(config=config, global_steps=step, **more)
    attach(trainer, config)
    return trainer


@pytest.mark.parametrize(("resumed", "left", "aside"), [(0, [], [1, 2, 3]), (2, [1, 2], [3]), (3, [1, 2, 3], [])])
def test_files_beyond_the_step_from_which_a_run_goes_on_are_set_aside(tmp_path, caplog, resumed, left, aside):
    """Otherwise a second run in the folder leaves the last files of a longer first one, which read as its own."""
    for step in (1, 2, 3):
        dumped(tmp_path, step=step)
    load_state(trainer_at(resumed, tmp_path))
    steps = {suffix: sorted(int(path.name[11:19]) for path in tmp_path.glob(f"*{suffix}")) for suffix in ("t", ".old")}
    assert steps == {"t": left, ".old": aside}
    assert any(says(record.getMessage(), tmp_path, len(aside), resumed) for record in caplog.records) == bool(aside)


def test_the_fully_asynchronous_trainer_goes_on_from_its_version(tmp_path):
    for step in (4, 5, 6):
        dumped(tmp_path, step=step)
    load_state(trainer_at(21, tmp_path, current_param_version=5))
    assert [path.name[11:19] for path in tmp_path.glob("*.old")] == ["00000006"]


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.val_only=True"],
        ["algorithm.adv_estimator=grpo", "algorithm.rewards.keys=null"],
    ],
    ids=["validation only", "an estimator that dumps nothing"],
)
def test_a_run_that_dumps_nothing_leaves_the_files_as_they_are(tmp_path, overrides):
    dumped(tmp_path)
    load_state(trainer_at(0, tmp_path, *overrides))
    assert not list(tmp_path.glob("*.old"))


def test_one_earlier_run_is_kept_and_counts_for_the_limit(tmp_path):
    (tmp_path / "advantages-best.parquet").write_text("somebody's own")
    for steps in (3, 1):
        for step in range(1, steps + 1):
            dumped(tmp_path, step=step)
        load_state(trainer_at(0, tmp_path))
    assert sorted(path.name[11:19] for path in tmp_path.glob("*.old")) == ["00000001"]
    assert (tmp_path / "advantages-best.parquet").exists()
    (tmp_path / "advantages-best.parquet").unlink()
    size = next(tmp_path.glob("*.old")).stat().st_size
    dumped(tmp_path, step=1, dump_limit_mb=1.5 * size / 1e6)
    assert [path.name for path in tmp_path.iterdir()] == ["advantages-00000001-000.parquet"]


def test_a_folder_whose_files_cannot_be_renamed_does_not_stop_the_run(tmp_path, monkeypatch, caplog):
    def refuse(path, target):
        raise PermissionError("not allowed")

    dumped(tmp_path)
    monkeypatch.setattr(Path, "replace", refuse)
    load_state(trainer_at(0, tmp_path))
    assert says(caplog.text, tmp_path, "not allowed")
    assert "renamed" not in caplog.text


def test_the_fully_asynchronous_trainer_numbers_its_files_by_the_version_that_verl_logs(tmp_path):
    """After a resumption its `global_steps` is one higher than when it took the same step before."""
    for updates in (9, 10):
        dumped(tmp_path, step=updates, update=1, version=4)
    assert [path.name for path in tmp_path.iterdir()] == ["advantages-00000005-001.parquet"]


def test_steps_are_left_out(tmp_path):
    for step in range(1, 7):
        dumped(tmp_path, step=step, dump_every=3)
    assert sorted(path.name[11:19] for path in tmp_path.iterdir()) == ["00000003", "00000006"]


def test_the_folder_stays_within_its_limit_and_loses_the_oldest(tmp_path):
    dumped(tmp_path, step=1)
    size = next(tmp_path.iterdir()).stat().st_size
    for step in range(2, 9):
        dumped(tmp_path, step=step, dump_limit_mb=3.5 * size / 1e6)
    assert sorted(path.name[11:19] for path in tmp_path.iterdir()) == ["00000006", "00000007", "00000008"]
    dumped(tmp_path, step=9, dump_limit_mb=0.1 * size / 1e6)
    assert [path.name[11:19] for path in tmp_path.iterdir()] == ["00000009"]


def test_a_disk_that_fails_stops_the_dump_and_not_the_run(tmp_path, monkeypatch, caplog):
    def full(path, found):
        raise OSError("No space left on device")

    monkeypatch.setattr(dump, "save", full)
    run = RunState()
    with caplog.at_level(logging.WARNING, "verl_ext"):
        for step in (1, 2):
            assert dumped(tmp_path, step=step, state=run).rows.any()
    (record,) = caplog.records
    assert says(record.getMessage(), f"algorithm.verl_ext.dump_dir={tmp_path}", "No space left on device", "no more")


def test_a_write_that_fails_leaves_nothing_behind(tmp_path):
    with pytest.raises(Exception, match="lengths|length"):
        dump.save(tmp_path / "x.parquet", {"a": [1, 2], "b": [1]})
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_half_written_is_removed_at_the_next_start(tmp_path):
    killed, alive = (tmp_path / f".advantages-00000001-000.parquet.{pid}.tmp" for pid in (1, 2))
    for path in (killed, alive):
        path.touch()
    os.utime(killed, (0, 0))
    dump.prepare(str(tmp_path))
    assert list(tmp_path.iterdir()) == [alive]


def test_without_a_folder_nothing_is_written_or_imported(tmp_path, monkeypatch):
    monkeypatch.setattr(dump, "write", lambda *_, **__: pytest.fail("called"))
    call("drgrpo", [1.0, 0.0], ["a", "a"])


def test_a_folder_that_cannot_be_written_is_refused_by_the_trainer(tmp_path):
    (tmp_path / "file").write_text("")
    folder = f"algorithm.verl_ext.dump_dir={tmp_path}/file/below"
    config = compose("algorithm.adv_estimator=gdpo", KEYS, f"+{folder}")
    with pytest.raises(ConfigurationError, match=facts(folder, "Not a directory")):
        attach(SimpleNamespace(), config)


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("dump_dirs=x", ("algorithm.verl_ext", "'dump_dirs'", "did you mean 'dump_dir'")),
        ("dump_every=2", ("algorithm.verl_ext.dump_every", "no effect", "algorithm.verl_ext.dump_dir")),
        ("dump_every=0", ("algorithm.verl_ext.dump_every", "at least 1", "found 0")),
        ("dump_limit_mb=0", ("algorithm.verl_ext.dump_limit_mb", "above 0", "found 0")),
    ],
)
def test_wrong_settings_are_refused(setting, told):
    with pytest.raises(ConfigurationError, match=facts(*told)):
        check_run(compose("algorithm.adv_estimator=gdpo", KEYS, f"+algorithm.verl_ext.{setting}"))


def test_an_estimator_of_verls_own_dumps_named_rewards_only(caplog):
    grpo = ("algorithm.adv_estimator=grpo", "+algorithm.verl_ext.dump_dir=x")
    with caplog.at_level(logging.WARNING, "verl_ext"):
        check_run(compose(*grpo, KEYS))
        assert "dump_dir" not in caplog.text
        check_run(compose(*grpo))
    assert says(caplog.text, "algorithm.verl_ext.dump_dir", "grpo", "algorithm.rewards.keys")


def report(capsys, *arguments):
    assert main(["report", "--groups", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_the_report_on_groups(tmp_path, capsys):
    """Accuracies 1/4, 3/4, 0 of A, B, C; in C only the format varies; a second step in which nothing varies."""
    dumped(tmp_path, "dgpo", step=1)
    monotone = {"acc": np.ones(12), "fmt": np.zeros(12)}
    config = {"rewards": {"keys": ["acc", "fmt"]}, "verl_ext": {"dump_dir": str(tmp_path)}}
    context = StepContext(trainer=SimpleNamespace(global_steps=2), fields=monotone)
    call("dgpo", [0.0] * 12, UIDS, LENGTHS, config=config, context=context)
    text = report(capsys, tmp_path)
    assert a_line_says(text, "2 files", "1 to 2", "6 groups", "24 responses")
    assert a_line_says(text, "dead", "3 of 6 groups", "50.0%")
    assert a_line_says(text, "acc", "4 of 6 groups")
    sections = text.split("\n\n")
    hardest = sections[1].splitlines()
    assert hardest[0].startswith("hardest")
    rows = [row.split() for row in hardest[3:]]
    assert [row[1] for row in rows] == ["C", "A", "B"]
    assert [row[3] for row in rows] == ["0.000", "0.250", "0.750"]
    assert " ".join(hardest[4].split()[4:10]) == "0.250 ± 0.500 0.500 ± 0.577"
    assert sections[2].startswith("dead")
    assert sorted(row.split()[1] for row in sections[2].splitlines()[3:]) == ["A", "B", "C"]


def test_rewards_that_cancel_out_are_in_conflict(tmp_path, capsys):
    """In `p` one is the other's opposite, in `q` they agree, in `r` one varies."""
    fields = {"x": np.array([1.0, 0, 1, 0, 1, 0]), "y": np.array([0.0, 1, 3, 0, 2, 2])}
    config = {"rewards": {"keys": ["x", "y"]}, "verl_ext": {"dump_dir": str(tmp_path)}}
    context = StepContext(trainer=SimpleNamespace(global_steps=1), fields=fields)
    call("gdpo", [0.0] * 6, list("ppqqrr"), config=config, context=context)
    text = report(capsys, tmp_path, "--top", "5")
    assert a_line_says(text, "total", "1 of 3 groups", "33.3%")
    conflicting = text.split("\n\n")[3].splitlines()
    assert conflicting[0].startswith("most conflicting")
    assert [row.split()[1:4:2] for row in conflicting[3:]] == [["p", "1.000"]]


def test_what_is_no_dump_is_an_error(tmp_path, capsys):
    import pyarrow

    assert main(["report", "--groups", str(tmp_path)]) == 1
    assert says(capsys.readouterr().err, tmp_path, "advantages-*.parquet")
    path = tmp_path / "advantages-1.parquet"
    path.write_bytes(b"torn")
    assert main(["report", "--groups", str(tmp_path)]) == 1
    assert f"{path}: " in capsys.readouterr().err
    parquet.write_table(pyarrow.table({"a": [1]}), path)
    assert main(["report", "--groups", str(path)]) == 1
    said = capsys.readouterr().err
    assert f"{path}: " in said
    assert "'advantage'" in said  # one of the columns that it lacks
    assert "a (int64)" in said  # the one that it has
