"""The estimators by name: those of this package, and those of other packages.

To add one to this package: a file in `verl_ext/estimators/` and a line in `BUILT_IN`. Another package registers its
own in the entry-point group `verl_ext.estimators`. Each name maps to `module:function`, a function from `Settings` to
`Chain`. It is imported on first use, because every process of a run reads this list.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any, TypeVar, get_type_hints

from verl_ext.errors import ConfigurationError, unknown

logger = logging.getLogger("verl_ext")

BUILT_IN: Mapping[str, str] = MappingProxyType(
    {
        "compose": "verl_ext.estimators.compose:compose",
        "dgpo": "verl_ext.estimators.dgpo:dgpo",
        "drgrpo": "verl_ext.estimators.drgrpo:drgrpo",
        "gdpo": "verl_ext.estimators.gdpo:gdpo",
        "hadw": "verl_ext.estimators.hadw:hadw",
    }
)
GROUP = "verl_ext.estimators"
F = TypeVar("F", bound=Callable[..., Any])


class _Estimators(Mapping[str, str]):
    """Name to `module:function`. The entry points of installed packages are read once, on first use."""

    @cached_property
    def _known(self) -> dict[str, str]:
        from importlib.metadata import entry_points

        external = {entry.name: entry.value for entry in entry_points(group=GROUP)}
        for name in sorted(external.keys() & BUILT_IN.keys()):
            logger.warning(
                "skipping the entry point %s=%s of the group %s: verl_ext has an estimator of that name; rename it",
                name,
                external[name],
                GROUP,
            )
        return dict(sorted({**external, **BUILT_IN}.items()))

    def __getitem__(self, name: str) -> str:
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


ESTIMATORS: Mapping[str, str] = _Estimators()


@dataclass(frozen=True)
class Declaration:
    """What an estimator has besides its steps."""

    section: type[Any] | None = None
    """The dataclass of its settings, which are under `algorithm.<name>`."""
    preset: Mapping[str, Any] = field(default_factory=dict)
    """What `+verl_ext=<name>` sets elsewhere in verl's configuration."""
    also: Callable[[], Sequence[str]] = list
    """Names of other estimators whose sections it reads."""


def estimator(
    *,
    section: type[Any] | None = None,
    preset: Mapping[str, Any] = MappingProxyType({}),
    also: Callable[[], Sequence[str]] = list,
) -> Callable[[F], F]:
    """Attach a `Declaration` with these arguments to the function of an estimator."""

    def declare(function: F) -> F:
        setattr(function, _DECLARED, Declaration(section, preset, also))
        return function

    return declare


_DECLARED = "__verl_ext_estimator__"


def load(name: str) -> Callable[[Any], Any]:
    """Import the function of an estimator, from `Settings` to `Chain`."""
    if name not in ESTIMATORS:
        raise ConfigurationError(unknown("estimator", name, ESTIMATORS))
    module, _, function = ESTIMATORS[name].partition(":")
    try:
        loaded: Callable[[Any], Any] = getattr(importlib.import_module(module), function)
    except Exception as error:  # a module of another package may raise anything
        raise ConfigurationError(
            f"the estimator {name!r} cannot be loaded from {ESTIMATORS[name]}: {type(error).__name__}: {error}; "
            f"install its package again, or remove its entry point in the group {GROUP}"
        ) from error
    if not callable(loaded):
        raise ConfigurationError(f"the estimator {name!r}, {ESTIMATORS[name]}, is {loaded!r}, expected a function")
    return loaded


def declaration(name: str) -> Declaration:
    """The declaration of an estimator; an empty one for a function without `@estimator`."""
    declared: Declaration = getattr(load(name), _DECLARED, Declaration())
    if not (isinstance(declared.preset, Mapping) and _is_plain(declared.preset)):
        raise ConfigurationError(
            f"the estimator {name!r} declares preset={declared.preset!r}, expected a mapping of plain data"
        )
    with _naming(f"the estimator {name!r} declares also={declared.also!r}"):
        others = declared.also()
        named = not isinstance(others, str) and all(isinstance(other, str) for other in others)
    if not named:
        raise ConfigurationError(f"the estimator {name!r} declares also, which returns {others!r}, expected names")
    if declared.section is None:
        return declared
    wrong = f"the estimator {name!r} declares section={declared.section!r}"
    if not is_dataclass(declared.section):
        raise ConfigurationError(f"{wrong}, expected a dataclass: write @dataclass above it")
    for item in fields(declared.section):
        if item.default is MISSING:
            raise ConfigurationError(f"{wrong}, whose {item.name} has no plain default: write {item.name}: ... = VALUE")
        if not _is_plain(item.default):
            raise ConfigurationError(
                f"{wrong}, whose {item.name} has the default {item.default!r}: a preset can hold only None, bool, int, "
                "float, str, and lists and mappings of these"
            )
    with _naming(f"{wrong}, whose types cannot be read"):
        get_type_hints(declared.section)
    return declared


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Raise a `ConfigurationError` that begins with `what` in place of any error: other packages may raise anything."""
    try:
        yield
    except Exception as error:
        raise ConfigurationError(f"{what}: {type(error).__name__}: {error}") from error


def _is_plain(value: object) -> bool:
    """Whether a configuration can hold the value. OmegaConf refuses subclasses, such as numpy's floats."""
    if isinstance(value, Mapping):
        return all(map(_is_plain, (*value.keys(), *value.values())))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def declarations() -> dict[str, Declaration]:
    """The declaration of every estimator, without those of other packages that are broken."""
    found = {}
    for name in ESTIMATORS:
        with skipping(name):
            found[name] = declaration(name)
    return found


@contextmanager
def skipping(name: str) -> Iterator[None]:
    """Skip what raises about an estimator of another package, with one warning, so that all others work.

    What computes does not skip it: a run with it raises. An error about an estimator of this package is raised here.
    """
    try:
        yield
    except Exception as error:
        if name in BUILT_IN:
            raise
        _warn_of_broken(name, f"{type(error).__name__}: {error}")


@cache
def _warn_of_broken(name: str, error: str) -> None:
    logger.warning(
        "the estimator %r of another package (%s) is broken and has no preset and no settings here; a run with it "
        "raises. %s",
        name,
        ESTIMATORS[name],
        error,
    )
