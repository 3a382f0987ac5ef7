"""Trainers that extend verl's default trainer."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from verl.trainer.ppo import v1

from tests.facts import facts
from tests.integration.pipeline import Pipeline
from tests.integration.trainers.default_runs import ACC, DRGRPO, HADW
from verl_ext.errors import IntegrationError
from verl_ext.integration.default_trainer import DefaultTrainer
from verl_ext.integration.trainer import WithEstimators


def trainer_base() -> Any:
    from verl.trainer.ppo.v1 import trainer_base

    return trainer_base


def test_a_subclass_that_goes_its_own_way_is_refused(pipeline: Pipeline) -> None:
    class OwnWay(trainer_base().PPOTrainer):
        def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
            return batch

    with pytest.raises(IntegrationError, match=facts("did not call", "'drgrpo'")):
        pipeline.run("worked", *DRGRPO, cls=OwnWay)


class Registered(trainer_base().PPOTrainer):
    """Of another package: some methods are its own, without `super`."""

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        return batch

    def _save_checkpoint(self) -> None:
        self.saved = True


def test_what_verl_chooses_by_name_has_our_part_whoever_registered_it() -> None:
    base = trainer_base()
    with mock.patch.dict(base.TRAINER_REGISTRY, registered=Registered):
        for name in ("sync", "colocate_async", "separate_async", "registered"):
            chosen = v1.get_trainer_cls(name)
            assert chosen is base.get_trainer_cls(name)
            assert issubclass(chosen, (WithEstimators, base.TRAINER_REGISTRY[name]))
            assert chosen.__mro__[1] is DefaultTrainer
            assert chosen.__qualname__ == base.TRAINER_REGISTRY[name].__qualname__


def test_another_plugin_may_wrap_the_method_before_and_after(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever way: on verl's class, or around the function that chooses the class."""
    calls = []
    cls = trainer_base().PPOTrainer
    original = cls._compute_advantage

    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append("method")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(cls, "_compute_advantage", timed)
    choose = v1.get_trainer_cls

    def chosen(name: str) -> Any:
        class Above(choose(name)):
            def _compute_advantage(self, *args: Any, **kwargs: Any) -> Any:
                calls.append("above")
                return super()._compute_advantage(*args, **kwargs)

        return Above

    monkeypatch.setattr(v1, "get_trainer_cls", chosen)
    result = pipeline.run("history", *HADW, ACC)
    assert calls == ["above", "method"]
    assert result.metrics[1]["hadw/tick"] == 1.0


def test_a_trainer_that_verl_did_not_choose_stops_before_its_first_update(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that holds a function or class of verl's from before the plugin was loaded."""
    monkeypatch.setattr(v1, "get_trainer_cls", lambda name: trainer_base().TRAINER_REGISTRY[name])
    with pytest.raises(IntegrationError, match=facts("'drgrpo'", "build('drgrpo'")):
        pipeline.run("worked", *DRGRPO)
