"""reference/settings.md: a table for each section of settings, from the dataclasses."""

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from generated_pages.markdown import names_text, table
from generated_pages.methods import chain_of
from verl_ext.core.schema import LARGEST_WEIGHT
from verl_ext.methods import METHODS
from verl_ext.registry import sections
from verl_ext.settings import COMMON
from verl_ext.tools.show import as_text

INTRODUCTION = """
# Settings

verl_ext reads its settings from sections of `algorithm` in verl's configuration. Each section has a table below.

A preset such as `+verl_ext=gdpo` adds the sections `rewards` and `verl_ext` and the section of its estimator, with
these defaults. Without a preset, write `++` before a setting: `++algorithm.gdpo.scale=mad`.

verl_ext raises an error before Ray starts if a name is unknown, or if a value has the wrong type or is out of range. It
also raises an error for most settings without effect, for example `gd2po.tau` with `gd2po.conflict=hard`. If the run
changes a setting of an estimator that it does not use, verl_ext logs a warning.
"""

VERL_SETTINGS = """
## Settings of verl

Two of verl's own settings under `algorithm` change what a [method](../methods/index.md) computes.

`norm_adv_by_std_in_grpo=False` removes the division by the group's standard deviation (the step `scale_by_std`).

{norm_by_std}

`use_kl_in_reward=True` adds a KL term to the sum of the rewards.

{kl_in_reward}

With `hadw`, the base decides. The same rules apply to the steps of [more methods](../methods/more.md) and of
[composed estimators](../methods/compose.md).
"""


def blocks() -> Iterator[str]:
    """Yield the blocks of the page. Sections of other packages are left out."""
    yield INTRODUCTION
    kinds = {name: kind for name, kind in sections().items() if kind.__module__.startswith("verl_ext.")}
    for name in [*COMMON, *sorted(kinds.keys() - COMMON.keys())]:
        yield f"## algorithm.{name}"
        yield table(["setting", "default", "description"], _rows(kinds[name]))
    yield VERL_SETTINGS.format(norm_by_std=_effects_of_norm_by_std(), kl_in_reward=_effects_of_kl_in_reward())


def _rows(kind: type[Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the row of each setting of a section."""
    texts = descriptions(kind)
    for item in dataclasses.fields(kind):
        yield f"`{item.name}`", f"{_default(item.default)}{_limits(item.metadata)}", texts[item.name]


def descriptions(kind: type[Any]) -> dict[str, str]:
    """Return the description of each setting of a dataclass, including the settings that it inherits."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if dataclasses.is_dataclass(base):
            texts |= _docstrings_of_fields(base)
    return texts


def _docstrings_of_fields(kind: type[Any]) -> dict[str, str]:
    """Return the docstring below each field that a dataclass defines itself, in one line."""
    source = textwrap.dedent(inspect.getsource(kind))
    definition = ast.parse(source).body[0]
    assert isinstance(definition, ast.ClassDef)
    texts = {}
    for statement, next_statement in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            texts[statement.target.id] = " ".join(_string(next_statement).split())
    return texts


def _string(statement: ast.stmt) -> str:
    """Return the text of a statement that is only a string, and an empty text for any other statement."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return str(statement.value.value)
    return ""


def _default(value: Any) -> str:
    return "required" if value is dataclasses.MISSING else f"`{as_text(value)}`"


def _limits(metadata: Mapping[str, Any]) -> str:
    """Return the limits of a number, for example " (0 to 1)", or an empty text without limits."""
    low = metadata.get("low")
    above = metadata.get("above")
    high = metadata.get("high")
    if high == LARGEST_WEIGHT:  # such limits only prevent an overflow
        high = None
        low = None if low == -LARGEST_WEIGHT else low
    if low is not None and high is not None:
        return f" ({low:g} to {high:g})"
    if low is not None:
        return f" (at least {low:g})"
    return "" if above is None else f" (above {above:g})"


METHODS_WITH_OWN_STEPS = sorted(METHODS.keys() - {"compose", "hadw"})
"""The methods whose steps do not depend on a list or on another method."""


def _effects_of_norm_by_std() -> str:
    """Return which methods drop a step, ignore or reject `norm_adv_by_std_in_grpo=False`."""
    changed = []
    unchanged = []
    rejected = []
    for name in METHODS_WITH_OWN_STEPS:
        steps = chain_of(name, norm_adv_by_std_in_grpo=False).steps
        if any(step.divides_by_std for step in steps):
            rejected.append(name)
        elif steps == chain_of(name).steps:
            unchanged.append(name)
        else:
            changed.append(name)
    lines = [
        f"- The division is removed from {names_text(changed)}.",
        f"- Nothing changes in {names_text(unchanged)}, because they have no such division.",
        f"- {names_text(rejected)} raise an error, because they divide by another measure of scale by default.",
    ]
    return "\n".join(lines)


def _effects_of_kl_in_reward() -> str:
    """Return which methods accept or reject `use_kl_in_reward=True`."""
    accepted = []
    per_reward = []
    nonnegative = []
    for name in METHODS_WITH_OWN_STEPS:
        chain = chain_of(name)
        if chain.per_reward:
            per_reward.append(name)
        elif any(step.needs_nonnegative for step in chain.steps):
            nonnegative.append(name)
        else:
            accepted.append(name)
    lines = [
        f"- The term is added with {names_text(accepted)}.",
        f"- {names_text(per_reward)} raise an error, because they process each reward separately.",
        f"- {names_text(nonnegative)} raises an error, because its rewards must be at least 0.",
    ]
    return "\n".join(lines)
