"""verl's experimental trainers, on instances without workers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests import fresh
from tests.integration.hadw_runs import HADW
from tests.integration.trainers.ray_runs import (
    GDPO,
    KEYS,
    per_row,
    separate,
    trainer_classes,
    without_rewards,
)
from verl_ext.errors import CheckpointError
from verl_ext.integration.guards import run_lock
from verl_ext.integration.run import run_of


@pytest.mark.parametrize("which", [0, 1, 2], ids=["separation", "one_step_off", "fully_async"])
def test_the_experimental_trainers_compute_and_log(which: int) -> None:
    trainer = separate(trainer_classes()[which], "algorithm.adv_estimator=gdpo", KEYS, "+algorithm.gdpo.epsilon=1e-4")
    data = trainer._fit_compute_advantage(without_rewards())
    assert per_row(data) == pytest.approx(GDPO, abs=1e-5)
    assert trainer.metrics["reward/acc/mean"] == 4 / 8
    assert trainer.metrics["advantage/zero_share"] == 0.0


def test_the_experimental_trainers_own_classes_are_wrapped_where_they_override() -> None:
    for cls in trainer_classes():
        for base in cls.__mro__[:-1]:
            for method in {"__init__", "_save_checkpoint", "_load_checkpoint", "_fit_compute_advantage"} & set(
                vars(base)
            ):
                assert getattr(vars(base)[method], "__verl_ext__", False), f"{base}.{method}"


def test_the_fully_asynchronous_trainer_stays_wrapped_on_its_way_into_an_actor(tmp_path: Path) -> None:
    """Ray sends the class by value, to a process which has not imported its module."""
    from ray import cloudpickle

    (tmp_path / "class").write_bytes(cloudpickle.dumps(trainer_classes()[2]))
    code = """
import pathlib, sys, verl
from ray import cloudpickle
cls = cloudpickle.loads(pathlib.Path(sys.argv[1]).read_bytes())
for name in ("__init__", "fit", "_save_checkpoint", "load_checkpoint", "_fit_compute_advantage"):
    assert getattr(cls, name).__verl_ext__, name
from verl_ext.integration import hooks
assert hooks.HOOKS["verl.trainer.ppo.ray_trainer"].state == "holds"
"""
    done = fresh.run(code, str(tmp_path / "class"))
    assert done.returncode == 0, done.stderr


def test_the_fully_asynchronous_trainer_saves_and_reads_its_state_by_its_own_count(tmp_path: Path) -> None:
    from verl.experimental.fully_async_policy import fully_async_trainer

    def make() -> Any:
        trainer = separate(trainer_classes()[2], *HADW, f"trainer.default_local_dir={tmp_path}", "trainer.nnodes=1")
        trainer.current_param_version, trainer.trigger_parameter_sync_step = 5, 4
        trainer.actor_rollout_wg = mock.MagicMock()
        trainer.rollouter = mock.MagicMock()
        trainer.use_critic = False
        return trainer

    saved = make()
    saved._fit_compute_advantage(without_rewards())
    (tmp_path / "global_step_5").mkdir()
    with mock.patch.object(fully_async_trainer.ray, "get"):
        saved._save_checkpoint()
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "5"
    assert json.loads((tmp_path / "global_step_5" / "verl_ext.json").read_text())["global_step"] == 5
    resumed = make()
    resumed.current_param_version = 0
    assert asyncio.run(resumed.load_checkpoint()) == 5
    assert run_of(resumed).state.states == run_of(saved).state.states
    assert run_of(resumed).state.states["hadw"]["weigh_by_history"].ticks == 1


def test_the_fully_asynchronous_trainer_claims_its_folder_and_mends_the_tracker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = separate(
        trainer_classes()[2],
        *HADW,
        f"trainer.default_local_dir={tmp_path}",
        "trainer.nnodes=1",
        "trainer.save_freq=1",
    )
    held: list[tuple[str, run_lock.Use]] = []
    monkeypatch.setattr(run_lock, "hold", lambda folder, use: held.append((folder, use)))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("five")
    with pytest.raises(CheckpointError, match="found b'five'"):
        asyncio.run(trainer.load_checkpoint())
    assert held == [(str(tmp_path), run_lock.CHECKPOINTS)]
