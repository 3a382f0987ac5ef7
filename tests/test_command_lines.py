"""Command lines in the documents work as they stand, in zsh too."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "recipes").rglob("*.md")])
SHELLS = ("bash", "sh", "console")


def unquoted(command: str) -> list[str]:
    """Words that set something to a list outside quotes, which zsh takes for a pattern of file names.

    >>> unquoted("python -m x a.b=[c,d] 'e=[f]'  # it's k=[v]")
    ['a.b=[c,d]']
    """
    without_comments = re.sub(r"(^|\s)#.*$", "", command, flags=re.M)
    return re.findall(r"\S*=\[\S*", re.sub(r"'[^']*'|\"[^\"]*\"", "", without_comments))


def commands(text: str) -> list[str]:
    """Blocks in a shell's language."""
    return [block for shell, block in re.findall(r"^ *```(\w*)\n(.*?)^ *```", text, re.M | re.S) if shell in SHELLS]


def test_lists_on_command_lines_are_quoted() -> None:
    found = {path: commands(path.read_text(encoding="utf-8")) for path in PAGES}
    assert sum(map(len, found.values())) > 20
    assert [(path, word) for path, texts in found.items() for text in texts for word in unquoted(text)] == []
