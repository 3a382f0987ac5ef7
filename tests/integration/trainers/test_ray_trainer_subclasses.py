"""`RayPPOTrainer` reached in other ways than verl's, and several in one process: the estimators work, or raise."""

import copy
import functools
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from verl.experimental.separation.ray_trainer import SeparateRayPPOTrainer
from verl.trainer.ppo import core_algos, ray_trainer

from tests.configs import compose
from tests.facts import a_line_says, facts
from tests.integration.hadw_checkpoints import HADW
from tests.integration.trainers.ray_runs import (
    DRGRPO_ON_ACC,
    KEYS,
    VERL_TRAINER,
    WithMixin,
    WithoutWorkers,
    OwnFit,
    example_batch,
    run_own_fit,
    advantages_per_row,
)
from verl_ext.errors import IntegrationError

DRGRPO = ("algorithm.adv_estimator=drgrpo", "+algorithm.drgrpo.check_loss=False", "+algorithm.rewards.keys=[acc]")


class Bare(WithoutWorkers):
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
        return function(example_batch(), adv_estimator=algorithm.adv_estimator, config=algorithm)


class OfRegistry(OwnFit):
    """Calls the registry's function by itself."""

    def advantages(self) -> Any:
        function = core_algos.get_adv_estimator_fn(self.config.algorithm.adv_estimator)
        given = example_batch().batch
        return function(
            token_level_rewards=given["token_level_rewards"],
            response_mask=given["response_mask"],
            index=example_batch().non_tensor_batch["uid"],
            config=self.config.algorithm,
        )


class OtherEstimator(OwnFit):
    """Asks for another estimator than its configuration."""

    def advantages(self) -> Any:
        return ray_trainer.compute_advantage(example_batch(), adv_estimator="dgpo", config=self.config.algorithm)


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
        data = example_batch()
        data.batch["advantages"] = data.batch["returns"] = data.batch["token_level_rewards"]
        return data


def test_a_trainer_that_does_not_call_the_estimator_is_refused_also_later() -> None:
    trainer = OwnAdvantages(compose(*DRGRPO))
    for own in (True, False, True):
        trainer.own = own
        trainer.global_steps += 1
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


def undocumented(method: Any) -> Any:
    """A decorator that does not say what it decorates."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return call


class Stored:
    """A decorator that is an object."""

    def __init__(self, method: Any) -> None:
        self.method = method

    def __call__(self, *args: Any) -> Any:
        return self.method(*args)

    def __get__(self, trainer: Any, owner: Any = None) -> Any:
        return functools.partial(self, trainer)


def with_retries(trainer: Any, attempt: Any = None, tries: int = 1) -> None:
    for _ in range(tries):
        attempt(trainer)


# What a subclass makes of a method that calls `super`, or does not.
MADE: dict[str, Any] = {
    "decorated": undocumented,
    "decorated twice": lambda method: undocumented(functools.wraps(method)(undocumented(method))),
    "decorated by an object": Stored,
    "an object that is decorated": lambda method: undocumented(Stored(method)),
    "a partialmethod": lambda method: functools.partialmethod(method),
    "a partialmethod of another function": lambda method: functools.partialmethod(with_retries, method, tries=1),
    "a named argument of one": lambda method: functools.partialmethod(with_retries, attempt=method),
    "a partial of an object": lambda method: Stored(functools.partial(method)),
    "a method of an object": lambda method: Stored(Stored(method).__call__),
}


@pytest.mark.parametrize("made", MADE)
def test_a_method_is_judged_by_the_functions_in_it(made: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Good(OwnFit):
        def kept(self) -> None:
            super()._save_checkpoint()

        _save_checkpoint = MADE[made](kept)

    class Bad(OwnFit):
        def lost(self) -> None: ...

        _save_checkpoint = MADE[made](lost)

    trainer = Good(compose(*HADW, f"trainer.default_local_dir={tmp_path}"))
    trainer.fit()
    trainer._save_checkpoint()
    assert (tmp_path / "global_step_0/verl_ext.json").exists()
    with pytest.raises(IntegrationError, match=facts("Bad._save_checkpoint", "super()._save_checkpoint")):
        Bad(compose(*HADW))
    assert "_save_checkpoint" not in caplog.text


def test_a_call_in_a_function_of_the_method_counts() -> None:
    class Later(OwnFit):
        def _save_checkpoint(self) -> None:
            def save() -> None:
                super(Later, self)._save_checkpoint()

            with_retries(self, lambda _: save())

    Later(compose(*HADW))


class Opaque:
    """An object without a function of its own, as one that is compiled."""

    __call__ = print


def test_a_method_that_has_no_code_is_accepted_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    empty = undocumented(None)
    for opaque in (Opaque(), print, functools.partialmethod(print), property(empty)):
        caplog.clear()
        type("Compiled", (OwnFit,), {"_save_checkpoint": opaque})(compose(*HADW))
        assert a_line_says(caplog.text, "WARNING", "Compiled._save_checkpoint", "super()._save_checkpoint")
    caplog.clear()
    type("Compiled", (OwnFit,), {"_save_checkpoint": Opaque()})(compose("algorithm.adv_estimator=grpo"))
    assert "_save_checkpoint" not in caplog.text


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

    around(WithoutWorkers, "_save_checkpoint")  # before ours
    around(WithMixin, "_save_checkpoint")  # after ours
    around(ray_trainer, "compute_advantage")
    trainer = OwnFit(compose(*HADW, f"trainer.default_local_dir={tmp_path}"))
    trainer.fit(steps=1)
    trainer._save_checkpoint()
    assert calls == ["compute_advantage", "_save_checkpoint", "_save_checkpoint"]
    assert (tmp_path / "global_step_0/verl_ext.json").exists()
    assert advantages_per_row(OwnFit(compose(*DRGRPO)).fit(steps=1)[0][0]) == DRGRPO_ON_ACC


GDPO = ("algorithm.adv_estimator=gdpo", KEYS)
GRPO = ("algorithm.adv_estimator=grpo",)


class Copies(OwnFit):
    """Passes a copy of its section."""

    def section(self) -> Any:
        return {"config": copy.deepcopy(self.config.algorithm)}

    def advantages(self, data: Any = None) -> Any:
        given, name = example_batch() if data is None else data, self.config.algorithm.adv_estimator
        return ray_trainer.compute_advantage(given, adv_estimator=name, **self.section())


class Omits(Copies):
    """Passes no configuration, as some recipes of verl."""

    def section(self) -> Any:
        return {}


class ByName(SeparateRayPPOTrainer):
    """verl's trainer that has imported the functions by their names, without workers."""

    def __init__(self, config: Any) -> None:
        with mock.patch.object(
            VERL_TRAINER, "__init__", lambda self, config, *_: WithoutWorkers.__init__(self, config)
        ):
            super().__init__(config, None, {}, None)

    def fit(self, steps: int = 1) -> list[Any]:
        done = []
        for _ in range(steps):
            data = example_batch()
            self.reward_tensor = data.batch["token_level_scores"]
            computed = self._fit_compute_advantage(data)
            done.append((computed, ray_trainer.compute_data_metrics(batch=computed, use_critic=False)))
        return done


@pytest.mark.parametrize("cls", [OwnFit, Copies])
def test_each_computes_with_its_own_settings_whichever_was_made_last(cls: type[Any]) -> None:
    plain = ("+algorithm.gdpo.whiten=none",)
    wanted = [advantages_per_row(run_own_fit(*GDPO, *more)[1][0][0]) for more in ((), plain)]
    assert wanted[0] != wanted[1]
    first, second = cls(compose(*GDPO)), cls(compose(*GDPO, *plain))
    for trainer, advantages in ((first, wanted[0]), (second, wanted[1]), (first, wanted[0])):
        assert advantages_per_row(trainer.fit()[0][0]) == advantages


@pytest.mark.parametrize("base", [OwnFit, Copies])
def test_one_that_was_not_checked_is_not_taken_for_another_with_the_same_configuration(base: type[Any]) -> None:
    """Its `__init__` calls no other."""
    own_init = type("OwnInit", (base,), {"__init__": lambda self, config: setattr(self, "config", config)})
    config = compose(*HADW)
    checked, other = OwnFit(config), own_init(config)
    for _ in range(2):
        with pytest.raises(IntegrationError):
            other.fit()
        checked.fit()
    assert checked._verl_ext.state["weight_by_history"]["updates"] == 2


def test_each_logs_the_metrics_of_its_own_batch() -> None:
    trainers = [OwnFit(compose(*HADW)), OwnFit(compose(*GDPO)), OwnFit(compose(*GRPO))]
    computed = [trainer.advantages() for trainer in trainers]
    logged = [trainer.logged(data) for trainer, data in zip(trainers, computed, strict=True)]
    assert [{"hadw/updates", "reward/format/mean"} & metrics.keys() for metrics in logged] == [
        {"hadw/updates"},
        {"reward/format/mean"},
        set(),
    ]


def test_without_a_run_of_verl_ext_the_last_batch_is_not_kept_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class OwnLoop(OwnFit):
        def fit(self) -> bool:
            data = self.advantages(example_batch())
            last_batch = weakref.ref(data)
            ray_trainer.compute_data_metrics(data, use_critic=False)
            data = None
            return last_batch() is not None  # while the frame of `fit` exists

    monkeypatch.setattr("verl_ext.trainers.ray_trainer.RUNS", weakref.WeakSet())
    trainer = OwnLoop(compose("algorithm.adv_estimator=grpo"))
    assert not trainer.fit()


def test_a_trainer_of_verl_that_imported_the_function_by_name_is_recognized_by_its_call() -> None:
    trainers = [ByName(compose(*HADW)) for _ in range(2)]
    updates = [trainer.fit()[0][1]["hadw/updates"] for trainer in (*trainers, trainers[0])]
    assert updates == [1, 1, 2]


def test_a_trainer_may_work_in_another_thread_than_it_was_made_in() -> None:
    trainer = OwnFit(compose(*HADW))
    with ThreadPoolExecutor(1) as pool:
        steps = pool.submit(trainer.fit, 2).result()
    assert [metrics["hadw/updates"] for _, metrics in steps] == [1, 2]


class InAThread(OwnFit):
    """Computes advantages in another thread, whose stack has no trainer."""

    def advantages(self) -> Any:
        algorithm = self.config.algorithm
        given = {"adv_estimator": algorithm.adv_estimator, "config": algorithm}
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(ray_trainer.compute_advantage, example_batch(), **given).result()


def test_in_another_thread_the_run_is_the_one_whose_section_is_passed() -> None:
    first, second = InAThread(compose(*HADW)), InAThread(compose(*DRGRPO))
    for trainer in (first, second, first):
        [(_, metrics)] = trainer.fit(steps=1)
    assert metrics["hadw/updates"] == 2
    assert advantages_per_row(second.fit(steps=1)[0][0]) == DRGRPO_ON_ACC
    twin = InAThread(first.config)  # nothing says which of the two calls
    with pytest.raises(IntegrationError):
        twin.fit(steps=1)
    assert first._verl_ext.state["weight_by_history"]["updates"] == 2


@pytest.mark.parametrize("cls", [OwnFit, Copies, Omits])
def test_two_that_share_a_configuration_have_histories_and_dumps_of_their_own(cls: type[Any], tmp_path: Any) -> None:
    config = compose(*HADW, f"+algorithm.verl_ext.dump_dir={tmp_path}")
    first, second = cls(config), cls(config)
    updates = [trainer.fit()[0][1]["hadw/updates"] for trainer in (first, second, first)]
    assert updates == [1, 1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["from-0-0", "from-0-1"]
