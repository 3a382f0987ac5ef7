"""Command lines in the documents work as they stand, in zsh too, and install nothing that is not ours to name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("verl_ext", "recipes", "scripts", "docs")
SHELLS = ("bash", "sh", "console", "zsh", "shell")
COMMAND = re.compile(r"\s*(?:\$ )?(?:[A-Z_]+=\S* )*(?:python3?|pip|docker|ray|torchrun|(?:\S*/)?\w+\.sh)\s")


def unquoted(text: str) -> list[str]:
    r"""Words with a `[` outside quotes, which zsh takes for a pattern of file names, and refuses where none fits.

    >>> unquoted("python -m x a.b=[c,d] 'e=[f]'  # it's [no] k=[v]")
    ['a.b=[c,d]']
    >>> unquoted("a 'b\nc=[d]' \"e=[f]\" x\\[ [ -f y ]")
    []
    """
    found, quote, start, skip = [], "", 0, False
    for at, letter in enumerate(text):
        before = text[at - 1] if at else "\n"
        if skip:
            skip = letter != "\n"
        elif quote:
            quote = "" if letter == quote and (before != "\\" or quote == "'") else quote
        elif letter in "\"'" and before != "\\":
            quote = letter
        elif letter == "#" and before.isspace():
            skip = True
        elif letter == "[" and not before.isspace() and before not in "\\[":
            found.append(re.split(r"\s", text[start:])[0])
        if letter.isspace():
            start = at + 1
    return found


def in_markdown(text: str) -> Iterator[str]:
    """Blocks in a shell's language, and what stands between backticks and sets something to a list."""
    parts = re.split(r"^ *```(\w*)[^\n]*$", text, flags=re.M)
    for at in range(0, len(parts), 4):
        # As Markdown has it, over line ends too.
        yield from (
            span for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", parts[at]) if "=[" in span or COMMAND.match(span)
        )
    for at in range(1, len(parts) - 1, 4):
        if parts[at] in SHELLS:
            yield parts[at + 1]


def in_comments(text: str) -> Iterator[str]:
    """Commands in a script's comments."""
    for line in text.splitlines():
        comment = re.match(r"\s*#(.*)", line)
        if comment and COMMAND.match(comment[1]):
            yield comment[1]


def in_docstrings(text: str) -> Iterator[str]:
    """Commands in a module's docstrings."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (ast.get_docstring(node) or "").replace("\\\n", " ").splitlines()
            yield from (line for line in lines if COMMAND.match(line))
            yield from (span for line in lines for span in re.findall(r"`([^`]+)`", line) if COMMAND.match(span))


READERS = {".md": in_markdown, ".py": in_docstrings, ".sh": in_comments, ".yaml": in_comments, ".yml": in_comments}
FILES = sorted(
    path
    for path in (ROOT / "README.md", *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*")))
    if path.suffix in READERS
)


def commands(path: Path) -> list[str]:
    return list(READERS[path.suffix](path.read_text(encoding="utf-8")))


def test_lists_on_command_lines_are_quoted() -> None:
    wrong = {
        str(path.relative_to(ROOT)): [word for text in commands(path) for word in unquoted(text)] for path in FILES
    }
    assert {path: words for path, words in wrong.items() if words} == {}


def test_nothing_installs_our_name_from_an_index() -> None:
    """The package is on none, and somebody else could take the name. Paths and clones are fine."""
    wrong = []
    for path in [*FILES, *(ROOT / "verl_ext").rglob("*.py")]:
        for found in re.findall(r"pip3? install[^\n`]*", path.read_text(encoding="utf-8")):
            if re.search(r"(?<![\w/.])verl[_-]ext(?![\w/]| @)", found.partition(" in a clone")[0]):
                wrong.append(f"{path.relative_to(ROOT)}: {found}")
    assert wrong == []
