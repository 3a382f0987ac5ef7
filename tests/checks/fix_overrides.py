"""Apply the fix of a finding to the overrides of a configuration."""

import re
from collections.abc import Iterable, Iterator

SETTING = r"[a-z]\w*((\.\w+)+(=\S+)?|=\S+)"
"""A setting as a fix names it to be removed: `a.b`, `a.b=1` or `a=1`."""
OVERRIDE = r"\+*[a-z]\w*(\.\w+)*=\S+"
"""A setting as a fix names it to be set: `a.b=1`, `+a.b=1` or `a=1`."""


def fix_alternatives(fix: str) -> Iterator[tuple[list[str], list[str]]]:
    """Return the alternatives of a fix, each with the overrides that it adds and the settings that it removes.

    `NAME` and `[...]` are replaced by names of rewards. An alternative without a setting is left out.
    """
    for alternative in re.split(r", or |\. Otherwise, ", fix):
        added, removed = added_and_removed(alternative)
        if added or removed:
            yield added, removed


def added_and_removed(alternative: str) -> tuple[list[str], list[str]]:
    """Return the overrides that a sentence says to add, and the settings that it says to remove."""
    added: list[str] = []
    removed: list[str] = []
    is_after_remove = False
    for word in alternative.split():
        token = word.strip(",.'`")
        if word.lower() in ("set", "add", "from"):
            is_after_remove = False
        elif word.lower() == "remove":
            is_after_remove = True
        elif is_after_remove and re.fullmatch(SETTING, token):
            removed.append(token.partition("=")[0])
        elif re.fullmatch(OVERRIDE, token):
            added.append(token.replace("NAME", "correctness").replace("[...]", "[acc,format]"))
    return added, removed


def without_settings(overrides: Iterable[str], removed: Iterable[str]) -> list[str]:
    """Return the overrides without those of the removed settings and of the settings below these."""
    return [override for override in overrides if not is_removed(override, removed)]


def is_removed(override: str, removed: Iterable[str]) -> bool:
    """Return whether an override sets one of the removed settings or a setting below one."""
    key = override.lstrip("+~").partition("=")[0]
    return any(f"{key}.".startswith(f"{path}.") for path in removed)
