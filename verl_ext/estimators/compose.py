r"""`adv_estimator=compose`: an estimator written as a list of steps in the configuration.

    algorithm:
      adv_estimator: compose
      rewards: {keys: [correctness, format]}
      compose:
        steps: [centre, scale_by_mad, weigh_and_sum, whiten, {step: weigh_by_difficulty, dqw_temp: 1.0}]

A list names steps of the named estimators, which `python -m verl_ext show NAME` prints as such lists, and steps of your
own as `package.module:Class`. Exactly one is `weigh_and_sum`. A step with a field `weights` gets
`algorithm.rewards.weights`.
"""

from __future__ import annotations

import dataclasses
import importlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl_ext.core.batch import Batch
from verl_ext.core.chain import SUM, Chain, Step, plain_state
from verl_ext.core.groups import Array
from verl_ext.core.history import WeighByHistory
from verl_ext.core.steps import (
    Centre,
    Condition,
    DivideByBatchStd,
    DivideByMean,
    DropConflicts,
    ScaleByMad,
    ScaleByStd,
    WeighAndSum,
    WeighByVariation,
)
from verl_ext.core.totals import Balance, Shorten, WeighByDifficulty, WeighByFocal, Whiten
from verl_ext.core.typed import make
from verl_ext.errors import ConfigurationError, listed, unknown
from verl_ext.settings import Settings

WHERE = "algorithm.compose.steps"
_KINDS: tuple[type[Step], ...] = (
    *(Condition, DivideByMean, DivideByBatchStd, Centre, ScaleByStd, ScaleByMad, DropConflicts),
    *(WeighByVariation, WeighAndSum, Shorten, Whiten, Balance, WeighByDifficulty, WeighByFocal, WeighByHistory),
)
STEPS: Mapping[str, type[Step]] = {kind.name: kind for kind in _KINDS}
"""The steps that a list may name."""


@dataclass(frozen=True)
class ComposeSettings:
    """`algorithm.compose`."""

    steps: tuple[Any, ...] | None = None
    """In order, each a name, or `{step: name, setting: value}`; `package.module:Class` is a step of your own."""


SECTION = ComposeSettings


def compose(settings: Settings) -> Chain:
    """The chain that the list describes.

    >>> chain = compose(Settings.parse({"compose": {"steps": ["weigh_and_sum", "centre"]}}))
    >>> chain(Batch.of([[1], [0]], ["a", "a"])).advantages
    array([ 0.5, -0.5])
    """
    items = settings.of(ComposeSettings).steps
    if not items:
        raise ConfigurationError(
            f"algorithm.adv_estimator=compose needs a list of steps: set '{WHERE}=[...]', for example "
            "'[weigh_and_sum,centre,scale_by_std]'; `python -m verl_ext show gdpo` prints the list of gdpo"
        )
    steps = tuple(_step(item, f"{WHERE}[{index}]", settings) for index, item in enumerate(items))
    check_order(steps, WHERE)
    return Chain(steps)


def _step(item: Any, where: str, settings: Settings) -> Step:
    given = dict(item) if isinstance(item, Mapping) else {"step": item}
    name = given.pop("step", None)
    if not isinstance(name, str):
        raise ConfigurationError(f"{where} must be a step's name, or {{step: name, setting: value}}, found {item!r}")
    kind = _own(name, where) if ":" in name else STEPS.get(name)
    if kind is None:
        raise ConfigurationError(
            f"{where}: {unknown('step', name, STEPS)}, or package.module:Class for one of your own"
        )
    if any(field.name == "weights" for field in dataclasses.fields(kind)):
        if "weights" in given:
            raise ConfigurationError(f"{where}: set the weights of {name} by algorithm.rewards.weights")
        given["weights"] = settings.rewards.weights
    try:
        return make(kind, given, name)
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}: {error}") from error


def _own(path: str, where: str) -> type[Step]:
    """Import the class of a user's step, and check it."""
    module, _, name = path.partition(":")
    try:
        kind: Any = getattr(importlib.import_module(module), name)
    except Exception as error:  # a module may raise anything
        raise ConfigurationError(
            f"{where}: {path!r} cannot be imported: {type(error).__name__}: {error}; write package.module:Class, and "
            "install the package or put it on PYTHONPATH, in the driver and where verl's trainer runs"
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, Step) and isinstance(getattr(kind, "name", None), str)):
        raise ConfigurationError(
            f"{where}: {path!r} is not a step: write a frozen dataclass that inherits verl_ext.Step, with a "
            "string `name` and `apply(self, values, batch)`"
        )
    if kind.name in STEPS:
        raise ConfigurationError(f"{where}: verl_ext has a step {kind.name!r} already: rename {path!r}")
    return kind


def check_order(steps: Sequence[Step], where: str) -> None:
    """Raise unless there is one sum, and each step makes sense after those before it."""
    names = [step.name for step in steps]
    if names.count(SUM) != 1:
        raise ConfigurationError(
            f"{where} must have {SUM} once, found {names.count(SUM)}: put it first to work on the total, or later to "
            "apply steps to each reward before"
        )
    for index, step in enumerate(steps):
        before = {*names[:index], *(Centre.name for earlier in steps[:index] if earlier.centres)}
        alike = steps[names.index(SUM) if SUM in before else 0 : index]
        switched_on = {name for earlier in alike for name, value in vars(earlier).items() if value is True}
        words = switched_on.union(earlier.name for earlier in alike)
        for needed, reason in step.after.items():
            if needed not in before:
                raise ConfigurationError(f"{where}[{index}]: {step.name} must come after {needed}, because {reason}")
        undone = {word: reason for word, reason in step.undoes.items() if word in words}
        for wrong, reason in {**step.not_after, **undone}.items():
            if wrong in before or wrong in undone:
                raise ConfigurationError(f"{where}[{index}]: {step.name} must not come after {wrong}, because {reason}")


def try_out(build: Callable[[Settings], Chain], settings: Settings) -> str | None:
    """Run an estimator on a made-up batch, because a step of the user may fail; return what is wrong, or None.

    If weights are set, it runs with two other sets of them, whose results must differ. A step that centres must leave
    exactly 0 in a group without variance.
    """
    keys, weights = settings.rewards.keys or ("score",), settings.rewards.weights
    tilted = (1.0, *(0.1,) * (len(keys) - 1))
    try:
        chain = build(settings)
        if chain.needs_fields:  # nobody can make them up
            return None
        advantages, rounding = _trial(chain, keys)
        results = [_trial(build(_weighed(settings, tilt)), keys)[0] for tilt in (tilted, tilted[::-1]) if weights]
    except Exception as error:  # noqa: BLE001 - user code may raise anything
        place = traceback.extract_tb(error.__traceback__)[-1]
        return (
            f"the estimator, tried on a made-up batch of 12 responses, raises {type(error).__name__}: {error} "
            f"({place.filename}, line {place.lineno})"
        )
    if not np.isfinite(advantages).all():
        return "the estimator, tried on a made-up batch of 12 responses, returns advantages that are not finite"
    if rounding:
        return (
            f"{listed(rounding)} with `centres = True` must give exactly 0 in a group without variance: return "
            "centred * batch.groups.broadcast(batch.groups.varies(values))"
        )
    if len(keys) > 1 and results and np.allclose(results[0], results[1], rtol=1e-9, atol=1e-12):
        return "algorithm.rewards.weights has no effect on this estimator: sum the rewards with WeighAndSum(weights)"
    return None


def _weighed(settings: Settings, weights: tuple[float, ...]) -> Settings:
    return dataclasses.replace(settings, rewards=dataclasses.replace(settings.rewards, weights=weights))


def _trial(chain: Chain, keys: tuple[str, ...]) -> tuple[Array, list[str]]:
    """Advantages on a made-up batch, and the steps that centre a group without variance but for rounding.

    Raise if the chain fails or its state cannot be saved. Without the steps that may leave nothing of the batch.
    """
    chain = Chain(tuple(step for step in chain.steps if not isinstance(step, Condition | DropConflicts)))
    draw = np.random.default_rng(0)
    rewards = draw.integers(0, 2, (12, len(keys))).astype(np.float64)
    rewards[8:] = np.array([[0.3], [np.float32(0.3)]] * 2)
    weighing = (step for step in chain.steps if isinstance(step, WeighByVariation))
    rewards += max((value for step in weighing for value in step.lowest or ()), default=0.0)
    batch = Batch.of(
        rewards,
        list("aaaabbbbcccc"),
        keys=keys,
        lengths=draw.integers(1, 9, 12).astype(np.float64),
        accuracy=draw.integers(0, 2, 12).astype(np.float64) if chain.needs_accuracy else None,
    )
    result = chain(batch)
    plain_state(result.state)
    rounding, values = [], batch.rewards
    for step in chain.steps:
        dead = ~batch.groups.broadcast(batch.groups.varies(values))
        values = step.update(values, batch, step.init()).values
        if step.centres and values[dead].any():
            rounding.append(step.name)
    return result.advantages, rounding


def as_list(chain: Chain) -> list[str | dict[str, Any]]:
    """The list that describes a chain; settings at their defaults are left out.

    >>> as_list(Chain((WeighAndSum(), Centre(), ScaleByMad(0.5))))
    ['weigh_and_sum', 'centre', {'step': 'scale_by_mad', 'epsilon': 0.5}]
    """
    described: list[str | dict[str, Any]] = []
    for step in chain.steps:
        kind = type(step)
        name = step.name if STEPS.get(step.name) is kind else f"{kind.__module__}:{kind.__qualname__}"
        defaults = {item.name: item.default for item in dataclasses.fields(step)}
        given = {key: value for key, value in settings_of(step).items() if value != defaults[key]}
        described.append({"step": name, **given} if given else name)
    return described


def settings_of(step: Step) -> dict[str, Any]:
    """The settings of a step as plain data, without `weights`, which are `algorithm.rewards.weights`."""
    return {name: value for name, value in dataclasses.asdict(step).items() if name != "weights"}
