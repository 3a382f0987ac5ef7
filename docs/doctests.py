"""Extension of Griffe, which reads docstrings for mkdocstrings: examples of docstrings become code blocks."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)
"""An example and its output, up to the next blank line. Markdown would read `>>>` as quotations."""


class Doctests(griffe.Extension):
    """Write each example of a docstring as a code block."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Change the docstrings of a package, which Griffe has read completely."""
        _change_docstrings(pkg)


def _change_docstrings(item: griffe.Object | griffe.Alias) -> None:
    """Change the docstrings of an object and of its members."""
    if item.is_alias:
        return
    if item.docstring is not None:
        item.docstring.value = EXAMPLE.sub(r"```pycon\n\g<0>\n```", item.docstring.value)
    for member in item.members.values():
        _change_docstrings(member)
