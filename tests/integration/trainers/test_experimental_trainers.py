"""verl's experimental trainers, on instances without workers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests import fresh
from tests.integration.hadw_runs import HADW, saved
from tests.integration.trainers.ray_runs import GDPO, KEYS, advance, per_row, separate, trainer_classes
from verl_ext.errors import CheckpointError
from verl_ext.integration.run import run_of


@pytest.mark.parametrize("which", [0, 1, 2], ids=["separation", "one_step_off", "fully_async"])
def test_the_experimental_trainers_compute_and_log(which: int) -> None:
    trainer = separate(trainer_classes()[which], "algorithm.adv_estimator=gdpo", KEYS, "+algorithm.gdpo.epsilon=1e-4")
    data = advance(trainer)
    assert per_row(data) == pytest.approx(GDPO, abs=1e-5)
    assert trainer.metrics["reward/acc/mean"] == 4 / 8
    assert trainer.metrics["advantage/zero_share"] == 0.0


def test_the_fully_asynchronous_trainer_stays_wrapped_on_its_way_into_an_actor(tmp_path: Path) -> None:
    """Ray sends the class by value, to a process which has not imported its module."""
    from ray import cloudpickle

    (tmp_path / "class").write_bytes(cloudpickle.dumps(trainer_classes()[2]))
    code = """
import pathlib, sys, verl
from ray import cloudpickle
cls = cloudpickle.loads(pathlib.Path(sys.argv[1]).read_bytes())
for name in ("__init__", "_save_checkpoint", "load_checkpoint"):
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
        trainer.current_param_version, trainer.trigger_parameter_sync_step = 4, 4
        trainer.actor_rollout_wg = mock.MagicMock()
        trainer.rollouter = mock.MagicMock()
        trainer.use_critic = False
        return trainer

    first = make()
    advance(first)
    first.current_param_version = 5  # the update is sent to the rollouter, then saved
    (tmp_path / "global_step_5").mkdir()
    with mock.patch.object(fully_async_trainer.ray, "get"):
        first._save_checkpoint()
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "5"
    assert saved(tmp_path, 5)["global_step"] == saved(tmp_path, 5)["computed_at"] == 5
    resumed = make()
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        asyncio.run(resumed.load_checkpoint())
    (tmp_path / "global_step_5" / "data.pt").touch()  # the rollouter writes it
    assert asyncio.run(resumed.load_checkpoint()) == 5
    assert run_of(resumed).state.states == run_of(first).state.states
    assert run_of(resumed).state.states["hadw"]["weigh_by_history"]["ticks"] == 1
