"""The layout of sections in a response, and the text of a block."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_ext.rewards.tags import Section, first_block, follows_layout, last_block

THINK, CALL, RESPONSE = Section("think"), Section("tool_call", own_lines=True), Section("response")

# The published patterns, backtracking and all; whole-string. The tags of all sections but think occur exactly once.
PATTERNS = {
    (THINK,): r"<think>.*?</think>",
    (THINK, RESPONSE): r"<think>.*?</think>\n<response>.*?</response>",
    (THINK, CALL): r"<think>.*?</think>\n<tool_call>\n.*?\n</tool_call>",
    (THINK, CALL, RESPONSE): r"<think>.*?</think>\n<tool_call>\n.*?\n</tool_call>\n<response>.*?</response>",
}
PIECES = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<response>", "</response>", "\n", "\n", "a", "<", ">"]


def well_formed_pieces(sections: tuple[Section, ...]) -> list[str]:
    """Return the tags, the contents and the line breaks of a text with these sections."""
    text = "\n".join(f"{section.start}x{section.end}" for section in sections)
    pieces = re.split(r"(</?\w+>|\n)", text)
    return [piece for piece in pieces if piece]


def near_misses(sections: tuple[Section, ...]) -> st.SearchStrategy[str]:
    """Return a strategy for a well-formed text with up to three pieces inserted, removed or replaced."""
    well_formed = well_formed_pieces(sections)
    position = st.integers(0, len(well_formed))
    removed_count = st.integers(0, 1)
    new_piece = st.sampled_from(["", *PIECES])

    def edited(edits: list[tuple[int, int, str]]) -> str:
        pieces = list(well_formed)
        for start, count, piece in edits:
            pieces[start : start + count] = [piece]
        return "".join(pieces)

    return st.lists(st.tuples(position, removed_count, new_piece), max_size=3).map(edited)


def has_each_tag_once(text: str, section: Section) -> bool:
    return text.count(f"<{section.tag}>") == 1 and text.count(f"</{section.tag}>") == 1


@pytest.mark.parametrize("sections", PATTERNS, ids=lambda sections: "+".join(section.tag for section in sections))
@given(data=st.data())
def test_layout_is_that_of_the_published_pattern(sections, data):
    any_pieces = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
    text = data.draw(near_misses(sections) | any_pieces)
    expected = re.fullmatch(PATTERNS[sections], text, re.DOTALL) is not None
    for section in sections[1:]:
        if not has_each_tag_once(text, section):
            expected = False
    assert follows_layout(text, sections) == expected


@pytest.mark.parametrize("tag", ["<tool_call>", "</tool_call>"])
def test_text_with_a_repeated_tag_does_not_follow_the_layout(tag):
    """The regular expression of the published pattern alone would match it."""
    text = f"<think> t </think>\n<tool_call>\n{tag}\n</tool_call>"
    assert not follows_layout(text, (THINK, CALL))


@given(st.lists(st.sampled_from(["<a>", "</a>", "x", "y"]), max_size=8).map("".join))
def test_block_is_the_text_between_its_tags(text):
    assert last_block(text, "a") == text.split("<a>")[-1].split("</a>")[0]
    if "<a>" in text:
        assert first_block(text, "a") == text.split("<a>")[1].split("</a>")[0]
