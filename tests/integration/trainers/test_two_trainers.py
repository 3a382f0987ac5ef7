"""Several `RayPPOTrainer`s in one process: the trainer that calls verl's function says whose batch it is."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
from verl.experimental.separation.ray_trainer import SeparateRayPPOTrainer
from verl.trainer.ppo import ray_trainer

from tests.integration.configs import compose
from tests.integration.hadw_runs import HADW
from tests.integration.trainers.ray_runs import KEYS, VERLS, Light, OwnFit, batch, own_fit, per_row
from verl_ext.errors import IntegrationError

GDPO = ("algorithm.adv_estimator=gdpo", KEYS)
GRPO = ("algorithm.adv_estimator=grpo",)


class Copies(OwnFit):
    """Passes a copy of its section."""

    def section(self) -> Any:
        return {"config": copy.deepcopy(self.config.algorithm)}

    def advantages(self, data: Any = None) -> Any:
        given, name = batch() if data is None else data, self.config.algorithm.adv_estimator
        return ray_trainer.compute_advantage(given, adv_estimator=name, **self.section())


class Omits(Copies):
    """Passes no configuration, as some recipes of verl."""

    def section(self) -> Any:
        return {}


class ByName(SeparateRayPPOTrainer):
    """verl's trainer that has imported the functions by their names, without workers."""

    def __init__(self, config: Any) -> None:
        with mock.patch.object(VERLS, "__init__", lambda self, config, *_: Light.__init__(self, config)):
            super().__init__(config, None, {}, None)

    def fit(self, steps: int = 1) -> list[Any]:
        done = []
        for _ in range(steps):
            data = batch()
            self.reward_tensor = data.batch["token_level_scores"]
            computed = self._fit_compute_advantage(data)
            done.append((computed, ray_trainer.compute_data_metrics(batch=computed, use_critic=False)))
        return done


@pytest.mark.parametrize("cls", [OwnFit, Copies])
def test_each_computes_with_its_own_settings_whichever_was_made_last(cls: type[Any]) -> None:
    plain = ("+algorithm.gdpo.whiten=none",)
    wanted = [per_row(own_fit(*GDPO, *more)[1][0][0]) for more in ((), plain)]
    assert wanted[0] != wanted[1]
    first, second = cls(compose(*GDPO)), cls(compose(*GDPO, *plain))
    for trainer, advantages in ((first, wanted[0]), (second, wanted[1]), (first, wanted[0])):
        assert per_row(trainer.fit()[0][0]) == advantages


def test_each_has_a_history_of_its_own() -> None:
    """Also where two configurations have the same entries."""
    config = compose(*HADW)
    first, second, plain = OwnFit(config), OwnFit(copy.deepcopy(config)), OwnFit(compose(*GRPO))
    ticks = []
    for trainer in (first, first, second, plain, first):
        [(_, metrics)] = trainer.fit()
        ticks.append(metrics.get("hadw/tick"))
    assert ticks == [1, 2, 1, None, 3]
    assert [trainer._verl_ext.state["weigh_by_history"]["ticks"] for trainer in (first, second)] == [3, 1]


@pytest.mark.parametrize("base", [OwnFit, Copies])
def test_one_that_was_not_checked_is_not_taken_for_another_with_the_same_entries(base: type[Any]) -> None:
    """Its `__init__` calls no other."""
    own_init = type("OwnInit", (base,), {"__init__": lambda self, config: setattr(self, "config", config)})
    checked, other = OwnFit(compose(*HADW)), own_init(compose(*HADW))
    for _ in range(2):
        with pytest.raises(IntegrationError):
            other.fit()
        checked.fit()
    assert checked._verl_ext.state["weigh_by_history"]["ticks"] == 2


def test_each_logs_the_metrics_of_its_own_batch() -> None:
    trainers = [OwnFit(compose(*HADW)), OwnFit(compose(*GDPO)), OwnFit(compose(*GRPO))]
    computed = [trainer.advantages() for trainer in trainers]
    logged = [trainer.logged(data) for trainer, data in zip(trainers, computed, strict=True)]
    assert [{"hadw/tick", "reward/format/mean"} & metrics.keys() for metrics in logged] == [
        {"hadw/tick"},
        {"reward/format/mean"},
        set(),
    ]


def test_a_trainer_of_verl_that_imported_the_function_by_name_is_told_by_its_call() -> None:
    trainers = [ByName(compose(*HADW)) for _ in range(2)]
    ticks = [trainer.fit()[0][1]["hadw/tick"] for trainer in (*trainers, trainers[0])]
    assert ticks == [1, 1, 2]


def test_a_trainer_may_work_in_another_thread_than_it_was_made_in() -> None:
    trainer = OwnFit(compose(*HADW))
    with ThreadPoolExecutor(1) as pool:
        steps = pool.submit(trainer.fit, 2).result()
    assert [metrics["hadw/tick"] for _, metrics in steps] == [1, 2]


@pytest.mark.parametrize("cls", [OwnFit, Copies, Omits])
def test_two_that_share_a_configuration_have_histories_and_dumps_of_their_own(cls: type[Any], tmp_path: Any) -> None:
    config = compose(*HADW, f"+algorithm.verl_ext.dump_dir={tmp_path}")
    first, second = cls(config), cls(config)
    ticks = [trainer.fit()[0][1]["hadw/tick"] for trainer in (first, second, first)]
    assert ticks == [1, 1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["from-0-0", "from-0-1"]
