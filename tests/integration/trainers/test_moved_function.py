"""A verl whose trainers call `compute_advantage` without our wrapper: nothing is computed with the rest left out.

verl's pull request 7237 moves the function to a module that no hook knows. Its callers then hold the bare function.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import pytest
from verl.experimental.separation import ray_trainer as separation
from verl.trainer.ppo import core_algos, ray_trainer
from verl.trainer.ppo.v1 import utils as v1_utils
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from tests.facts import facts
from tests.integration.configs import compose
from tests.integration.hadw_runs import HADW
from tests.integration.pipeline import Pipeline
from tests.integration.trainers.ray_runs import (
    DRGRPO_ON_ACC,
    KEYS,
    OwnFit,
    batch,
    separate,
    trainer_classes,
    without_rewards,
)
from verl_ext.errors import DataError, IntegrationError
from verl_ext.integration import hooks
from verl_ext.integration.run import run_of

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


@pytest.mark.parametrize("which", [0, 1, 2], ids=["separation", "one_step_off", "fully_async"])
def test_an_experimental_trainer_that_holds_the_bare_function_is_refused_as_it_is_made(
    which: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cls = trainer_classes()[which]
    monkeypatch.setattr(separation, "compute_advantage", bare())
    with pytest.raises(IntegrationError, match=r"verl\.experimental\.separation\.ray_trainer\.compute_advantage"):
        separate(cls, *HADW)
    separate(cls, "algorithm.adv_estimator=grpo")  # verl's own estimators are verl's business
    assert caplog.text == ""
    separate(cls, "algorithm.adv_estimator=grpo", KEYS)
    assert "verl.experimental.separation.ray_trainer.compute_advantage" in caplog.text


@pytest.mark.parametrize("which", [0, 1, 2, None], ids=["separation", "one_step_off", "fully_async", "legacy"])
def test_a_trainer_that_calls_the_bare_function_stops(which: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = OwnFit(compose(*HADW)) if which is None else separate(trainer_classes()[which], *HADW)
    monkeypatch.setattr(ray_trainer if which is None else separation, "compute_advantage", bare())
    with pytest.raises(IntegrationError, match=facts("'hadw'", "outside", "wrapper")):
        trainer.fit(steps=1) if which is None else trainer._fit_compute_advantage(without_rewards())


class Direct(OwnFit):
    """A trainer that calls the registry's function by itself."""

    def fit(self) -> Any:
        return call_registry(self.config.algorithm)


class DirectV1(PPOTrainer):
    """The same on the default trainer, beside `_compute_advantage`."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def fit(self) -> Any:
        return call_registry(self.config.algorithm)

    def _get_gen_batch(self, *args: Any) -> Any: ...


@pytest.mark.parametrize("cls", [Direct, DirectV1])
def test_a_fit_that_calls_the_registry_by_itself_is_refused(cls: type[Any]) -> None:
    cls.__abstractmethods__ = frozenset()
    with pytest.raises(IntegrationError, match=facts("'drgrpo'", "outside", "wrapper")):
        cls(compose(*DRGRPO)).fit()


def test_outside_a_fit_and_in_that_of_another_estimator_a_direct_call_works() -> None:
    config = compose(*DRGRPO).algorithm
    expected = pytest.approx(DRGRPO_ON_ACC)
    with pytest.raises(IntegrationError):
        Direct(compose(*DRGRPO)).fit()  # which has ended, however it did
    assert call_registry(config)[0][:, 0].tolist() == expected

    class Compares(OwnFit):
        def fit(self) -> Any:
            return call_registry(config)

    assert Compares(compose("algorithm.adv_estimator=grpo")).fit()[0][:, 0].tolist() == expected


class InThread(OwnFit):
    """Computes advantages in a thread, which does not inherit the context of `fit`."""

    def fit(self) -> Any:
        with ThreadPoolExecutor(1) as pool:
            data = pool.submit(self.advantages).result()
        return data, ray_trainer.compute_data_metrics(data, use_critic=False)


def test_advantages_computed_in_a_thread_keep_their_history_and_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = InThread(compose(*HADW))
    _, metrics = trainer.fit()
    assert metrics["hadw/tick"] == 1
    assert run_of(trainer).state.states["hadw"]["weigh_by_history"].ticks == 1
    monkeypatch.setattr(ray_trainer, "compute_advantage", bare())
    with pytest.raises(IntegrationError, match=facts("'hadw'", "outside", "wrapper")):
        trainer.fit()


class OwnAdvantages(OwnFit):
    """Computes advantages in its own way, whatever the configuration says."""

    def fit(self) -> Any:
        data = batch()
        data.batch["advantages"] = data.batch["returns"] = data.batch["token_level_rewards"]
        return ray_trainer.compute_data_metrics(data, use_critic=False)


def test_a_legacy_fit_without_the_estimator_is_refused() -> None:
    with pytest.raises(IntegrationError, match=facts("OwnAdvantages", "'drgrpo'", "not call")):
        OwnAdvantages(compose(*DRGRPO)).fit()
    OwnAdvantages(compose("algorithm.adv_estimator=grpo")).fit()


def test_an_experimental_advantage_step_without_the_estimator_is_refused() -> None:
    class OwnWay(trainer_classes()[0]):
        def _fit_compute_advantage(self, data: Any) -> Any:
            return data

    with pytest.raises(IntegrationError, match=facts("'hadw'", "not call")):
        separate(OwnWay, *HADW)._fit_compute_advantage(without_rewards())
    separate(OwnWay, "algorithm.adv_estimator=grpo")._fit_compute_advantage(without_rewards())


def test_the_default_trainer_computes_the_same_with_the_bare_function_or_stops(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its context is set around the whole of `_compute_advantage`; only a KL part of the reward is out of reach."""
    given = ("history", *HADW, "trainer.total_training_steps=2")
    wrapped = pipeline.run(*given, prompts=2)
    monkeypatch.setattr(v1_utils, "compute_advantage", bare())
    assert "verl.trainer.ppo.v1.utils.compute_advantage" in hooks.unwrapped("compute_advantage")
    moved = pipeline.run(*given, prompts=2)
    for one, other in zip(wrapped.updates, moved.updates, strict=True):
        assert one.by_answer() == pytest.approx(other.by_answer(), abs=1e-6)
    assert moved.metrics[2]["hadw/tick"] == 2
    assert run_of(moved.trainer).state.states["hadw"]["weigh_by_history"].ticks == 2
    with pytest.raises(DataError):
        pipeline.run(*given, "algorithm.use_kl_in_reward=True", prompts=2)


def test_the_module_to_which_the_function_moved_holds_the_bare_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its callers may write `trainer_utils.compute_advantage(...)` and hold nothing themselves."""
    home = ModuleType("verl.trainer.ppo.new_home")
    home.compute_advantage = bare()
    monkeypatch.setattr(bare(), "__module__", home.__name__)
    monkeypatch.setitem(sys.modules, home.__name__, home)
    assert hooks.unwrapped("compute_advantage") == [f"{home.__name__}.compute_advantage"]


def test_every_caller_of_verl_holds_the_wrapper() -> None:
    trainer_classes()  # imports the experimental trainers
    assert hooks.unwrapped("compute_advantage") == []
    for module in (ray_trainer, separation, v1_utils):
        assert hooks.is_wrapped(module.compute_advantage)
