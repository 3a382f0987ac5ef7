"""Trainers that reach verl's functions in other ways than verl's own: subclasses, copies, threads, other packages.

Each kind runs with an estimator of this package that has a state, two without, and one of verl's. Compared are the
advantages and metrics, or the type of the error.
"""

import copy
import functools
import inspect
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from verl import DataProto
from verl.experimental.separation.ray_trainer import SeparateRayPPOTrainer
from verl.trainer.ppo import core_algos, ray_trainer, v1
from verl.trainer.ppo.v1 import trainer_base

from same_as.cases import Case, Draw, Scheme, draw_rows
from same_as.spelling import Spelling
from same_as.store import in_this_process
from same_as.trainer_kinds import KINDS
from same_as.trainers import (
    NAME,
    DefaultWithoutWorkers,
    RayWithoutWorkers,
    WithoutWorkers,
    config_of,
    data_of,
    put_rows,
    saved_state,
)

VERLS: Any = ray_trainer.RayPPOTrainer.__mro__[-2]
"""verl's own class, below what plugins put over it."""
SECTIONS = {
    "hadw": {"rewards": {"keys": ["acc"]}},
    "gdpo": {"rewards": {"keys": ["acc", "format"]}},
    "drgrpo": {"rewards": {"keys": ["acc"]}, "drgrpo": {"check_loss": False}},
    "grpo": {"rewards": {"keys": ["acc"]}},
}


def draw_case(seed: int) -> Case:
    """Return the case of a kind of trainer: the seed is its place in the list."""
    kind, method = KINDS[seed]
    rng = Draw("trainers", seed)
    case = Case("trainers", seed, method, SECTIONS[method], trainer=kind, tags=[f"trainer {kind}"])
    scheme = Scheme("naive", False, ["acc", "format"], "sum", "equal", False, {}, [], False, False, False)
    case.batches = [draw_rows(rng, case, scheme, sessions=False, rejecting=False) for _ in range(3)]
    return case


class Bare(WithoutWorkers, VERLS):
    """Over verl's own class, as a module has it that imported it by name before the plugin was loaded."""


class OwnInit(RayWithoutWorkers):
    """Does not call `super`."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.prepare()


class OwnFunction(RayWithoutWorkers):
    """Computes advantages by `compute`."""

    def compute(self, data: DataProto, **given: Any) -> Any:
        raise NotImplementedError

    def advantages(self, data: DataProto) -> Any:
        self.kl_metrics = {}
        data.batch["token_level_rewards"] = data.batch["token_level_scores"]
        algorithm = self.config.algorithm
        return self.compute(data, adv_estimator=algorithm.adv_estimator, config=algorithm)


class BareFunction(OwnFunction):
    """Holds verl's function from before the plugin was loaded."""

    def compute(self, data: DataProto, **given: Any) -> Any:
        return inspect.unwrap(ray_trainer.compute_advantage)(data, **given)


class OfRegistry(OwnFunction):
    """Calls the function of verl's registry by itself."""

    def compute(self, data: DataProto, **given: Any) -> Any:
        function = core_algos.get_adv_estimator_fn(given["adv_estimator"])
        advantages, returns = function(
            token_level_rewards=data.batch["token_level_rewards"],
            response_mask=data.batch["response_mask"],
            index=data.non_tensor_batch["uid"],
            config=given["config"],
        )
        data.batch["advantages"], data.batch["returns"] = advantages, returns
        return data


class OtherEstimator(OwnFunction):
    """Asks for another estimator than its configuration."""

    def compute(self, data: DataProto, **given: Any) -> Any:
        return ray_trainer.compute_advantage(data, **{**given, "adv_estimator": "dgpo"})


class OwnAdvantages(RayWithoutWorkers):
    """Computes every second batch in its own way."""

    calls = 0

    def advantages(self, data: DataProto) -> Any:
        self.calls += 1
        if self.calls % 2:
            return super().advantages(data)
        self.kl_metrics = {}
        data.batch["token_level_rewards"] = data.batch["token_level_scores"]
        data.batch["advantages"] = data.batch["returns"] = data.batch["token_level_scores"]
        return data


class OwnSave(RayWithoutWorkers):
    """Its checkpoints are its own."""

    def _save_checkpoint(self) -> None: ...


class Polite(RayWithoutWorkers):
    """Its checkpoints begin with those of the class above."""

    def _save_checkpoint(self) -> None:
        super()._save_checkpoint()


class Copies(OwnFunction):
    """Passes a copy of its section."""

    def compute(self, data: DataProto, **given: Any) -> Any:
        return ray_trainer.compute_advantage(data, **{**given, "config": copy.deepcopy(given["config"])})


class Omits(OwnFunction):
    """Passes no configuration, as some recipes of verl."""

    def compute(self, data: DataProto, **given: Any) -> Any:
        return ray_trainer.compute_advantage(data, adv_estimator=given["adv_estimator"])


class InAThread(OwnFunction):
    """Computes advantages in another thread, whose stack has no trainer."""

    def compute(self, data: DataProto, **given: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(ray_trainer.compute_advantage, data, **given).result()


class ByName(WithoutWorkers, SeparateRayPPOTrainer):
    """verl's trainer that has imported the functions by their names."""

    def __init__(self, config: Any) -> None:
        def prepared(trainer: Any, config: Any, *_args: Any, **_kwargs: Any) -> None:
            trainer.config = config
            trainer.prepare()

        with mock.patch.object(VERLS, "__init__", prepared):
            SeparateRayPPOTrainer.__init__(self, config, None, {}, None)

    def advantages(self, data: DataProto) -> Any:
        self.kl_metrics = {}
        self.reward_tensor = data.batch["token_level_scores"]
        return self._fit_compute_advantage(data)


class OfAnotherPackage(DefaultWithoutWorkers):
    """Some methods are its own, without `super`."""

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        return batch


class OwnWay(DefaultWithoutWorkers):
    """Computes advantages in its own way."""

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        return batch


class OwnCheckpoints(DefaultWithoutWorkers):
    """Neither method of its checkpoints calls `super`."""

    def _save_checkpoint(self) -> None:
        self.saved = self.global_steps

    def _load_checkpoint(self) -> None:
        self.global_steps = 0


RAY: dict[str, type[Any]] = {
    "own fit": RayWithoutWorkers,
    "bare class": Bare,
    "own init": OwnInit,
    "bare function": BareFunction,
    "of the registry": OfRegistry,
    "other estimator": OtherEstimator,
    "own advantages": OwnAdvantages,
    "own save": OwnSave,
    "polite save": Polite,
    "copies": Copies,
    "omits": Omits,
    "by name": ByName,
    "made in another thread": RayWithoutWorkers,
    "works in a thread": InAThread,
    "twins": InAThread,
    "two runs": RayWithoutWorkers,
    "shared configuration": RayWithoutWorkers,
    "wrapped by a plugin": RayWithoutWorkers,
}
DEFAULT: dict[str, type[Any]] = {
    "V1 sync": DefaultWithoutWorkers,
    "V1 of another package": OfAnotherPackage,
    "V1 own way": OwnWay,
    "V1 not chosen": DefaultWithoutWorkers,
    "V1 own checkpoints": OwnCheckpoints,
    "V1 wrapped": DefaultWithoutWorkers,
}


def run_other_trainer(case: Case, spelling: Spelling, outcome: dict[str, Any]) -> None:
    """Run the batches of a case in its kind of trainer; an error of a batch ends the case."""
    method, algorithm = spelling.translate(case.method, case.algorithm)
    with tempfile.TemporaryDirectory(prefix="same_as-") as name:
        folder = Path(name)

        def configured(**more: Any) -> Any:
            overrides = {"trainer.use_v1": case.trainer not in RAY, **more}
            return config_of(method, algorithm, overrides, folder)

        step = _ray(case.trainer, configured) if case.trainer in RAY else _default(case.trainer, configured)
        for number, rows in enumerate(case.batches, start=1):
            trainer, result = step(number, rows)
            outcome["batches"].append(result)
            if case.method == "hadw":
                trainer._save_checkpoint()
                result["state"] = saved_state(folder / "checkpoints" / f"global_step_{number}")


def _ray(kind: str, configured: Callable[..., Any]) -> Callable[[int, Any], Any]:
    """Make the trainers of a kind, and return the function that runs a batch in the one whose turn it is."""
    cls = RAY[kind]
    if kind == "wrapped by a plugin":
        return _wrapped(lambda: _ray("own fit", configured))
    if kind == "made in another thread":
        with ThreadPoolExecutor(1) as pool:
            trainers = [pool.submit(cls, configured()).result()]
    elif kind == "two runs":
        trainers = [cls(configured()), cls(configured(**{"algorithm.rewards.weights": None}))]
    elif kind in ("twins", "shared configuration"):
        config = configured()
        trainers = [cls(config), cls(config)]
    else:
        trainers = [cls(configured())]

    def step(number: int, rows: Any) -> Any:
        trainer = trainers[(number - 1) % len(trainers)]
        trainer.global_steps = number
        if kind == "made in another thread":
            with ThreadPoolExecutor(1) as pool:
                data, metrics = pool.submit(trainer.step, data_of(rows)).result()
        else:
            data, metrics = trainer.step(data_of(rows))
        return trainer, {"advantages": list(np.asarray(data.batch["advantages"])), "metrics": metrics}

    return step


def _default(kind: str, configured: Callable[..., Any]) -> Callable[[int, Any], Any]:
    """Make the default trainer of a kind, and return the function that runs a batch in it."""
    cls = DEFAULT[kind]
    if kind == "V1 not chosen":
        trainer = cls(configured())
    else:
        with mock.patch.dict(trainer_base.TRAINER_REGISTRY, {NAME: cls}):
            chosen = v1.get_trainer_cls(NAME)
        if kind == "V1 wrapped":
            chosen = type("Above", (chosen,), {"_compute_advantage": _counted(chosen._compute_advantage)})
        trainer = chosen(configured())

    def step(number: int, rows: Any) -> Any:
        trainer.global_steps = number
        metrics: dict[str, Any] = {}
        with in_this_process() as store:
            batch = put_rows(store, rows)
            trainer._compute_advantage(batch, metrics)
            stored = [store.rows["train"][key].get("advantages") for key in batch.keys]
        rows_of = [np.zeros(0) if row is None else row.numpy() for row in stored]
        return trainer, {"advantages": rows_of, "metrics": metrics}

    return step


def _counted(original: Callable[..., Any]) -> Callable[..., Any]:
    def counted(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        result = original(self, batch, metrics)
        metrics["another/calls"] = metrics.get("another/calls", 0) + 1
        return result

    return counted


def _wrapped(make: Callable[[], Callable[[int, Any], Any]]) -> Callable[[int, Any], Any]:
    """Run batches while another plugin has wrapped verl's function and a method of the class in the module."""
    calls = []

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            calls.append(original.__name__)
            return original(*args, **kwargs)

        return wrapper

    inner = make()

    def step(number: int, rows: Any) -> Any:
        function = around(ray_trainer.compute_advantage)
        method = around(ray_trainer.RayPPOTrainer._save_checkpoint)
        with (
            mock.patch.object(ray_trainer, "compute_advantage", function),
            mock.patch.object(ray_trainer.RayPPOTrainer, "_save_checkpoint", method),
        ):
            trainer, result = inner(number, rows)
            trainer._save_checkpoint()
        return trainer, {**result, "calls": list(calls)}

    return step
