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


def near_misses(sections: tuple[Section, ...]) -> st.SearchStrategy[str]:
    """Well-formed text with a piece put in, left out or replaced here and there."""
    whole = "\n".join(f"{part.start}|{part.end}" for part in sections)
    good = [piece for piece in re.split(r"(</?\w+>|\n|\|)", whole) if piece]
    edit = st.tuples(st.integers(0, len(good)), st.integers(0, 1), st.sampled_from(["", *PIECES]))

    def edited(changes: list[tuple[int, int, str]]) -> str:
        pieces = list(good)
        for at, removed, piece in changes:
            pieces[at : at + removed] = [piece]
        return "".join(pieces).replace("|", "")

    return st.lists(edit, max_size=3).map(edited)


@pytest.mark.parametrize("sections", PATTERNS, ids=lambda sections: "+".join(part.tag for part in sections))
@given(data=st.data())
def test_the_layout_is_the_published_pattern(sections, data):
    text = data.draw(st.one_of(near_misses(sections), st.lists(st.sampled_from(PIECES), max_size=12).map("".join)))
    once = all(text.count(tag) == 1 for part in sections[1:] for tag in (f"<{part.tag}>", f"</{part.tag}>"))
    assert follows_layout(text, sections) == (once and re.fullmatch(PATTERNS[sections], text, re.DOTALL) is not None)


@given(st.lists(st.sampled_from(["<a>", "</a>", "x", "y"]), max_size=8).map("".join))
def test_blocks_are_cut_as_by_splitting(text):
    assert last_block(text, "a") == text.split("<a>")[-1].split("</a>")[0]
    if "<a>" in text:
        assert first_block(text, "a") == text.split("<a>")[1].split("</a>")[0]
