"""`RayPPOTrainer` in other forms than verl's, and several in one process: the estimators work, or raise an error."""

import copy
import functools
import weakref
from collections.abc import Callable
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
    OwnFit,
    WithMixin,
    WithoutWorkers,
    advantages_per_row,
    example_batch,
)
from verl_ext.errors import IntegrationError

HADW_UPDATES = "hadw/updates"
GDPO = ("algorithm.adv_estimator=gdpo", KEYS)
GRPO = "algorithm.adv_estimator=grpo"
DRGRPO = ("algorithm.adv_estimator=drgrpo", "+algorithm.drgrpo.check_loss=False", "+algorithm.rewards.keys=[acc]")


class WithoutMixin(WithoutWorkers):
    """A subclass of verl's own class, in a module that imported the class before the plugin was loaded."""

    fit = OwnFit.fit
    advantages = OwnFit.advantages
    logged = OwnFit.logged


class OwnInit(OwnFit):
    """A trainer whose `__init__` does not call `super`, as verl's experimental trainers."""

    def __init__(self, config: Any) -> None:
        self.config = config


class UnwrappedFunction(OwnFit):
    """A trainer that holds verl's `compute_advantage` from before the plugin was loaded, or from another module."""

    def advantages(self) -> Any:
        algorithm = self.config.algorithm
        function = ray_trainer.compute_advantage.__wrapped__
        return function(example_batch(), adv_estimator=algorithm.adv_estimator, config=algorithm)


class FunctionOfRegistry(OwnFit):
    """A trainer that calls the function of verl's registry itself."""

    def advantages(self) -> Any:
        function = core_algos.get_adv_estimator_fn(self.config.algorithm.adv_estimator)
        data = example_batch()
        return function(
            token_level_rewards=data.batch["token_level_rewards"],
            response_mask=data.batch["response_mask"],
            index=data.non_tensor_batch["uid"],
            config=self.config.algorithm,
        )


class OtherEstimator(OwnFit):
    """A trainer that computes another estimator than its configuration names."""

    def advantages(self) -> Any:
        return ray_trainer.compute_advantage(example_batch(), adv_estimator="dgpo", config=self.config.algorithm)


@pytest.mark.parametrize(
    ("cls", "estimator"),
    [
        (WithoutMixin, "hadw"),
        (OwnInit, "hadw"),
        (UnwrappedFunction, "hadw"),
        (FunctionOfRegistry, "hadw"),
        (OtherEstimator, "dgpo"),
    ],
)
def test_an_estimator_that_verl_ext_does_not_call_raises(cls: type[Any], estimator: str) -> None:
    trainer = cls(compose(*HADW))
    with pytest.raises(IntegrationError, match=facts(f"'{estimator}'", f"build('{estimator}', settings)")):
        trainer.fit(steps=1)


@pytest.mark.parametrize("cls", [WithoutMixin, OwnInit, UnwrappedFunction])
def test_these_trainers_still_compute_verls_estimators(cls: type[Any]) -> None:
    [(data, metrics)] = cls(compose(GRPO)).fit(steps=1)
    assert data.batch["advantages"].abs().max() > 0
    assert not [name for name in metrics if name.startswith("reward/")]


class OwnAdvantages(OwnFit):
    """A trainer that computes its own advantages while `own` is True."""

    own = True

    def advantages(self) -> Any:
        if not self.own:
            return super().advantages()
        data = example_batch()
        data.batch["advantages"] = data.batch["returns"] = data.batch["token_level_rewards"]
        return data

    def next_step(self, *, own: bool) -> None:
        self.own = own
        self.global_steps += 1
        self.fit(steps=1)


def test_not_calling_the_estimator_is_an_error_in_any_step() -> None:
    trainer = OwnAdvantages(compose(*DRGRPO))
    message = facts("OwnAdvantages", "'drgrpo'", "not call")
    with pytest.raises(IntegrationError, match=message):
        trainer.next_step(own=True)
    trainer.next_step(own=False)
    trainer.fit(steps=1)
    with pytest.raises(IntegrationError, match=message):
        trainer.next_step(own=True)


def test_a_trainer_of_verls_estimator_may_compute_its_own_advantages() -> None:
    OwnAdvantages(compose(GRPO)).fit(steps=1)


class OwnSave(OwnFit):
    """A trainer with its own checkpoints, which would lack the state."""

    def _save_checkpoint(self) -> None: ...


class SubclassOfOwnSave(OwnSave):
    pass


class SaveWithSuper(OwnFit):
    def _save_checkpoint(self) -> None:
        super()._save_checkpoint()


@pytest.mark.parametrize("cls", [OwnSave, SubclassOfOwnSave])
def test_a_subclass_whose_checkpoints_would_lack_the_state_is_refused(cls: type[Any]) -> None:
    with pytest.raises(IntegrationError, match=facts("OwnSave._save_checkpoint", "super()._save_checkpoint")):
        cls(compose(*HADW))


@pytest.mark.parametrize(
    ("cls", "overrides"),
    [(SaveWithSuper, HADW), (OwnSave, DRGRPO), (OwnSave, (GRPO,))],
    ids=["calls super", "estimator without state", "estimator of verl"],
)
def test_a_subclass_whose_checkpoints_lack_no_state_is_accepted(cls: type[Any], overrides: tuple[str, ...]) -> None:
    cls(compose(*overrides))


def decorated(method: Any) -> Any:
    """Decorate a method without `functools.wraps`, so that nothing refers to the original."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return call


def decorated_twice(method: Any) -> Any:
    wrapped = functools.wraps(method)(decorated(method))
    return decorated(wrapped)


class DecoratorObject:
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


# How a subclass may turn a method into `_save_checkpoint`.
WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "decorated": decorated,
    "decorated twice": decorated_twice,
    "decorated by an object": DecoratorObject,
    "an object that is decorated": lambda method: decorated(DecoratorObject(method)),
    "a partialmethod": functools.partialmethod,
    "an argument of a partialmethod": lambda method: functools.partialmethod(with_retries, method, tries=1),
    "a keyword argument of a partialmethod": lambda method: functools.partialmethod(with_retries, attempt=method),
    "a partial in an object": lambda method: DecoratorObject(functools.partial(method)),
    "a bound method in an object": lambda method: DecoratorObject(DecoratorObject(method).__call__),
}


@pytest.mark.parametrize("case", WRAPPERS)
def test_a_wrapped_method_that_calls_super_is_accepted(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class CallsSuper(OwnFit):
        def call_super(self) -> None:
            super()._save_checkpoint()

        _save_checkpoint = WRAPPERS[case](call_super)

    trainer = CallsSuper(compose(*HADW, f"trainer.default_local_dir={tmp_path}"))
    trainer.fit()
    trainer._save_checkpoint()
    assert (tmp_path / "global_step_0/verl_ext.json").exists()
    assert "_save_checkpoint" not in caplog.text


@pytest.mark.parametrize("case", WRAPPERS)
def test_a_wrapped_method_that_does_not_call_super_is_refused(case: str) -> None:
    class DoesNothing(OwnFit):
        def do_nothing(self) -> None: ...

        _save_checkpoint = WRAPPERS[case](do_nothing)

    message = facts("DoesNothing._save_checkpoint", "super()._save_checkpoint")
    with pytest.raises(IntegrationError, match=message):
        DoesNothing(compose(*HADW))


def test_a_call_of_super_in_an_inner_function_counts() -> None:
    class CallsSuperInside(OwnFit):
        def _save_checkpoint(self) -> None:
            def save() -> None:
                super(CallsSuperInside, self)._save_checkpoint()

            with_retries(self, lambda _: save())

    CallsSuperInside(compose(*HADW))


class CompiledFunction:
    """An object without a Python function, as a compiled function."""

    __call__ = print


def class_with_save(method: Any) -> type[Any]:
    """Return the class `Compiled` with a method `_save_checkpoint`."""
    return type("Compiled", (OwnFit,), {"_save_checkpoint": method})


@pytest.mark.parametrize(
    "method",
    [CompiledFunction(), print, functools.partialmethod(print), property(decorated(None))],
    ids=["object", "builtin", "partialmethod", "property"],
)
def test_a_method_without_python_code_is_accepted_with_a_warning(method: Any, caplog: pytest.LogCaptureFixture) -> None:
    class_with_save(method)(compose(*HADW))
    assert a_line_says(caplog.text, "WARNING", "Compiled._save_checkpoint", "super()._save_checkpoint")


def test_verls_estimators_need_no_warning_about_such_a_method(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class_with_save(CompiledFunction())(compose(GRPO))
    assert "_save_checkpoint" not in caplog.text


def test_another_plugin_may_wrap_methods_of_verl_ext_and_verl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = []

    def wrap(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, wrapper)

    wrap(WithoutWorkers, "_save_checkpoint")  # below verl_ext's method
    wrap(WithMixin, "_save_checkpoint")  # above verl_ext's method
    wrap(ray_trainer, "compute_advantage")
    trainer = OwnFit(compose(*HADW, f"trainer.default_local_dir={tmp_path}"))
    trainer.fit(steps=1)
    trainer._save_checkpoint()
    assert calls == ["compute_advantage", "_save_checkpoint", "_save_checkpoint"]
    assert (tmp_path / "global_step_0/verl_ext.json").exists()
    [(data, _)] = OwnFit(compose(*DRGRPO)).fit(steps=1)
    assert advantages_per_row(data) == DRGRPO_ON_ACC


class CopiesSection(OwnFit):
    """A trainer that passes a copy of its section `algorithm`."""

    def options(self) -> dict[str, Any]:
        return {"config": copy.deepcopy(self.config.algorithm)}

    def advantages(self, data: Any = None) -> Any:
        if data is None:
            data = example_batch()
        name = self.config.algorithm.adv_estimator
        return ray_trainer.compute_advantage(data, adv_estimator=name, **self.options())


class OmitsSection(CopiesSection):
    """A trainer that passes no configuration, as some recipes of verl."""

    def options(self) -> dict[str, Any]:
        return {}


class ImportedByName(SeparateRayPPOTrainer):
    """A trainer of verl whose module has imported the functions by their names, without workers."""

    def __init__(self, config: Any) -> None:
        def init_without_workers(trainer: Any, config: Any, *_: Any) -> None:
            WithoutWorkers.__init__(trainer, config)

        with mock.patch.object(VERL_TRAINER, "__init__", init_without_workers):
            super().__init__(config, None, {}, None)

    def fit(self, steps: int = 1) -> list[Any]:
        results = []
        for _ in range(steps):
            data = example_batch()
            self.reward_tensor = data.batch["token_level_scores"]
            computed = self._fit_compute_advantage(data)
            metrics = ray_trainer.compute_data_metrics(batch=computed, use_critic=False)
            results.append((computed, metrics))
        return results


def fit_advantages(trainer: Any) -> list[float]:
    """Train for one step. Return the advantage of each response."""
    [(data, _)] = trainer.fit()
    return advantages_per_row(data)


def fit_updates(trainer: Any) -> float:
    """Train for one step. Return the number of updates in the history of hadw."""
    [(_, metrics)] = trainer.fit()
    return metrics[HADW_UPDATES]


@pytest.mark.parametrize("cls", [OwnFit, CopiesSection])
def test_each_trainer_computes_with_its_own_settings(cls: type[Any]) -> None:
    """It does not matter which trainer was made last."""
    unwhitened = (*GDPO, "+algorithm.gdpo.whiten=none")
    expected_of_first = fit_advantages(OwnFit(compose(*GDPO)))
    expected_of_second = fit_advantages(OwnFit(compose(*unwhitened)))
    assert expected_of_first != expected_of_second
    first, second = cls(compose(*GDPO)), cls(compose(*unwhitened))
    assert fit_advantages(first) == expected_of_first
    assert fit_advantages(second) == expected_of_second
    assert fit_advantages(first) == expected_of_first


@pytest.mark.parametrize("base", [OwnFit, CopiesSection])
def test_a_trainer_without_a_run_does_not_use_that_of_another(base: type[Any]) -> None:
    """The two trainers have the same configuration. The `__init__` of one does not call `super`."""

    class WithoutRun(base):
        def __init__(self, config: Any) -> None:
            self.config = config

    config = compose(*HADW)
    with_run, without_run = OwnFit(config), WithoutRun(config)
    for _ in range(2):
        with pytest.raises(IntegrationError):
            without_run.fit()
        with_run.fit()
    assert with_run._verl_ext.state["weight_by_history"]["updates"] == 2


def test_each_trainer_logs_the_metrics_of_its_own_batch() -> None:
    hadw, gdpo, grpo = OwnFit(compose(*HADW)), OwnFit(compose(*GDPO)), OwnFit(compose(GRPO))
    # All trainers compute before the first of them logs.
    data_of_hadw, data_of_gdpo, data_of_grpo = hadw.advantages(), gdpo.advantages(), grpo.advantages()
    metrics_of_hadw = hadw.logged(data_of_hadw)
    metrics_of_gdpo = gdpo.logged(data_of_gdpo)
    metrics_of_grpo = grpo.logged(data_of_grpo)
    of_interest = {HADW_UPDATES, "reward/format/mean"}
    assert of_interest & metrics_of_hadw.keys() == {HADW_UPDATES}
    assert of_interest & metrics_of_gdpo.keys() == {"reward/format/mean"}
    assert of_interest & metrics_of_grpo.keys() == set()


def test_without_verl_ext_the_last_batch_is_not_kept_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class OwnLoop(OwnFit):
        def fit(self) -> bool:
            data = self.advantages(example_batch())
            last_batch = weakref.ref(data)
            ray_trainer.compute_data_metrics(data, use_critic=False)
            data = None
            return last_batch() is not None  # while the frame of `fit` exists

    monkeypatch.setattr("verl_ext.trainers.ray_trainer.RUNS", weakref.WeakSet())
    trainer = OwnLoop(compose(GRPO))
    assert not trainer.fit()


def test_a_trainer_that_imported_the_function_by_name_uses_its_run() -> None:
    first, second = ImportedByName(compose(*HADW)), ImportedByName(compose(*HADW))
    assert fit_updates(first) == 1
    assert fit_updates(second) == 1
    assert fit_updates(first) == 2


def test_a_trainer_may_run_in_another_thread_than_it_was_made_in() -> None:
    trainer = OwnFit(compose(*HADW))
    with ThreadPoolExecutor(1) as pool:
        steps = pool.submit(trainer.fit, 2).result()
    assert [metrics[HADW_UPDATES] for _, metrics in steps] == [1, 2]


class ComputesInThread(OwnFit):
    """A trainer that computes advantages in another thread, whose stack contains no trainer."""

    def advantages(self) -> Any:
        algorithm = self.config.algorithm
        options = {"adv_estimator": algorithm.adv_estimator, "config": algorithm}
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(ray_trainer.compute_advantage, example_batch(), **options).result()


def test_another_thread_finds_the_run_by_the_passed_section() -> None:
    hadw, drgrpo = ComputesInThread(compose(*HADW)), ComputesInThread(compose(*DRGRPO))
    assert fit_updates(hadw) == 1
    assert fit_advantages(drgrpo) == DRGRPO_ON_ACC
    assert fit_updates(hadw) == 2
    assert fit_advantages(drgrpo) == DRGRPO_ON_ACC


def test_another_thread_cannot_distinguish_trainers_with_one_section() -> None:
    first = ComputesInThread(compose(*HADW))
    first.fit()
    second = ComputesInThread(first.config)
    with pytest.raises(IntegrationError):
        second.fit()
    assert first._verl_ext.state["weight_by_history"]["updates"] == 1


@pytest.mark.parametrize("cls", [OwnFit, CopiesSection, OmitsSection])
def test_trainers_that_share_a_configuration_have_their_own_histories_and_dumps(cls: type[Any], tmp_path: Any) -> None:
    config = compose(*HADW, f"+algorithm.verl_ext.dump_dir={tmp_path}")
    first, second = cls(config), cls(config)
    assert fit_updates(first) == 1
    assert fit_updates(second) == 1
    assert fit_updates(first) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["from-0-0", "from-0-1"]
