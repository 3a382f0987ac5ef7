"""The comparison as text for a terminal, and as a page."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from verl_ext.compare import lines as json_lines
from verl_ext.compare.measures import Bins
from verl_ext.compare.picture import draw
from verl_ext.core.groups import Array, Index
from verl_ext.errors import printable
from verl_ext.report.page import page
from verl_ext.report.table import Rows, plain

if TYPE_CHECKING:
    from verl_ext.compare.command import Comparison

WIDTH = 120
_ROWS = 8
"""Trajectories of a group that the terminal shows."""
_LONGEST = 2000
"""Characters of a text that the page shows."""
AGAINST = (
    "A: advantage. A = 0, other sign: shares of trajectories, with that advantage and with the other sign than under "
    "grpo. Rank correlation: Spearman's, over all trajectories."
)
EXPLAINED = (
    "R² of a linear regression of A on the rewards normalised in their groups, split by Shapley value. Rest: what no "
    "weighted sum of them with fixed weights explains."
)


def text(result: Comparison) -> str:
    """The text for the terminal."""
    shown = [*map(_wrapped, result.notes)]
    for title, remark, lines in _tables(result):
        shown += ["", _wrapped(title), *map(plain, blocks(lines, WIDTH)), *([_wrapped(remark)] if remark else [])]
    for title, prompt, lines in _groups(result, rows=_ROWS):
        shown += ["", _wrapped(title)]
        if prompt:
            shown.append(_end(prompt, WIDTH, "prompt: "))
        table = plain([line[:-1] for line in lines]).split("\n")
        answers = ["answer, its end", "", *(line[-1] for line in lines[1:])]
        if any(answers[2:]):
            width = max(map(len, table)) + 2
            room = max(WIDTH - width, 20)
            table = [line.ljust(width) + _end(answer, room) for line, answer in zip(table, answers, strict=True)]
            table[1] = "-" * WIDTH
        shown += [line.rstrip() for line in table]
    return "\n".join(shown)


def blocks(lines: Rows, width: int) -> Iterator[Rows]:
    """A table in parts that are not wider than the terminal, each with the first column.

    >>> list(blocks([("name", "aaaa", "bbbb"), ("x", "1", "2")], 12))
    [[('name', 'aaaa'), ('x', '1')], [('name', 'bbbb'), ('x', '2')]]
    """
    widths = [max(map(len, column)) + 2 for column in zip(*lines, strict=True)]
    part: list[int] = []
    for at in range(1, len(widths)):
        if part and widths[0] + sum(widths[other] for other in part) + widths[at] - 2 > width:
            yield [tuple(line[other] for other in (0, *part)) for line in lines]
            part = []
        part.append(at)
    yield [tuple(line[other] for other in (0, *part)) for line in lines]


def html(result: Comparison) -> str:
    """The page."""
    groups = [
        (title, f"Prompt: {prompt}" if prompt else "", lines) for title, prompt, lines in _groups(result, rows=None)
    ]
    heading = f"{', '.join(result.labels[1:])} against grpo"
    alt = f"{heading}: size of the advantages by accuracy and by length, and how they differ"
    tables = [*_tables(result), *groups]
    return page(heading, lambda file: draw(result, file), alt, tables, result.notes, notes_title="Rollouts")


def _tables(result: Comparison) -> Iterator[tuple[str, str, Rows]]:
    labels = result.labels
    rows: Rows = [("estimator", "dead groups", "A = 0", "mean |A|", "other sign", "rank correlation")]
    for label, found in zip(labels, result.measures, strict=True):
        against = ("", "") if label == labels[0] else (_share(found.turned), _number(found.rank))
        rows.append((label, _share(found.dead), _share(found.zero), _number(found.size), *against))
    yield f"Against {labels[0]} on {printable(result.rollouts.total)}", AGAINST, rows
    rows = [("estimator", *result.rewards, "rest")]
    for label, found in zip(labels, result.measures, strict=True):
        rows.append((label, *map(_share, found.explained), _share(1 - sum(found.explained))))
    yield "Share of the variance of A that each reward explains", EXPLAINED, rows
    yield _binned(labels, result.level, [found.by_accuracy for found in result.measures])
    if result.length is not None:
        yield _binned(labels, result.length, [found.by_length for found in result.measures])


def _binned(labels: list[str], bins: Bins, means: list[Array | None]) -> tuple[str, str, Rows]:
    rows: Rows = [("estimator", *bins.labels)]
    rows += [(label, *map(_number, found)) for label, found in zip(labels, means, strict=True) if found is not None]
    rows.append(("(trajectories)", *(_share(count / bins.counts.sum()) for count in bins.counts)))
    return f"Mean |A| by {bins.title}", "", rows


def _groups(result: Comparison, *, rows: int | None) -> Iterator[tuple[str, str, Rows]]:
    """The title, the prompt and the table of each group to show, with up to so many rows."""
    rollouts, groups, labels = result.rollouts, result.rollouts.groups, result.labels
    chosen: dict[int, list[int]] = {}
    for at, group in result.groups:
        members = groups.order[groups.starts[group] : groups.starts[group] + groups.sizes[group]]
        chosen[group] = _spread(result.outcomes[at].advantages, members, rows or len(members))
    texts = json_lines.texts(rollouts.source, [row for every in chosen.values() for row in every])
    keys = result.rewards if rollouts.total in result.rewards else (*result.rewards, rollouts.total)
    for at, group in result.groups:
        shown, size, step = chosen[group], groups.sizes[group], rollouts.step[chosen[group][0]]
        label, distance = labels[at], result.measures[at].distance[group]
        few = f", {len(shown)} of {size} trajectories" if len(shown) < size else ""
        both = (0, at)
        lines: Rows = [(*keys, *(labels[each] for each in both), "answer")]
        for row in shown:
            rewards = [_number(rollouts.columns[key][row]) for key in keys]
            advantages = [_number(result.outcomes[each].advantages[row], sign=True) for each in both]
            lines.append((*rewards, *advantages, _line(texts.get(row, ("", ""))[1])))
        title = (
            f"Where {label} is furthest from grpo, both scaled to the same size ({distance:.2f}): step {step}, prompt "
            f"{rollouts.prompts[group]}{few}"
        )
        yield title, _line(texts.get(shown[0], ("", ""))[0]), lines


def _spread(advantages: Array, members: Index, rows: int) -> list[int]:
    """Members by advantage, highest first; of too many, some at equal distances in that order."""
    ordered = members[np.argsort(-advantages[members], kind="stable")]
    picks = np.linspace(0, len(ordered) - 1, min(rows, len(ordered))).round().astype(int)
    found: list[int] = ordered[picks].tolist()
    return found


def _line(text: str) -> str:
    """A text in one line, its end where it is long."""
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"...{line[-_LONGEST:]}"


def _end(text: str, width: int, before: str = "") -> str:
    """The end of a text in one line of the terminal."""
    line = before + printable(text)
    return line if len(line) <= width else f"{before}...{printable(text)[len(before) + 3 - width :]}"


def _wrapped(text: str) -> str:
    return textwrap.fill(printable(text), WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _share(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1%}"


def _number(value: float, *, sign: bool = False) -> str:
    return "-" if math.isnan(value) else f"{value:+.3f}" if sign else f"{value:.3f}"
