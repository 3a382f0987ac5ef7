"""The package's exceptions: one root, each child also the standard type that a caller would expect."""

from __future__ import annotations

from collections.abc import Iterable


class VerlExtError(Exception):
    """Root of every error that this package raises on purpose."""


class ConfigurationError(VerlExtError, ValueError):
    """A setting is unknown, out of range, or contradicts another one."""


class DataError(VerlExtError, ValueError):
    """A batch, a reward component or a ground truth cannot be used as it is."""


class IntegrationError(VerlExtError, RuntimeError):
    """verl is not what this package was written against, or a hook does not hold."""


class ClusterError(VerlExtError, RuntimeError):
    """A node of the Ray cluster does not have what the run needs."""


class RolloutError(VerlExtError, RuntimeError):
    """Responses do not come, or cannot be scored."""


class CheckpointError(VerlExtError, RuntimeError):
    """Saved state is missing, damaged or of another run."""


def listed(names: Iterable[object]) -> str:
    """Names for a message, sorted and quoted.

    >>> listed(["b", "a"])
    "'a', 'b'"
    >>> listed([])
    'none'
    """
    return ", ".join(sorted(repr(str(name)) for name in names)) or "none"


def unknown(what: str, found: object, valid: Iterable[object]) -> str:
    """A message for a name that does not exist, with the nearest one that does.

    >>> unknown("estimator", "gdop", ["gdpo", "grpo"])
    "unknown estimator 'gdop' (did you mean 'gdpo'?); valid: 'gdpo', 'grpo'"
    """
    import difflib  # here: this module is imported in every process of a run

    names = [str(name) for name in valid]
    near = difflib.get_close_matches(str(found), names, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"unknown {what} {str(found)!r}{hint}; valid: {listed(names)}"


def printable(text: object, *, keep: str = "") -> str:
    r"""Text for a terminal: characters that would steer it, or that it would not show, as their escapes.

    >>> printable("red\x1b[31m\n")
    'red\\x1b[31m\\n'
    """
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode("ascii")
        for char in str(text)
    )
