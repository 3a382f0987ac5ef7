"""The estimators by name: those of this package, and those of other packages.

An estimator is a row of `verl_ext.methods.simple`, or a module with a function of its name, from `Settings` to `Chain`. The
module may also have

- `SECTION`, the dataclass of its settings, which are under `algorithm.<name>`;
- `PRESET`, what `+verl_ext=<name>` sets in addition to `algorithm`, for example the loss of the paper;
- `rule(settings, select)`, which yields a `Finding` about verl's configuration; `select` reads an entry of it;
- `bases()`, the estimators that it can build on; its setting `base` names the one in force.

To add one to this package: a row, or a file in `verl_ext/estimators/` and its name in `BUILT_IN`. Another package
registers `name = "module"` in the entry-point group `verl_ext.estimators`. Every process of a run reads this list,
which imports none of the modules: `load` imports one, `sections` all.
"""

import importlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields, make_dataclass, replace
from functools import cache
from importlib.metadata import entry_points
from typing import Any, TypeVar, get_type_hints

from verl_ext.core.chain import Chain
from verl_ext.core.schema import parse_dataclass
from verl_ext.core.steps import ScaleByStd
from verl_ext.errors import ConfigurationError, Finding, nearest, unknown
from verl_ext.methods.simple import ROWS
from verl_ext.settings import COMMON, VERL_NAMES, Settings

T = TypeVar("T")

BUILT_IN = ("compose", "dgpo", "drgrpo", "gdpo", "hadw")
ENTRY_POINT_GROUP = "verl_ext.estimators"
"""The entry-point group in which other packages register their estimators."""
TAKEN = frozenset({"gae", *BUILT_IN, *ROWS})
"""Names that other packages cannot use: verl computes `gae` and `grpo` without a look into its registry."""
ENTRY_POINTS = {entry.name: entry.value for entry in entry_points(group=ENTRY_POINT_GROUP)}
"""What installed packages register, by name."""
ESTIMATORS: Mapping[str, str] = {
    **{name: f"verl_ext.methods.{'simple' if name in ROWS else name}" for name in sorted((*BUILT_IN, *ROWS))},
    **{name: ENTRY_POINTS[name] for name in sorted(ENTRY_POINTS.keys() - TAKEN)},
}
"""Name to module."""
INSTALLED = tuple(name for name in ESTIMATORS if name != "grpo")
"""The names by which verl's trainers call this package; `grpo` there is verl's own."""


@dataclass(frozen=True)
class NoSettings:
    """The section of an estimator that has no settings."""


@dataclass(frozen=True)
class Estimator:
    """What the module of an estimator declares."""

    chain: Callable[[Settings], Chain]
    section: type[Any]
    preset: Mapping[str, Any]
    rule: Callable[[Settings, Callable[[str], Any]], Iterable[Finding]]
    bases: Callable[[], Sequence[str]] | None


def build(name: str, settings: Settings) -> Chain:
    """Build the chain of an estimator from the settings.

    >>> [step.name for step in build("drgrpo", Settings()).steps]
    ['weighted_sum', 'center']
    """
    return load(name).chain(settings)


def load(name: str) -> Estimator:
    """Import the module of an estimator."""
    if name not in ESTIMATORS:
        message = unknown("estimator", name, ESTIMATORS)
        raise ConfigurationError(f"{message[0].upper()}{message[1:]}.")
    if name in ROWS:
        return _of_row(name)
    try:
        module = importlib.import_module(ESTIMATORS[name])
        chain = getattr(module, name)
    except Exception as error:  # a module of another package may raise anything
        raise ConfigurationError(
            f"The estimator {name!r} of module {ESTIMATORS[name]} cannot be loaded ({type(error).__name__}: {error}). "
            f"Install its package again, or register a module with a function {name!r} in the entry-point group "
            f"{ENTRY_POINT_GROUP}."
        ) from error
    return Estimator(
        chain,
        section=getattr(module, "SECTION", NoSettings),
        preset=getattr(module, "PRESET", {}),
        rule=getattr(module, "rule", lambda _settings, _select: ()),
        bases=getattr(module, "bases", None),
    )


@cache
def _of_row(name: str) -> Estimator:
    """What a row declares; its section is made of fields of its steps."""
    row, made = ROWS[name], []
    for step in row.steps:
        hints = get_type_hints(type(step))
        for item in (item for item in fields(step) if item.name in row.settings):
            default = MISSING if item.default is MISSING else getattr(step, item.name)
            made.append((item.name, hints[item.name], field(default=default, metadata=item.metadata)))
    section = make_dataclass(f"{name.capitalize()}Settings", made, frozen=True)
    section.__module__, section.__doc__ = __name__, f"`algorithm.{name}`."

    def chain(settings: Settings) -> Chain:
        given = {**vars(settings.of(name, section)), "weights": settings.rewards.weights}
        kept = (step for step in row.steps if settings.norm_by_std or type(step) is not ScaleByStd)
        own = ((step, [item.name for item in fields(step) if item.name in given]) for step in kept)
        return Chain(tuple(replace(step, **{key: given[key] for key in names}) for step, names in own))

    return Estimator(chain, section, {}, lambda _settings, _select: (), None)


def used(name: str, settings: Settings) -> tuple[str, ...]:
    """The estimator, and the one that it builds on: their settings and rules apply."""
    estimator = load(name)
    if estimator.bases is None:
        return (name,)
    return name, settings.of(name, estimator.section).base


def sections() -> dict[str, type[Any]]:
    """The dataclass of every section of `algorithm` that this package reads, by the section's name."""
    kinds = {**COMMON}
    for name in ESTIMATORS:
        with suppress(ConfigurationError):  # one of another package may be broken: a run with it raises
            kinds[name] = load(name).section
    return {name: kind for name, kind in kinds.items() if fields(kind)}


def defaults(kind: type[T]) -> T | None:
    """A section in which nothing is set; None if it needs a setting."""
    with suppress(ConfigurationError):
        return parse_dataclass(kind, None, kind.__name__)
    return None


def changed(settings: Settings) -> dict[str, Any]:
    """The sections of estimators in which something is set that is not its default; raise if one is wrong."""
    kinds = {name: load(name).section for name in ESTIMATORS if name in settings.given}
    made = {name: settings.of(name, kind) for name, kind in kinds.items()}
    return {name: section for name, section in made.items() if section != defaults(kinds[name])}


def entries() -> tuple[str, ...]:
    """The entries of `algorithm` that this package reads."""
    return (*COMMON, *ESTIMATORS, *VERL_NAMES.values(), "norm_adv_by_std_in_grpo", "use_kl_in_reward")


def misspelt(names: Iterable[Any], *, known: Collection[str] = ()) -> Iterator[Finding]:
    """Report each unknown entry of `algorithm` that resembles a setting of verl_ext; `known` are the entries of verl.

    The finding is a warning if the name may belong to another package.

    >>> [finding.severity for finding in misspelt(["gdop", "lr"])]
    ['error']
    """
    kinds = sections()
    places = {item.name: f"{name}.{item.name}" for name, kind in kinds.items() for item in fields(kind)}
    places |= {name: name for name in (*kinds, *VERL_NAMES.values())}
    for key in map(str, names):
        near = None if key in known or places.get(key) == key else nearest(key, places, cutoff=0.75)
        if near is not None:
            # Short words are near to many: `data` to `dara`, and another package may have a `k`.
            clear = len(near) > 4 or (near != key and sorted(near) == sorted(key))
            rejected = clear and near in (key, places[near])
            unread = "" if rejected else " if no other package reads it"
            yield Finding(
                "error" if rejected else "warning",
                f"algorithm.{key} is not a setting of verl or verl_ext and would be ignored. The nearest setting is "
                f"algorithm.{places[near]}.",
                f"Use algorithm.{places[near]} instead, or remove algorithm.{key}{unread}.",
            )
