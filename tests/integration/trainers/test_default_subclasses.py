"""Trainers that extend verl's default trainer."""

from __future__ import annotations

from typing import Any

import pytest

from tests.facts import facts
from tests.integration.pipeline import Pipeline
from tests.integration.trainers.default_runs import ACC, DRGRPO, HADW
from verl_ext.errors import IntegrationError


def trainer_base() -> Any:
    from verl.trainer.ppo.v1 import trainer_base

    return trainer_base


def test_a_subclass_that_calls_super_computes_and_logs_once(pipeline: Pipeline) -> None:
    class Polite(trainer_base().PPOTrainer):
        def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
            metrics["polite"] = 1.0
            return super()._compute_advantage(batch, metrics)

    result = pipeline.run("history", *HADW, ACC, cls=Polite)
    assert result.metrics[1]["polite"] == 1.0
    assert result.metrics[1]["reward/acc/mean"] == pytest.approx(9 / 16)
    assert result.metrics[1]["hadw/tick"] == 1.0


def test_a_subclass_that_goes_its_own_way_is_refused(pipeline: Pipeline) -> None:
    class OwnWay(trainer_base().PPOTrainer):
        def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
            return batch

    with pytest.raises(IntegrationError, match=facts("did not call", "'drgrpo'")):
        pipeline.run("worked", *DRGRPO, cls=OwnWay)


def test_the_trainer_computes_the_same_with_verl_s_bare_function(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl's pull request 7237 moves `compute_advantage`; our part is around the whole of `_compute_advantage`."""
    from verl.trainer.ppo.v1 import utils

    given = ("history", *HADW, "trainer.total_training_steps=2", "algorithm.use_kl_in_reward=True")
    wrapped = pipeline.run(*given, prompts=2)
    monkeypatch.setattr(utils, "compute_advantage", utils.compute_advantage.__wrapped__)
    moved = pipeline.run(*given, prompts=2)
    for one, other in zip(wrapped.updates, moved.updates, strict=True):
        assert one.by_answer() == pytest.approx(other.by_answer(), abs=1e-6)
    assert moved.metrics[2]["hadw/tick"] == 2
