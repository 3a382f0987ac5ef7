"""Find an advantage estimator by its name: a method of this package, or of another package.

Another package registers `name = "package.module:OBJECT"` in the entry-point group `verl_ext.estimators`. The object is
a `Method`. Every process of a run reads the names, which imports no module of another package. `load` imports one of
them. `sections` and `possible_bases` import all of them, as do the presets when Hydra is imported.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from verl_ext.core.chain import Chain, Step
from verl_ext.core.schema import parse_dataclass
from verl_ext.core.step_lists import check_order
from verl_ext.errors import ConfigurationError, Finding, listed, nearest, unknown
from verl_ext.methods import METHODS
from verl_ext.methods.method import Method
from verl_ext.settings import COMMON, VERL_NAMES, Settings

T = TypeVar("T")

ENTRY_POINT_GROUP = "verl_ext.estimators"
"""The entry-point group in which other packages register their methods."""
RESERVED_NAMES = frozenset({"gae", *METHODS})
"""Names that other packages cannot use: the methods of this package, which come first, and `gae`.

verl computes `gae` and `grpo` without looking into its registry."""
ENTRY_POINTS: Mapping[str, EntryPoint] = {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
"""What installed packages register, by name."""
ESTIMATORS: Mapping[str, Method | EntryPoint] = {
    **{name: METHODS[name] for name in sorted(METHODS)},
    **{name: ENTRY_POINTS[name] for name in sorted(ENTRY_POINTS.keys() - RESERVED_NAMES)},
}
"""All methods by name: a `Method` of this package, or the entry point of a `Method` of another package."""
ADDED_ESTIMATORS = tuple(name for name in ESTIMATORS if name != "grpo")
"""The estimators that verl_ext adds to verl or replaces: all but `grpo`, which verl computes with its own function."""


def build(name: str, settings: Settings) -> Chain:
    """Build the chain of a method from the settings.

    >>> [step.name for step in build("drgrpo", Settings()).steps]
    ['weighted_sum', 'center']
    """
    steps: list[Step] = []
    for method_name in reversed(method_and_base(name, settings)):  # the base, if there is one, comes first
        section = section_of(method_name, settings)
        steps += load(method_name).build(section, settings)
    check_order(steps, _origin_of_steps(name, settings))
    return Chain(tuple(steps), settings.rewards.weights)


def _origin_of_steps(name: str, settings: Settings) -> str:
    """Return where the steps of a method come from, for an error: the method, or the setting that names its base."""
    _, *bases = method_and_base(name, settings)
    if bases:
        return f"algorithm.{name}.{load(name).base_setting}={bases[0]}: steps"
    return f"The estimator {name!r}: steps"


def load(name: str) -> Method:
    """Return a method. Import it if it belongs to another package."""
    if name not in ESTIMATORS:
        message = unknown("estimator", name, ESTIMATORS)
        raise ConfigurationError(f"{message[0].upper()}{message[1:]}.")
    entry = ESTIMATORS[name]
    if isinstance(entry, Method):
        return entry
    fix = (
        f"Install its package again, or name a `verl_ext.Method` as package.module:OBJECT in the entry-point group "
        f"{ENTRY_POINT_GROUP}."
    )
    try:
        method = entry.load()
    except Exception as error:  # a module of another package may raise anything
        raise ConfigurationError(
            f"The estimator {name!r} of {entry.value} cannot be loaded ({type(error).__name__}: {error}). {fix}"
        ) from error
    if not isinstance(method, Method):
        raise ConfigurationError(
            f"The estimator {name!r} of {entry.value} cannot be loaded, because it has the type "
            f"{type(method).__name__} instead of Method. {fix}"
        )
    return method


def section_of(name: str, settings: Settings) -> Any:
    """Return the settings of a method as its dataclass, or None for a method without settings."""
    method = load(name)
    if method.settings is None:
        if settings.given.get(name, {}) != {}:
            raise ConfigurationError(
                f"algorithm.{name}={settings.given[name]} has no effect, because the estimator {name} has no settings. "
                f"Remove algorithm.{name}."
            )
        return None
    section = settings.of(name, method.settings)
    if method.base_setting is not None:
        base = getattr(section, method.base_setting)
        valid = possible_bases()
        if base not in valid:
            raise ConfigurationError(
                f"algorithm.{name}.{method.base_setting}={base!r} is not an estimator on which {name} can build. Set "
                f"algorithm.{name}.{method.base_setting} to one of {listed(valid)}."
            )
    return section


def possible_bases() -> Sequence[str]:
    """Return the methods on which another method can build: those that build on no other method."""
    bases = []
    for name in ESTIMATORS:
        with suppress(ConfigurationError):  # a method of another package may be broken
            if load(name).base_setting is None:
                bases.append(name)
    return bases


def method_and_base(name: str, settings: Settings) -> tuple[str, ...]:
    """Return the method, and the method that it builds on, if any. The settings and rules of both apply."""
    base_setting = load(name).base_setting
    if base_setting is None:
        return (name,)
    return name, getattr(section_of(name, settings), base_setting)


def sections() -> dict[str, type[Any]]:
    """Return the dataclass of every section of `algorithm` that this package reads, by the section's name."""
    kinds = {**COMMON}
    for name in ESTIMATORS:
        with suppress(ConfigurationError):  # a method of another package may be broken; a run with it raises
            settings = load(name).settings
            if settings is not None:
                kinds[name] = settings
    return kinds


def default_section(kind: type[T]) -> T | None:
    """Return a section in which nothing is set, or None if a setting of the section has no default."""
    with suppress(ConfigurationError):
        return parse_dataclass(kind, None, kind.__name__)
    return None


def changed_sections(settings: Settings) -> dict[str, Any]:
    """Return the sections of methods in which a setting differs from its default. Raise if a section is wrong."""
    sections = {}
    for name in ESTIMATORS:
        if name not in settings.given:
            continue
        section = section_of(name, settings)
        if section is not None and section != default_section(type(section)):
            sections[name] = section
    return sections


def entries_read() -> tuple[str, ...]:
    """Return the entries of `algorithm` that this package reads."""
    return (*COMMON, *ESTIMATORS, *VERL_NAMES.values(), "norm_adv_by_std_in_grpo", "use_kl_in_reward")


def misspelled_settings(names: Iterable[Any], *, known: Collection[str] = ()) -> Iterator[Finding]:
    """Report each unknown entry of `algorithm` that resembles a setting of verl_ext; `known` are the entries of verl.

    The finding is a warning if the name may belong to another package.

    >>> [finding.severity for finding in misspelled_settings(["gdop", "lr"])]
    ['error']
    """
    kinds = sections()
    top_level = {*kinds, *VERL_NAMES.values()}
    paths_of = _paths_of_settings(kinds) | {name: [f"algorithm.{name}"] for name in top_level}
    for entry in map(str, names):
        if entry in known or entry in top_level:
            continue
        near = nearest(entry, paths_of, cutoff=0.75)
        if near is None:
            continue
        is_anagram = near != entry and sorted(near) == sorted(entry)
        # Short words are near to many: `data` to `dara`, and another package may have a setting `k`.
        is_clear = len(near) > 4 or is_anagram
        is_setting_without_section = near == entry
        is_section_or_setting_of_verl = near in top_level
        is_error = is_clear and (is_setting_without_section or is_section_or_setting_of_verl)
        unless_read = "" if is_error else " if no other package reads it"
        paths = paths_of[near]
        nearest_settings = f"setting is {paths[0]}" if len(paths) == 1 else f"settings are {' and '.join(paths)}"
        yield Finding(
            "error" if is_error else "warning",
            f"algorithm.{entry} is not a setting of verl or verl_ext and would be ignored. The nearest "
            f"{nearest_settings}.",
            f"Use {' or '.join(paths)} instead, or remove algorithm.{entry}{unless_read}.",
        )


def _paths_of_settings(kinds: Mapping[str, type[Any]]) -> dict[str, list[str]]:
    """Return where each setting of a section is, by its name. Several methods may have a setting of the same name."""
    paths_of: dict[str, list[str]] = {}
    for section, kind in kinds.items():
        for item in fields(kind):
            paths_of.setdefault(item.name, []).append(f"algorithm.{section}.{item.name}")
    return paths_of
