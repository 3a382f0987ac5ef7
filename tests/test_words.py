"""Words that this project does not use: British spellings, and words that stand for a term of the field."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", "recipes", "scripts", "tests", "verl_ext")
SUFFIXES = {".md", ".py", ".sh", ".toml", ".yaml", ".yml"}
FORBIDDEN = {
    r"cent(re[sd]?|ring)": "center, centered",
    r"\w*normalis\w*": "normalize",
    r"optimis\w*": "optimize, optimizer",
    r"mend(s|ed|ing)?": "fix",
    r"(un)?told": "report, message",
    r"earn(s|ed|ing)?": "receive a reward",
}
"""Each with the words to use instead."""
EXCEPTIONS = {
    "scripts/quality/same_as/renamed.py": "the old names of what was renamed",
    "tests/test_words.py": "this table",
}


def text_files() -> list[Path]:
    """Return the paths of all texts and all code of the project, relative to its root."""
    paths = [*ROOT.glob("*")]
    for folder in FOLDERS:
        paths += (ROOT / folder).rglob("*")
    return sorted(path.relative_to(ROOT) for path in paths if path.suffix in SUFFIXES)


FILES = text_files()


def matcher(pattern: str) -> re.Pattern[str]:
    """Return the compiled pattern of whole words. An underscore or a digit ends a word."""
    return re.compile(rf"(?<![a-z])({pattern})(?![a-z])", re.IGNORECASE)


def lines_with(word: re.Pattern[str], path: Path) -> list[str]:
    """Return the lines of a file that have the word, each with its place."""
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    return [f"{path}:{number}: {line.strip()}" for number, line in enumerate(lines, start=1) if word.search(line)]


@pytest.mark.parametrize("pattern", FORBIDDEN)
def test_no_text_has_a_forbidden_word(pattern: str) -> None:
    word = matcher(pattern)
    lines = []
    for path in FILES:
        if str(path) not in EXCEPTIONS:
            lines += lines_with(word, path)
    assert lines == [], f"use {FORBIDDEN[pattern]}"


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_exception_exists_and_is_needed(name: str) -> None:
    assert Path(name) in FILES
    assert lines_with(matcher("|".join(FORBIDDEN)), Path(name))
