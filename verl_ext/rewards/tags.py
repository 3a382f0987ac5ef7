"""Read responses that consist of <tag>...</tag> sections, in linear time.

There are no regular expressions, because a lazy `.*?` before a literal backtracks over the whole response for each
candidate end, which takes quadratic time on responses that repeat a tag.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Section:
    """One section of a response. With `own_lines` each tag is on a separate line."""

    tag: str
    own_lines: bool = False

    @property
    def start(self) -> str:
        return f"<{self.tag}>" + "\n" * self.own_lines

    @property
    def end(self) -> str:
        return "\n" * self.own_lines + f"</{self.tag}>"


def describe(sections: Sequence[Section]) -> str:
    r"""Describe the layout, for a message.

    >>> describe([Section("think"), Section("tool_call", own_lines=True)])
    '<think>...</think>\\n<tool_call>\\n...\\n</tool_call>'
    """
    return r"\n".join(f"{part.start}...{part.end}".replace("\n", r"\n") for part in sections)


def follows_layout(text: str, sections: Sequence[Section]) -> bool:
    r"""Return whether `text` is these sections in this order, separated by one newline, and nothing else.

    Each tag must occur exactly once, except for the tags of the first section, which are not counted.

    >>> layout = [Section("think"), Section("answer")]
    >>> follows_layout("<think>a</think>\n<answer>1</answer>", layout)
    True
    >>> follows_layout("<think>a</think> <answer>1</answer>", layout)
    False
    """
    for part in sections[1:]:
        if text.count(f"<{part.tag}>") != 1 or text.count(f"</{part.tag}>") != 1:
            return False
    if not text.startswith(sections[0].start) or not text.endswith(sections[-1].end):
        return False
    begin = len(sections[0].start)
    for before, after in pairwise(sections):
        # `after` opens once, so the text holds at most one such joint.
        joint = f"{before.end}\n{after.start}"
        start = text.find(joint, begin)
        if start < 0:
            return False
        begin = start + len(joint)
    return begin <= len(text) - len(sections[-1].end)


def has_both_tags(text: str, tag: str) -> bool:
    """Return whether an opening and a closing tag occur, in any order."""
    return f"<{tag}>" in text and f"</{tag}>" in text


def first_block(text: str, tag: str) -> str:
    """Return the text after the first opening tag, up to the next opening or closing tag or the end.

    >>> first_block("<a>1</a><a>2</a>", "a")
    '1'
    """
    return text.partition(f"<{tag}>")[2].partition(f"<{tag}>")[0].partition(f"</{tag}>")[0]


def last_block(text: str, tag: str) -> str:
    """Return the text after the last opening tag, up to the next closing tag or the end.

    Without tags, return the whole text.

    >>> last_block("<a>1</a><a>2</a>", "a")
    '2'
    >>> last_block("3", "a")
    '3'
    """
    return text.rpartition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
