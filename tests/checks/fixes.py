"""Apply the fix of a finding to the overrides of a configuration."""

import re
from collections.abc import Iterable, Iterator


def ways(fix: str) -> Iterator[tuple[list[str], list[str]]]:
    """The alternatives of a fix, each with the overrides that it adds and the settings that it removes.

    `NAME` and `[...]` are replaced by names of rewards. An alternative without a setting is left out.
    """
    for alternative in re.split(r", or |\. Otherwise, ", fix):
        added: list[str] = []
        removed: list[str] = []
        removes = False
        for word in alternative.split():
            token = word.strip(",.'`")
            if word.lower() in ("set", "add", "from"):
                removes = False
            elif word.lower() == "remove":
                removes = True
            elif removes and re.fullmatch(r"[a-z]\w*((\.\w+)+(=\S+)?|=\S+)", token):
                removed.append(token.partition("=")[0])
            elif re.fullmatch(r"\+*[a-z]\w*(\.\w+)*=\S+", token):
                added.append(token.replace("NAME", "correctness").replace("[...]", "[acc,format]"))
        if added or removed:
            yield added, removed


def without(overrides: Iterable[str], removed: Iterable[str]) -> list[str]:
    """The overrides of other settings than these."""
    keys = {text: text.lstrip("+~").partition("=")[0] for text in overrides}
    return [text for text, key in keys.items() if not any(f"{key}.".startswith(f"{path}.") for path in removed)]
