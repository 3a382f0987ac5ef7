"""Command lines in the documents work as they stand, in zsh too, and install nothing that is not ours to name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("verl_ext", "recipes", "scripts", "docs")
FILES = sorted(
    path
    for path in (ROOT / "README.md", *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*")))
    if path.suffix in (".md", ".py", ".sh", ".yaml", ".yml")
)
BLOCK = re.compile(r"^ *```(?:bash|sh|console|zsh|shell)[^\n]*\n(.*?)^ *```|(?<!`)`([^`]+)`(?!`)", re.M | re.S)
"""A block in a shell's language, or what stands between backticks, over line ends too."""
LIST = re.compile(r"(?:^|(?<=\s))[+\w.]+=\[\S*")
"""A word with a list that no quote begins: zsh takes the `[` for a pattern of file names."""


def unquoted(text: str) -> list[str]:
    r"""The lists on a page's command lines that a shell would not pass on.

    >>> unquoted("```bash\npython -m x a.b=[c,d] 'e=[f]'\n```\nor `+g=[h]`, `'i=[j]'`\n```yaml\na: b=[c]\n```\n")
    ['a.b=[c,d]', '+g=[h]']
    """
    text = re.sub(r"^ *```(?:text|yaml|python)\n.*?^ *```", "", text, flags=re.M | re.S)
    return [word for block in BLOCK.finditer(text) for word in LIST.findall(block[1] or block[2])]


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix == ".md"], ids=lambda path: path.name)
def test_lists_on_command_lines_are_quoted(path: Path) -> None:
    assert unquoted(path.read_text(encoding="utf-8")) == []


def test_nothing_installs_our_name_from_an_index() -> None:
    """The package is on none, and somebody else could take the name. Paths and clones are fine."""
    wrong = []
    for path in FILES:
        for found in re.findall(r"pip3? install[^\n`]*", path.read_text(encoding="utf-8")):
            if re.search(r"(?<![\w/.])verl[_-]ext(?![\w/]| @)", found.partition(" in a clone")[0]):
                wrong.append(f"{path.relative_to(ROOT)}: {found}")
    assert wrong == []
