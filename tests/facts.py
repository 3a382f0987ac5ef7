"""Facts in a message: the setting, the value, what is valid, the line to change. How they are worded is free."""

import re

NEEDED = {"saw": {"min_values": [-100.0, -100.0]}}
"""Settings that must be set, by estimator, for two rewards."""


def facts(*wanted: object) -> str:
    """A pattern for `pytest.raises(match=...)`: the message has every one of these facts, in any order.

    A fact is found as a whole only: `3` is not in "13", "3.5" or "-3", and `weight` is not in "weights".
    """
    return r"(?s)\A" + "".join(f"(?=.*{_whole(str(fact))})" for fact in wanted)


def says(text: object, *wanted: object) -> bool:
    """Whether a message or an output has every one of these facts."""
    return re.search(facts(*wanted), str(text)) is not None


def a_line_says(text: str, *wanted: object) -> bool:
    """Whether one line of an output has every one of these facts."""
    return any(says(line, *wanted) for line in text.splitlines())


def _whole(fact: str) -> str:
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
