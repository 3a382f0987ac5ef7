"""The exceptions of the package. They share one base class, and each is also the standard type that fits."""

import traceback
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple


class VerlExtError(Exception):
    """Base class of every error that this package raises on purpose."""


class ConfigurationError(VerlExtError, ValueError):
    """A setting is unknown, out of range, or contradicts another one."""


class DataError(VerlExtError, ValueError):
    """A batch, a reward component or a ground truth is invalid.

    `label` is the uid of the response or prompt that the error is about, if it is about one.
    """

    def __init__(self, *args: object, label: Hashable = None) -> None:
        super().__init__(*args)
        self.label = label


class IntegrationError(VerlExtError, RuntimeError):
    """verl lacks what this package needs, or a hook does not work."""


class CheckpointError(VerlExtError, RuntimeError):
    """Saved state is missing, damaged, or belongs to another run."""


class Finding(NamedTuple):
    """One result of checking a configuration or a reward function.

    >>> print(Finding("error", "rollout.n=1: the advantage of a single response is 0.", "Set rollout.n=8."))
    rollout.n=1: the advantage of a single response is 0. Set rollout.n=8.
    """

    severity: Literal["error", "warning", "note"]
    """`error`: the run is rejected. `warning`: the run probably does not do what was meant. `note`: worth a review."""
    text: str
    """What is wrong, with the setting and its value, and why, in full sentences."""
    fix: str
    """What to do, in full sentences that name the line to change."""

    def __str__(self) -> str:
        return f"{self.text} {self.fix}".rstrip()


class SignalExit(SystemExit):
    """The exit of this process because of a signal, which no error of a file may replace."""


@contextmanager
def explaining_errors(
    subject: object, error_class: type[VerlExtError] = DataError, verb: str = "read", fix: str = ""
) -> Iterator[None]:
    """Turn any exception that a user's file or code causes into an error that says what cannot be done.

    The message is "SUBJECT cannot be VERB (the exception). FIX", and `fix` is a sentence that says what to do. If the
    last line that ran is of verl_ext and raised a KeyError, it is raised as it is. It is a bug of verl_ext, for example
    a dictionary without an entry, and not a mistake in the file. The exit of a signal is raised as it is, too.

    >>> with explaining_errors("a.txt:3"):
    ...     int("x")
    Traceback (most recent call last):
    ...
    verl_ext.errors.DataError: a.txt:3 cannot be read (ValueError: invalid literal for int() with base 10: 'x').
    """
    try:
        yield
    except (VerlExtError, SignalExit):
        raise
    except (Exception, SystemExit) as error:
        modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
        if isinstance(error, KeyError) and modules[-1].startswith("verl_ext."):
            raise
        text = " ".join(str(error).split())[:500]
        message = f"{subject} cannot be {verb} ({type(error).__name__}: {text}). {fix}"
        raise error_class(message.rstrip()) from error


def listed(names: Iterable[object]) -> str:
    """Join names for a message, sorted and quoted.

    >>> listed(["b", "a"])
    "'a', 'b'"
    >>> listed([])
    'none'
    """
    return ", ".join(sorted(repr(str(name)) for name in names)) or "none"


def unknown(what: str, found: object, valid: Iterable[object]) -> str:
    """Return two sentences about an invalid name, with the nearest valid one.

    The first letter is lower case and the final period is missing, because callers embed the text in their messages.

    >>> unknown("estimator", "gdop", ["gdpo", "grpo"])
    "the estimator 'gdop' is not valid (did you mean 'gdpo'?). Use one of 'gdpo', 'grpo'"
    >>> unknown("setting", "limit", [])
    "the setting 'limit' is not valid. No setting is valid here"
    """
    names = [str(name) for name in valid]
    suggestion = nearest(found, names)
    hint = "" if suggestion is None else f" (did you mean {suggestion!r}?)"
    if not names:
        remedy = f"No {what} is valid here"
    elif len(names) == 1:
        remedy = f"Use {listed(names)}"
    else:
        remedy = f"Use one of {listed(names)}"
    return f"the {what} {str(found)!r} is not valid{hint}. {remedy}"


def nearest(found: object, valid: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the valid name closest to `found`, ignoring case, or None if no name is close.

    A name with exactly the letters of `found` in another order comes first, because swapped letters are the most common
    typing error. Among several such names, the one with the fewest letters in another place is returned.

    >>> nearest("GPDO", ["dgpo", "gdpo", "grpo"])
    'gdpo'
    """
    import difflib  # imported here: every process of a run imports this module

    word = str(found).casefold()
    names_by_casefold = {name.casefold(): name for name in valid}
    anagrams = [candidate for candidate in names_by_casefold if sorted(candidate) == sorted(word)]
    if anagrams:
        closest = min(anagrams, key=lambda anagram: _count_differences(anagram, word))
        return names_by_casefold[closest]
    similar = difflib.get_close_matches(word, names_by_casefold, n=1, cutoff=cutoff)
    return names_by_casefold[similar[0]] if similar else None


def _count_differences(first: str, second: str) -> int:
    """Return the number of places at which two texts of the same length have different letters."""
    pairs = zip(first, second, strict=True)
    return len([letter for letter, other_letter in pairs if letter != other_letter])
