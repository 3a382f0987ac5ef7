"""A verl whose trainers call `compute_advantage` without our wrapper: nothing is computed with the rest left out.

verl's pull request 7237 moves the function to a module that no hook knows. Its callers then hold the bare function.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from verl.experimental.separation import ray_trainer as separation
from verl.trainer.ppo import core_algos, ray_trainer

from tests.facts import facts
from tests.integration.configs import compose
from tests.integration.hadw_runs import HADW
from tests.integration.trainers.ray_runs import (
    DRGRPO_ON_ACC,
    KEYS,
    OwnFit,
    advance,
    batch,
    separate,
    trainer_classes,
)
from verl_ext import RunState, use_run_state
from verl_ext.errors import IntegrationError

DRGRPO = ("algorithm.adv_estimator=drgrpo", "+algorithm.drgrpo.check_loss=False", "+algorithm.rewards.keys=[acc]")


def bare() -> Callable[..., Any]:
    """verl's own function, without our wrapper."""
    function: Callable[..., Any] = ray_trainer.compute_advantage.__wrapped__
    return function


def call_registry(config: Any, name: str = "drgrpo") -> Any:
    """The estimator as verl's registry has it, called by hand."""
    data = batch()
    return core_algos.get_adv_estimator_fn(name)(
        token_level_rewards=data.batch["token_level_rewards"],
        response_mask=data.batch["response_mask"],
        index=data.non_tensor_batch["uid"],
        config=config,
        non_tensor_batch=data.non_tensor_batch,
    )


def test_an_experimental_trainer_that_holds_the_bare_function_is_refused_as_it_is_made(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cls = trainer_classes()[0]
    monkeypatch.setattr(separation, "compute_advantage", bare())
    with pytest.raises(IntegrationError, match=r"verl\.experimental\.separation\.ray_trainer\.compute_advantage"):
        separate(cls, *HADW)
    caplog.clear()
    separate(cls, "algorithm.adv_estimator=grpo")  # verl's own estimators are verl's business
    assert caplog.text == ""
    separate(cls, "algorithm.adv_estimator=grpo", KEYS)
    assert "verl.experimental.separation.ray_trainer.compute_advantage" in caplog.text


@pytest.mark.parametrize("module", [ray_trainer, separation])
def test_a_trainer_that_calls_the_bare_function_stops(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = OwnFit(compose(*HADW)) if module is ray_trainer else separate(trainer_classes()[0], *HADW)
    monkeypatch.setattr(module, "compute_advantage", bare())
    with pytest.raises(IntegrationError, match=facts("'hadw'", "outside", "wrapper")):
        trainer.fit(steps=1) if module is ray_trainer else advance(trainer)


class Direct(OwnFit):
    """A trainer that calls the registry's function by itself."""

    def fit(self) -> Any:
        return call_registry(self.config.algorithm)


def test_a_fit_that_calls_the_registry_by_itself_is_refused() -> None:
    trainer = Direct(compose(*DRGRPO))
    with pytest.raises(IntegrationError, match=facts("'drgrpo'", "outside", "wrapper")):
        trainer.fit()
    with use_run_state(RunState()):  # a call that says so
        assert trainer.fit()[0][:, 0].tolist() == pytest.approx(DRGRPO_ON_ACC)


class OwnAdvantages(OwnFit):
    """Computes advantages in its own way, whatever the configuration says."""

    def fit(self) -> Any:
        data = batch()
        data.batch["advantages"] = data.batch["returns"] = data.batch["token_level_rewards"]
        return ray_trainer.compute_data_metrics(data, use_critic=False)


def test_a_trainer_that_does_not_call_the_estimator_is_refused() -> None:
    with pytest.raises(IntegrationError, match=facts("OwnAdvantages", "'drgrpo'", "not call")):
        OwnAdvantages(compose(*DRGRPO)).fit()
    trainer = OwnAdvantages(compose(*DRGRPO))
    OwnFit.fit(trainer, steps=2)
    with pytest.raises(IntegrationError, match=facts("OwnAdvantages", "'drgrpo'", "not call")):  # nor later
        trainer.fit()
    OwnAdvantages(compose("algorithm.adv_estimator=grpo")).fit()


class OtherEstimator(OwnFit):
    """Asks for another estimator than its configuration."""

    def fit(self) -> Any:
        data = ray_trainer.compute_advantage(batch(), adv_estimator="dgpo", config=self.config.algorithm)
        return ray_trainer.compute_data_metrics(data, use_critic=False)


def test_a_trainer_that_calls_another_estimator_than_that_of_its_run_is_refused() -> None:
    with pytest.raises(IntegrationError, match=facts("OtherEstimator", "'hadw'", "not call")):
        OtherEstimator(compose(*HADW)).fit()
