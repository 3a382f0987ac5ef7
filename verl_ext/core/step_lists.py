"""Lists of steps: read a list, check the order of its steps, and write a chain as a list."""

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from verl_ext.core import cross_reward, history, post_sum, steps
from verl_ext.core.chain import COMPARED, Chain, Step
from verl_ext.core.schema import parse_dataclass
from verl_ext.errors import ConfigurationError, unknown

_FOUND = [
    kind
    for module in (steps, cross_reward, post_sum, history)
    for kind in vars(module).values()
    if isinstance(kind, type)
]
STEPS: Mapping[str, type[Step]] = {
    kind.name: kind for kind in _FOUND if issubclass(kind, Step) and hasattr(kind, "name")
}
"""The built-in steps by name, which a list may contain."""


def read_step(item: Any, where: str, weights: tuple[float, ...] | None) -> Step:
    """Read one entry of a list. A step with a field `weights` gets `weights`, those of the rewards."""
    given = dict(item) if isinstance(item, Mapping) else {"step": item}
    name = given.pop("step", None)
    if not isinstance(name, str):
        raise ConfigurationError(
            f"{where} must name a step, found {item!r}. Use the name of a step or {{step: name, setting: value}}."
        )
    kind = _own(name, where) if ":" in name else STEPS.get(name)
    if kind is None:
        raise ConfigurationError(f"{where}: {unknown('step', name, STEPS)}, or package.module:Class for a custom step.")
    if any(field.name == "weights" for field in dataclasses.fields(kind)):
        if "weights" in given:
            raise ConfigurationError(
                f"{where}: {name} takes its weights from algorithm.rewards.weights, found weights={given['weights']}. "
                "Remove weights from the list, and set algorithm.rewards.weights instead."
            )
        given["weights"] = weights
    try:
        return parse_dataclass(kind, given, name)
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}: {error}") from error


def _own(path: str, where: str) -> type[Step]:
    """Import and check the class of a custom step."""
    module, _, name = path.partition(":")
    try:
        kind: Any = getattr(importlib.import_module(module), name)
    except Exception as error:  # a module may raise anything
        raise ConfigurationError(
            f"{where}: the step {path!r} cannot be imported ({type(error).__name__}: {error}). Use the form "
            "package.module:Class. Install the package, or add its folder to PYTHONPATH, on the machine that starts "
            "verl and on the node where verl's trainer runs."
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, Step) and isinstance(getattr(kind, "name", None), str)):
        raise ConfigurationError(
            f"{where}: {path!r} is not a step. Use a frozen dataclass that inherits from verl_ext.Step, with a string "
            "`name` and a method `apply(self, values, batch)`."
        )
    if kind.name in STEPS:
        remedy = f"Use {kind.name!r} instead" if STEPS[kind.name] is kind else "Set another `name` in the class"
        raise ConfigurationError(f"{where}: {path!r} has the name of the built-in step {kind.name!r}. {remedy}.")
    return kind


def check_order(chosen: Sequence[Step], where: str) -> None:
    """Raise unless the list has exactly one sum, and the order of the steps follows their rules."""
    sums = [index for index, step in enumerate(chosen) if step.sums]
    if len(sums) != 1:
        remedy = "Remove all but one of them." if sums else "Add weighted_sum."
        raise ConfigurationError(
            f"{where} must have exactly one step that sums the rewards, such as weighted_sum, found {len(sums)}. "
            f"{remedy} Steps before the sum process each reward separately, and steps after the sum process the sum."
        )
    for index, step in enumerate(chosen):
        place = f"{where}[{index}]: {step.name}"
        before = chosen[:index]
        alike = chosen[sums[0] if index > sums[0] else 0 : index]
        for needed, reason in step.after.items():
            if needed not in _words(before):
                raise ConfigurationError(
                    f"{place} must come after {needed}, because {reason}. Put {_as_name(needed)} before {step.name}."
                )
        for wrong, reason in step.not_after.items():
            if wrong in _words(before):
                remedy = _move(step, wrong, before)
                raise ConfigurationError(f"{place} must not come after {wrong}, because {reason}. {remedy}")
        for wrong, reason in step.undoes.items():
            if wrong in _words(alike):
                shown, remedy = wrong, f"Remove {wrong} or {step.name}."
                if wrong not in {earlier.name for earlier in alike}:
                    shown, remedy = f"{wrong}=True", f"Set {wrong}=False, or remove {step.name}."
                raise ConfigurationError(f"{place} must not come after {shown}, because {reason}. {remedy}")


def _move(step: Step, wrong: str, before: Sequence[Step]) -> str:
    """Return how to reorder a list in which `step` comes after the word `wrong`."""
    place = next(index for index in range(len(before)) if wrong in _words(before[: index + 1]))
    earlier = before[place]
    if earlier.name == step.name:
        return f"Remove one of the two {step.name} steps."
    # The step keeps its place behind the steps that it needs.
    needed = [_as_name(word) for word in step.after if word not in _words(before[:place])]
    return f"Move {' and '.join([*needed, step.name])} before {earlier.name}, or remove {step.name}."


def _as_name(word: str) -> str:
    """Return the step that a word of `after` stands for."""
    return steps.Center.name if word == COMPARED else word


def _words(chosen: Sequence[Step]) -> set[str]:
    """Return the words of `after`, `not_after` and `undoes` that hold for these steps.

    The words are the names of the steps, `center` and `weighted_sum` for other steps that center and sum, COMPARED for
    steps that compare, and the names of settings that are True.
    """
    names = {step.name for step in chosen}
    names |= {steps.Center.name for step in chosen if step.centers}
    names |= {COMPARED for step in chosen if step.centers or step.compares}
    names |= {steps.WeightedSum.name for step in chosen if step.sums}
    return names | {name for step in chosen for name, value in vars(step).items() if value is True}


def as_list(chain: Chain) -> list[str | dict[str, Any]]:
    """Return the list that describes a chain, without settings at their defaults.

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
    """Return the settings of a step as plain data, without `weights`, which are `algorithm.rewards.weights`."""
    return {name: value for name, value in dataclasses.asdict(step).items() if name != "weights"}
