"""Lists of steps: each step by its name, what may come after what, and a chain written as a list."""

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from verl_ext.core import history, many, steps, totals
from verl_ext.core.chain import COMPARED, Chain, Step
from verl_ext.core.typed import make
from verl_ext.errors import ConfigurationError, unknown

_FOUND = [kind for module in (steps, many, totals, history) for kind in vars(module).values() if isinstance(kind, type)]
STEPS: Mapping[str, type[Step]] = {
    kind.name: kind for kind in _FOUND if issubclass(kind, Step) and hasattr(kind, "name")
}
"""The steps that a list may name: those of four modules."""


def read_step(item: Any, where: str, weights: tuple[float, ...] | None) -> Step:
    """Read one entry of a list; `weights` are those of the rewards, for a step with such a field."""
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
        given["weights"] = weights
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


def check_order(chosen: Sequence[Step], where: str) -> None:
    """Raise unless there is one sum, and each step makes sense after those before it."""
    sums = [index for index, step in enumerate(chosen) if step.sums]
    if len(sums) != 1:
        raise ConfigurationError(
            f"{where} must have one step that sums, such as weighted_sum, found {len(sums)}: put it first to work on "
            "the total, or later to apply steps to each reward before"
        )
    for index, step in enumerate(chosen):
        place, before = f"{where}[{index}]: {step.name}", _words(chosen[:index])
        alike = _words(chosen[sums[0] if index > sums[0] else 0 : index])
        for needed, reason in step.after.items():
            if needed not in before:
                raise ConfigurationError(f"{place} must come after {needed}, because {reason}")
        for rules, words in ((step.not_after, before), (step.undoes, alike)):
            for wrong, reason in rules.items():
                if wrong in words:
                    raise ConfigurationError(f"{place} must not come after {wrong}, because {reason}")


def _words(chosen: Sequence[Step]) -> set[str]:
    """The words of `after`, `not_after` and `undoes` that hold for these steps.

    They are the steps' names, `center` and `weighted_sum` for others that center and sum, COMPARED for those that
    compare, and settings that are True.
    """
    names = {step.name for step in chosen}
    names |= {steps.Center.name for step in chosen if step.centers}
    names |= {COMPARED for step in chosen if step.centers or step.compares}
    names |= {steps.WeightedSum.name for step in chosen if step.sums}
    return names | {name for step in chosen for name, value in vars(step).items() if value is True}


def as_list(chain: Chain) -> list[str | dict[str, Any]]:
    """The list that describes a chain; settings at their defaults are left out.

    >>> as_list(Chain((steps.WeightedSum(), steps.Center(), steps.ScaleByMad(0.5))))
    ['weighted_sum', 'center', {'step': 'scale_by_mad', 'epsilon': 0.5}]
    """
    described: list[str | dict[str, Any]] = []
    for step in chain.steps:
        kind = type(step)
        name = step.name if STEPS.get(step.name) is kind else f"{kind.__module__}:{kind.__qualname__}"
        defaults = {item.name: item.default for item in dataclasses.fields(step)}
        given = {key: value for key, value in step_settings(step).items() if value != defaults[key]}
        described.append({"step": name, **given} if given else name)
    return described


def step_settings(step: Step) -> dict[str, Any]:
    """The settings of a step as plain data, without `weights`, which are `algorithm.rewards.weights`."""
    return {name: value for name, value in dataclasses.asdict(step).items() if name != "weights"}
