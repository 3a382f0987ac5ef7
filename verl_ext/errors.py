"""The exceptions of the package. They share one base class, and each is also the standard type that fits."""

import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class VerlExtError(Exception):
    """Base class of every error that this package raises on purpose."""


class ConfigurationError(VerlExtError, ValueError):
    """A setting is unknown, out of range, or contradicts another one."""


class DataError(VerlExtError, ValueError):
    """A batch, a reward component or a ground truth is invalid."""


class IntegrationError(VerlExtError, RuntimeError):
    """verl lacks what this package needs, or a hook does not work."""


class CheckpointError(VerlExtError, RuntimeError):
    """Saved state is missing, damaged, or belongs to another run."""


class Finding(NamedTuple):
    """What a rule has against a configuration."""

    text: str
    """What is wrong, what is valid, and the line to change."""
    fatal: bool = True
    """Whether the run is refused; False: a warning."""


@contextmanager
def reading(place: object, kind: type[VerlExtError] = DataError, done: str = "read") -> Iterator[None]:
    """Turn what goes wrong with a user's file, which may hold anything, into an error that names the place.

    A KeyError of this package's own code passes: it is no mistake of the file.

    >>> with reading("a.txt:3"):
    ...     int("x")
    Traceback (most recent call last):
    ...
    verl_ext.errors.DataError: a.txt:3 cannot be read: ValueError: invalid literal for int() with base 10: 'x'
    """
    try:
        yield
    except VerlExtError:
        raise
    except (Exception, SystemExit) as error:
        frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
        if isinstance(error, KeyError) and frames[-1].startswith("verl_ext"):
            raise
        text = " ".join(str(error).split())[:500]
        raise kind(f"{place} cannot be {done}: {type(error).__name__}: {text}") from error


def listed(names: Iterable[object]) -> str:
    """Join names for a message, sorted and quoted.

    >>> listed(["b", "a"])
    "'a', 'b'"
    >>> listed([])
    'none'
    """
    return ", ".join(sorted(repr(str(name)) for name in names)) or "none"


def unknown(what: str, found: object, valid: Iterable[object]) -> str:
    """A message for an unknown name, with the nearest valid one.

    >>> unknown("estimator", "gdop", ["gdpo", "grpo"])
    "unknown estimator 'gdop' (did you mean 'gdpo'?); valid: 'gdpo', 'grpo'"
    """
    names = [str(name) for name in valid]
    near = nearest(found, names)
    hint = f" (did you mean {near!r}?)" if near is not None else ""
    return f"unknown {what} {str(found)!r}{hint}; valid: {listed(names)}"


def nearest(found: object, valid: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The valid name closest to `found`, ignoring case: first one of the same letters; None if none is close.

    >>> nearest("GPDO", ["dgpo", "gdpo", "grpo"])
    'gdpo'
    """
    import difflib  # imported here: every process of a run imports this module

    folded, word = {name.casefold(): name for name in valid}, str(found).casefold()
    swapped = [name for name in folded if sorted(name) == sorted(word)]
    swapped.sort(key=lambda name: sum(a != b for a, b in zip(name, word, strict=True)))
    near = swapped or difflib.get_close_matches(word, folded, n=1, cutoff=cutoff)
    return folded[near[0]] if near else None
