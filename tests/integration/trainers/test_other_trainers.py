"""`RayPPOTrainer` reached in other ways than verl's: the estimators work, or raise before the first update."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from verl.trainer.ppo import core_algos, ray_trainer

from tests.facts import facts
from tests.integration.configs import compose
from tests.integration.hadw_runs import HADW
from tests.integration.trainers.ray_runs import DRGRPO_ON_ACC, Base, Light, OwnFit, batch, per_row
from verl_ext.errors import IntegrationError

DRGRPO = ("algorithm.adv_estimator=drgrpo", "+algorithm.drgrpo.check_loss=False", "+algorithm.rewards.keys=[acc]")


class Bare(Light):
    """Over verl's own class, as a module has it that imported it by name before the plugin was loaded."""

    fit = OwnFit.fit
    advantages, logged = OwnFit.advantages, OwnFit.logged


class OwnInit(OwnFit):
    """Does not call `super`, as verl's experimental trainers."""

    def __init__(self, config: Any) -> None:
        self.config = config


class BareFunction(OwnFit):
    """Holds verl's `compute_advantage` from before the plugin was loaded, or from a module where verl has moved it."""

    def advantages(self) -> Any:
        algorithm = self.config.algorithm
        function = ray_trainer.compute_advantage.__wrapped__
        return function(batch(), adv_estimator=algorithm.adv_estimator, config=algorithm)


class OfRegistry(OwnFit):
    """Calls the registry's function by itself."""

    def advantages(self) -> Any:
        function = core_algos.get_adv_estimator_fn(self.config.algorithm.adv_estimator)
        given = batch().batch
        return function(
            token_level_rewards=given["token_level_rewards"],
            response_mask=given["response_mask"],
            index=batch().non_tensor_batch["uid"],
            config=self.config.algorithm,
        )


class OtherEstimator(OwnFit):
    """Asks for another estimator than its configuration."""

    def advantages(self) -> Any:
        return ray_trainer.compute_advantage(batch(), adv_estimator="dgpo", config=self.config.algorithm)


@pytest.mark.parametrize("cls", [Bare, OwnInit, BareFunction, OfRegistry, OtherEstimator])
def test_an_estimator_that_our_part_does_not_call_raises(cls: type[Any]) -> None:
    called = "dgpo" if cls is OtherEstimator else "hadw"
    with pytest.raises(IntegrationError, match=facts(f"'{called}'", f"build('{called}', settings)")):
        cls(compose(*HADW)).fit(steps=1)


@pytest.mark.parametrize("cls", [Bare, OwnInit, BareFunction])
def test_verl_s_own_estimators_go_on_there(cls: type[Any]) -> None:
    [(data, metrics)] = cls(compose("algorithm.adv_estimator=grpo")).fit(steps=1)
    assert data.batch["advantages"].abs().max() > 0
    assert not [name for name in metrics if name.startswith("reward/")]


class OwnAdvantages(OwnFit):
    """From some step on it computes advantages in its own way."""

    own = True

    def advantages(self) -> Any:
        if not self.own:
            return super().advantages()
        data = batch()
        data.batch["advantages"] = data.batch["returns"] = data.batch["token_level_rewards"]
        return data


def test_a_trainer_that_does_not_call_the_estimator_is_refused_also_later() -> None:
    trainer = OwnAdvantages(compose(*DRGRPO))
    for own in (True, False, True):
        trainer.own = own
        if own:
            with pytest.raises(IntegrationError, match=facts("OwnAdvantages", "'drgrpo'", "not call")):
                trainer.fit(steps=1)
        else:
            trainer.fit(steps=2)
    OwnAdvantages(compose("algorithm.adv_estimator=grpo")).fit(steps=1)


class OwnSave(OwnFit):
    """Its checkpoints are its own: the state would not be in them."""

    def _save_checkpoint(self) -> None: ...


class Polite(OwnFit):
    def _save_checkpoint(self) -> None:
        super()._save_checkpoint()


def test_a_subclass_whose_checkpoints_would_lack_the_state_is_refused_as_it_is_made() -> None:
    for lost in (OwnSave, type("Below", (OwnSave,), {})):
        with pytest.raises(IntegrationError, match=facts("OwnSave._save_checkpoint", "super()._save_checkpoint")):
            lost(compose(*HADW))
    for cls, overrides in ((Polite, HADW), (OwnSave, DRGRPO), (OwnSave, ("algorithm.adv_estimator=grpo",))):
        cls(compose(*overrides))


def test_another_plugin_may_wrap_our_methods_and_verls_functions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = []

    def around(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, wrapper)

    around(Light, "_save_checkpoint")  # before ours
    around(Base, "_save_checkpoint")  # after ours
    around(ray_trainer, "compute_advantage")
    trainer = OwnFit(compose(*HADW, f"trainer.default_local_dir={tmp_path}"))
    trainer.fit(steps=1)
    trainer._save_checkpoint()
    assert calls == ["compute_advantage", "_save_checkpoint", "_save_checkpoint"]
    assert (tmp_path / "global_step_0/verl_ext.json").exists()
    assert per_row(OwnFit(compose(*DRGRPO)).fit(steps=1)[0][0]) == DRGRPO_ON_ACC
