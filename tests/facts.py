"""Facts in a message: the setting, its value, valid values, the line to change. Tests do not compare the wording."""

import re

NEEDED = {"saw": {"min_values": [-100.0, -100.0]}}
"""The settings that an estimator requires, for a run with two rewards."""


def facts(*wanted: object) -> str:
    """Return a pattern for `pytest.raises(match=...)` that finds a message with all of these facts, in any order.

    Only a whole fact is found: `3` is not in "13", "3.5" or "-3", and `weight` is not in "weights".
    """
    lookaheads = [f"(?=.*{_whole(str(fact))})" for fact in wanted]
    return r"(?s)\A" + "".join(lookaheads)


def says(text: object, *wanted: object) -> bool:
    """Return whether a message or an output has all of these facts."""
    return re.search(facts(*wanted), str(text)) is not None


def a_line_says(text: str, *wanted: object) -> bool:
    """Return whether one line of an output has all of these facts."""
    return any(says(line, *wanted) for line in text.splitlines())


def _whole(fact: str) -> str:
    """Return a pattern for a fact that is not a part of a longer number or word."""
    before = after = ""
    if fact[0].isdigit():
        before = r"(?<![\w-])(?<!\d\.)"
    elif re.match(r"\w", fact[0]):
        before = r"(?<!\w)"
    if fact[-1].isdigit():
        after = r"(?!\w)(?!\.\d)"
    elif re.match(r"\w", fact[-1]):
        after = r"(?!\w)"
    return before + re.escape(fact) + after
