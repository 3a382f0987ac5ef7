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
FILES = sorted(
    path.relative_to(ROOT)
    for path in (*(file for folder in FOLDERS for file in (ROOT / folder).rglob("*")), *ROOT.glob("*"))
    if path.suffix in SUFFIXES
)


@pytest.mark.parametrize("pattern", FORBIDDEN)
def test_no_text_has_a_forbidden_word(pattern: str) -> None:
    word = re.compile(rf"(?<![a-z])({pattern})(?![a-z])", re.IGNORECASE)
    found = [
        f"{path}:{number}: {line.strip()}"
        for path in FILES
        if str(path) not in EXCEPTIONS
        for number, line in enumerate((ROOT / path).read_text(encoding="utf-8").splitlines(), start=1)
        if word.search(line)
    ]
    assert found == [], f"use {FORBIDDEN[pattern]}"


def test_the_exceptions_exist_and_are_needed() -> None:
    assert set(EXCEPTIONS) <= set(map(str, FILES))
    every = re.compile(rf"(?<![a-z])({'|'.join(FORBIDDEN)})(?![a-z])", re.IGNORECASE)
    assert [name for name in EXCEPTIONS if not every.search((ROOT / name).read_text(encoding="utf-8"))] == []
