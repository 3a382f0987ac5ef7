"""The estimators' state through verl's own saving and loading: the V1 trainer and the legacy one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.facts import a_line_says, facts
from tests.integration.hadw_runs import legacy, saved, state, train
from tests.integration.pipeline import Pipeline
from verl_ext.errors import CheckpointError
from verl_ext.integration.trainers import checkpoint
from verl_ext.integration.trainers.attach import run_of

# -- through verl's V1 trainer ---------------------------------------------------------------------------------------


HISTORY = ("capability_prior", "capability_posterior", "batch_accuracy", "eta_t", "tick")


def assert_same_step(found: Any, expected: Any, step: int) -> None:
    """The history exactly; sums of floats run over rows in the order in which they were done."""
    one, other = found.metrics[step], expected.metrics[step]
    for name in HISTORY:
        assert one[f"hadw/{name}"] == other[f"hadw/{name}"], name
    for name in other:
        if name.startswith(("hadw/", "advantage/")):
            assert one[name] == pytest.approx(other[name], rel=1e-12, abs=1e-12), name


def capability(result: Any) -> dict[str, Any]:
    return run_of(result.trainer).state.states["hadw"]["weigh_by_history"]


def test_a_resumed_run_goes_on_with_the_same_numbers(pipeline: Pipeline, tmp_path: Path) -> None:
    whole = train(pipeline, tmp_path / "whole", 4)
    train(pipeline, tmp_path / "parts", 2)
    resumed = train(pipeline, tmp_path / "parts", 4, "trainer.resume_mode=auto")
    assert sorted(resumed.metrics) == [3, 4]
    for step in (3, 4):
        assert_same_step(resumed, whole, step)
    assert saved(tmp_path / "parts", 4) == saved(tmp_path / "whole", 4)
    assert capability(resumed)["ticks"] == 4
    # From the folder that a run is given, which is not the latest.
    path = tmp_path / "whole" / "global_step_1"
    again = train(
        pipeline, tmp_path / "again", 2, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={path}"
    )
    assert sorted(again.metrics) == [2]
    assert_same_step(again, whole, 2)


def test_the_state_is_there_before_verl_saves_anything_of_its_own(pipeline: Pipeline, tmp_path: Path) -> None:
    """Or a run killed between the two would resume without its history."""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    seen = []

    class Watching(PPOTrainer):
        def fit(self, agents: Any) -> None:
            def save_checkpoint(local: str, *_: Any, **__: Any) -> None:
                seen.append((Path(local).parent / "verl_ext.json").exists())
                seen.append((tmp_path / "latest_checkpointed_iteration.txt").exists())

            self.actor_rollout_wg.save_checkpoint = save_checkpoint
            super().fit(agents)

    train(pipeline, tmp_path, 1, cls=Watching)
    assert seen == [True, False]


def test_the_state_of_another_anchor_stops_the_run(pipeline: Pipeline, tmp_path: Path) -> None:
    train(pipeline, tmp_path, 1)
    with pytest.raises(CheckpointError, match=facts("anchor=window", "set algorithm.hadw.anchor=soft")):
        train(pipeline, tmp_path, 2, "+algorithm.hadw.anchor=window", "trainer.resume_mode=auto")


def test_subclasses_with_their_own_checkpoints_keep_the_state(pipeline: Pipeline, tmp_path: Path) -> None:
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    class Own(PPOTrainer):
        """Neither method calls `super`."""

        def _save_checkpoint(self) -> None:
            (tmp_path / "own.txt").write_text(str(self.global_steps))

        def _load_checkpoint(self) -> None:
            path = tmp_path / "own.txt"
            self.global_steps = int(path.read_text()) if path.exists() else 0

    class Polite(PPOTrainer):
        def _save_checkpoint(self) -> None:
            super()._save_checkpoint()

        def _load_checkpoint(self) -> None:
            super()._load_checkpoint()

    for cls in (Own, Polite):
        folder = tmp_path / cls.__name__
        train(pipeline, folder, 1, "trainer.resume_mode=auto", cls=cls)
        resumed = train(pipeline, folder, 2, "trainer.resume_mode=auto", cls=cls)
        assert capability(resumed)["ticks"] == 2, cls


# -- the legacy trainer ----------------------------------------------------------------------------------------------


def test_the_legacy_trainer_saves_and_reads_the_state(tmp_path: Path) -> None:
    trainer = legacy(tmp_path)
    trainer.global_steps = 5
    run_of(trainer).state.states.update(state(9).states)
    trainer._save_checkpoint()
    assert saved(tmp_path, 5)["global_step"] == 5
    path = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/global_step_5")
    for folder, overrides in ((tmp_path, ()), (tmp_path / "elsewhere", path)):
        resumed = legacy(folder, *overrides)
        resumed._load_checkpoint()
        assert resumed.global_steps == 5
        assert run_of(resumed).state.states == state(9).states
    fresh = legacy(tmp_path, "trainer.resume_mode=disable")
    fresh._load_checkpoint()
    assert run_of(fresh).state.states == {}


@pytest.mark.parametrize("estimator", ["dgpo", "grpo", "hadw"])
def test_a_run_without_a_state_takes_away_that_of_the_checkpoint_it_writes_over(
    tmp_path: Path, estimator: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Or the run whose state it was would resume from the other's weights with its own history."""
    for step in (4, 5):
        checkpoint.save(tmp_path / f"global_step_{step}", state(9), step=step)
    keys = ("algorithm.rewards.keys=null",) if estimator == "grpo" else ()
    trainer = legacy(tmp_path, f"algorithm.adv_estimator={estimator}", *keys)
    trainer.global_steps = 5
    seen = []
    path = tmp_path / "global_step_5" / "verl_ext.json"
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    trainer.actor_rollout_wg.save_checkpoint = lambda *_, **__: seen.append((path.exists(), tracker.exists()))
    trainer._save_checkpoint()
    assert seen == [(False, False)]
    assert a_line_says(caplog.text, "removed", path, "another run")
    assert tracker.read_text() == "5"
    assert (tmp_path / "global_step_4" / "verl_ext.json").exists()
    resumed = legacy(tmp_path)
    resumed._load_checkpoint()
    assert run_of(resumed).state.states == {}
    assert a_line_says(caplog.text, "step 5", path, "not exist")


def test_a_state_of_another_run_that_cannot_be_removed_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "global_step_5" / "verl_ext.json"
    (path / "below").mkdir(parents=True)
    trainer = legacy(tmp_path, "algorithm.adv_estimator=dgpo")
    trainer.global_steps = 5
    with pytest.raises(CheckpointError, match=facts(path, "another run", "removed")):
        trainer._save_checkpoint()
    assert not (tmp_path / "latest_checkpointed_iteration.txt").exists()
