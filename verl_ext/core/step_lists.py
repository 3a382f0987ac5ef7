"""Lists of steps: read a list, check the order of its steps, and write a chain as a list."""

import dataclasses
import importlib
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from verl_ext.core import cross_reward, post_sum, steps
from verl_ext.core.chain import Chain, Step
from verl_ext.core.schema import parse_dataclass
from verl_ext.errors import ConfigurationError, unknown


def _steps_in(*modules: ModuleType) -> Iterator[type[Step]]:
    """Yield the steps that the modules define or import."""
    for module in modules:
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, Step) and hasattr(value, "name"):
                yield value


STEPS: Mapping[str, type[Step]] = {kind.name: kind for kind in _steps_in(steps, cross_reward, post_sum)}
"""The built-in steps by name, which a list may contain."""


def is_built_in(step: Step) -> bool:
    """Return whether the step is a step that a list may name, and not a custom step."""
    return STEPS.get(step.name) is type(step)


def is_custom(step: Step) -> bool:
    """Return whether the step is defined outside this package.

    A method of this package may have a step that lists cannot name, such as the sum of dgpo with a KL term. Such a step
    is neither built-in nor custom.
    """
    return not is_built_in(step) and not type(step).__module__.startswith("verl_ext.methods.")


def read_step(item: Any, where: str) -> Step:
    """Read one entry of a list: the name of a step, or a mapping with its name and settings."""
    settings = dict(item) if isinstance(item, Mapping) else {"step": item}
    name = settings.pop("step", None)
    if not isinstance(name, str):
        raise ConfigurationError(
            f"{where} must name a step, found {item!r}. Use the name of a step or {{step: name, setting: value}}."
        )
    kind = _custom_step(name, where) if ":" in name else STEPS.get(name)
    if kind is None:
        raise ConfigurationError(f"{where}: {unknown('step', name, STEPS)}, or package.module:Class for a custom step.")
    if "weights" in settings:
        raise ConfigurationError(
            f"{where}: {name} takes its weights from algorithm.rewards.weights, found weights={settings['weights']}. "
            "Remove weights from the list, and set algorithm.rewards.weights instead."
        )
    try:
        return parse_dataclass(kind, settings, name)
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}: {error}") from error


def _custom_step(path: str, where: str) -> type[Step]:
    """Import and check the class of a custom step."""
    module, _, name = path.partition(":")
    try:
        kind: Any = getattr(importlib.import_module(module), name)
    except ConfigurationError as error:  # the class defines an attribute that steps do not have
        raise ConfigurationError(f"{where}: {error}") from error
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
    """Raise unless the list has exactly one sum, and each step is where its attributes say that it works.

    `verl_ext.core.effects` measures what the attributes cannot say: whether each step has an effect.
    """
    sums = [index for index, step in enumerate(chosen) if step.sums]
    if len(sums) != 1:
        remedy = "Remove all but one of them." if sums else "Add weighted_sum."
        raise ConfigurationError(
            f"{where} must have exactly one step that sums the rewards, such as weighted_sum, found {len(sums)}. "
            f"{remedy} Steps before the sum process each reward separately, and steps after the sum process the sum."
        )
    sum_index = sums[0]
    for index, step in enumerate(chosen):
        before = chosen[:index]
        after = chosen[index + 1 :]
        problem = ""
        if step.before_sum and index > sum_index:
            problem = (
                f"must come before the sum, because it needs the separate rewards of a response. Move {step.name} "
                f"before {chosen[sum_index].name}."
            )
        elif step.after_center and not any(earlier.centers or earlier.compares for earlier in before):
            problem = (
                "must come after center, or another step that compares the responses to a prompt, because it needs "
                f"values relative to their group. Put center before {step.name}."
            )
        elif step.before_center and not any(later.centers for later in after):
            problem = (
                "must come before center, because the values that it returns must be compared afterwards. Put center "
                f"after {step.name}."
            )
        elif _is_repeated(step, chosen[sum_index + 1 : index] if index > sum_index else before):
            problem = f"occurs twice. Remove one of the two {step.name} steps."
        if problem:
            raise ConfigurationError(f"{where}[{index}]: {step.name} {problem}")


def _is_repeated(step: Step, before: Sequence[Step]) -> bool:
    """Return whether a built-in step already occurs on the same side of the sum. `center` may occur twice."""
    if not is_built_in(step) or step.centers:
        return False
    return step.name in {earlier.name for earlier in before}


def as_list(chain: Chain) -> list[str | dict[str, Any]]:
    """Return the list that describes a chain, without settings at their defaults.

    >>> as_list(Chain((steps.WeightedSum(), steps.Center(), steps.ScaleByMad(0.5))))
    ['weighted_sum', 'center', {'step': 'scale_by_mad', 'epsilon': 0.5}]
    """
    described: list[str | dict[str, Any]] = []
    for step in chain.steps:
        kind = type(step)
        name = step.name if is_built_in(step) else f"{kind.__module__}:{kind.__qualname__}"
        defaults = {item.name: item.default for item in dataclasses.fields(step)}
        settings = {key: value for key, value in dataclasses.asdict(step).items() if value != defaults[key]}
        described.append({"step": name, **settings} if settings else name)
    return described
