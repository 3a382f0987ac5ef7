"""The pages are readable: sentences and table cells are short, and numbers are written in one way."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs/pages", "recipes")
MAX_SENTENCE_WORDS = 30
MAX_CELL_WORDS = 25


def pages() -> list[Path]:
    """Return the paths of the pages, relative to the root."""
    paths = [*ROOT.glob("*.md")]
    for folder in FOLDERS:
        paths += (ROOT / folder).rglob("*.md")
    return sorted(path.relative_to(ROOT) for path in paths)


PAGES = pages()


def without_code_and_links(text: str) -> str:
    """Return a page without its code blocks. Inline code becomes one word, and a link becomes its text.

    >>> without_code_and_links("Set `a=b c`, [as here](page.md).")
    'Set CODE, as here.'
    """
    text = re.sub(r"^( *)(```+|~~~+).*?^\1\2 *$", "", text, flags=re.M | re.S)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "CODE", text, flags=re.S)
    return re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)


def words(text: str) -> list[str]:
    """Return the words of a text. A sign alone is none."""
    return [word for word in text.split() if re.search(r"\w", word)]


def cells(text: str) -> list[str]:
    """Return the cells of the tables of a page."""
    rows = re.findall(r"^ *\|(.*)\| *$", text, re.M)
    return [cell.strip() for row in rows for cell in re.split(r"(?<!\\)\|", row)]


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs and the items of lists, each in one line, without headings, titles of boxes and tables."""
    paragraph: list[str] = []
    for line in [*text.splitlines(), ""]:
        line = line.strip()
        is_no_prose = re.match(r"#|\||!!!|\?\?\?|===", line)
        begins_item = re.match(r"([-*+]|\d+\.)\s", line)
        if paragraph and (not line or is_no_prose or begins_item):
            yield " ".join(paragraph)
            paragraph = []
        if line and not is_no_prose:
            paragraph.append(line)


def sentences(text: str) -> list[str]:
    """Return the sentences of a page.

    >>> sentences("One is here. Two has 0.5 and\\nends! \\n\\n- three, e.g. this")
    ['One is here.', 'Two has 0.5 and ends!', '- three, e.g. this']
    """
    found = []
    for paragraph in paragraphs(text):
        found += re.split(r"(?<=[.!?])[)*\"]*\s+(?=[^a-z])", paragraph)
    return found


@pytest.mark.parametrize("path", PAGES, ids=str)
def test_sentences_are_short(path: Path) -> None:
    text = without_code_and_links((ROOT / path).read_text(encoding="utf-8"))
    long_ones = [sentence for sentence in sentences(text) if len(words(sentence)) > MAX_SENTENCE_WORDS]
    assert long_ones == []


@pytest.mark.parametrize("path", PAGES, ids=str)
def test_table_cells_are_short(path: Path) -> None:
    text = without_code_and_links((ROOT / path).read_text(encoding="utf-8"))
    assert [cell for cell in cells(text) if len(words(cell)) > MAX_CELL_WORDS] == []


@pytest.mark.parametrize("path", PAGES, ids=str)
def test_numbers_have_a_leading_zero_and_no_blank_before_a_percent_sign(path: Path) -> None:
    text = without_code_and_links((ROOT / path).read_text(encoding="utf-8"))
    assert re.findall(r".{0,30}(?<![\w.])\.\d.{0,10}", text) == []
    assert re.findall(r".{0,30}\d %.{0,10}", text) == []
