"""The estimators' state through the saving and loading of verl's default trainer."""

from pathlib import Path
from typing import Any

import pytest

from tests.integration.hadw_checkpoints import saved_state, train_hadw
from tests.integration.pipeline import Pipeline

HISTORY = ("capability_prior", "capability_posterior", "batch_accuracy", "eta_t", "updates")


def assert_same_step(found: Any, expected: Any, step: int) -> None:
    """The history exactly; sums of floats run over rows in the order in which they were done."""
    one, other = found.metrics[step], expected.metrics[step]
    for name in HISTORY:
        assert one[f"hadw/{name}"] == other[f"hadw/{name}"], name
    for name in other:
        if name.startswith(("hadw/", "advantage/")):
            assert one[name] == pytest.approx(other[name], rel=1e-12, abs=1e-12), name


def updates(result: Any) -> int:
    return int(result.trainer._verl_ext.state["weight_by_history"]["updates"])


def test_a_resumed_run_goes_on_with_the_same_numbers(pipeline: Pipeline, tmp_path: Path) -> None:
    whole = train_hadw(pipeline, tmp_path / "whole", 4)
    train_hadw(pipeline, tmp_path / "parts", 2)
    resumed = train_hadw(pipeline, tmp_path / "parts", 4, "trainer.resume_mode=auto")
    assert sorted(resumed.metrics) == [3, 4]
    for step in (3, 4):
        assert_same_step(resumed, whole, step)
    assert saved_state(tmp_path / "parts", 4) == saved_state(tmp_path / "whole", 4)
    assert updates(resumed) == 4
    # From the folder that a run is given, which is not the latest.
    path = tmp_path / "whole" / "global_step_1"
    again = train(
        pipeline, tmp_path / "again", 2, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={path}"
    )
    assert sorted(again.metrics) == [2]
    assert_same_step(again, whole, 2)


def test_a_subclass_with_checkpoints_of_its_own_keeps_the_state(pipeline: Pipeline, tmp_path: Path) -> None:
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    class Own(PPOTrainer):
        """Neither method calls `super`."""

        def _save_checkpoint(self) -> None:
            (tmp_path / "own.txt").write_text(str(self.global_steps))

        def _load_checkpoint(self) -> None:
            path = tmp_path / "own.txt"
            self.global_steps = int(path.read_text()) if path.exists() else 0

    train_hadw(pipeline, tmp_path, 1, "trainer.resume_mode=auto", cls=Own)
    assert updates(train_hadw(pipeline, tmp_path, 2, "trainer.resume_mode=auto", cls=Own)) == 2
