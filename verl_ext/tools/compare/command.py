"""Compute the advantages that estimators give to rollouts which a run has written, and compare them with grpo's."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from verl_ext.errors import ConfigurationError
from verl_ext.files import write, writing
from verl_ext.registry import ESTIMATORS
from verl_ext.settings import Settings
from verl_ext.tools import picture
from verl_ext.tools.compare import variants
from verl_ext.tools.compare.measures import Bins, Measures, Share, by_accuracy, by_score, furthest, measure, normalised
from verl_ext.tools.compare.picture import draw
from verl_ext.tools.compare.variants import GRPO, Outcome
from verl_ext.tools.rollouts import Rollouts, read
from verl_ext.tools.tables import Rows, page, plain

_ROWS, _TEXT, _LONGEST = 10, 60, 2000
"""In the terminal: lines of a group, and characters of a text; on the page: characters of a text."""
AGAINST = (
    "A: advantage. In brackets: 95 % interval (Wilson's, for the number of groups). A = 0, other sign: shares of "
    "trajectories. Rank correlation: Spearman's, over all trajectories."
)
EXPLAINED = (
    "R² of a linear regression of A on the rewards normalised in their groups, split by Shapley value. Rest: what no "
    "weighted sum of them with fixed weights explains."
)
LEVEL = "1: as in the average group; ±: 95 % interval over the groups."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "rollouts",
        type=Path,
        help="a folder or a file: parquet of algorithm.verl_ext.dump_dir, or JSON lines of verl's "
        "trainer.rollout_data_dir or trainer.validation_data_dir",
    )
    parser.add_argument(
        "variants",
        nargs="*",
        metavar="VARIANT",
        help="an estimator, with its settings in one quoted argument, as in 'gdpo algorithm.gdpo.scale=mad'; a list of "
        "steps, as in '[weigh_and_sum,centre]'; `run`, the advantages that a dump recorded (default); or KEY=VALUE, "
        "which holds for all. Settings that no argument names are those of the run, where a dump has them",
    )
    parser.add_argument("--top", type=int, default=1, help="groups to show for each variant (default: 1)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a picture")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one page with the picture, tables and texts")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write every trajectory's advantages as parquet")


@dataclass(frozen=True)
class Comparison:
    """All that is shown."""

    rollouts: Rollouts
    outcomes: list[Outcome]
    measures: list[Measures]
    keys: tuple[str, ...]
    """The rewards whose share of the advantage is shown."""
    level: Bins
    notes: list[str]

    @property
    def labels(self) -> list[str]:
        return [outcome.variant.label for outcome in self.outcomes]


def compare(options: argparse.Namespace) -> str:
    """Write the requested files; return the text to print."""
    found = read(options.rollouts)
    result = _compared(found, options.variants)
    groups = list(_groups(result, options.top))
    lines = list(result.notes)
    for title, remark, rows in _tables(result):
        lines += ["", title, plain(rows), remark]
    for title, prompt, rows in groups:
        ends = rows if len(rows) <= _ROWS else [*rows[: _ROWS // 2], *rows[-_ROWS // 2 :]]
        short = [tuple(_end(cell, _TEXT) for cell in row) for row in ends]
        lines += ["", title, *([_end(prompt, 2 * _TEXT)] if prompt else []), plain(short)]
    if options.plot is not None or options.html is not None:
        figure = draw(result.labels, result.measures, result.level, result.keys, found.summary)
        heading = f"{', '.join(result.labels[1:])} against grpo"
        if options.plot is not None:
            picture.save(figure, options.plot)
            lines.append(f"picture: {options.plot}")
        if options.html is not None:
            tables = [*_tables(result), *groups]
            write(options.html, page(heading, result.notes, picture.png(figure), heading, tables))
            lines.append(f"page: {options.html}")
    if options.output is not None:
        _save(result, options.output)
        lines.append(f"advantages: {options.output}")
    return "\n".join(lines)


def _compared(found: Rollouts, arguments: list[str]) -> Comparison:
    compared, common = variants.parse(arguments, found)
    outcomes = [variants.outcome(variant, found) for variant in compared]
    named = [key for each in outcomes[1:] for key in each.variant.settings.rewards.keys or found.seen]
    keys = tuple(dict.fromkeys(named)) or (found.total,)
    level, note = _level(found, common)
    raw = {key: found.reward(key, "algorithm.rewards.keys") for key in keys}
    measures = []
    for each in outcomes:
        seen = np.stack([each.seen.get(key, raw[key]) for key in keys], axis=1)
        scaled = normalised(seen, found.groups)
        measures.append(measure(each.advantages, outcomes[0].advantages, found.groups, scaled, level))
    return Comparison(found, outcomes, measures, keys, level, [*_notes(found, outcomes, common), *note])


def _notes(found: Rollouts, outcomes: list[Outcome], common: Settings) -> Iterator[str]:
    """Say what was read, and what each variant is."""
    yield found.summary
    yield from found.notes
    if alone := int((found.groups.sizes == 1).sum()):
        yield f"{alone:,} groups have one trajectory: its advantage is 0 (verl's own grpo gives it its raw score)"
    if found.run is not None:
        yield f"the run: {found.run.estimator}; its settings hold for all variants, unless an argument names them"
    if common.given:
        yield f"settings: {json.dumps(common.given)}, loss_agg_mode={common.loss_agg_mode}"
    if common.given.get("use_kl_in_reward"):
        yield "the KL in the rewards is left out, because rollouts do not hold it"
    ours = found.run is not None and found.run.estimator in ESTIMATORS
    yield f"{GRPO}: on {found.total}, {'the weighted sum of what the run saw' if ours else 'as verl computes it'}"
    for outcome in outcomes[1:]:
        yield f"{outcome.variant.label}: {outcome.variant.text}"
        yield from outcome.notes


def _level(found: Rollouts, common: Settings) -> tuple[Bins, list[str]]:
    """Sort groups by accuracy; by the mean score where there is no accuracy."""
    try:
        key, values = variants.accuracy(common, found)
        return by_accuracy(found.groups.mean(values), f"accuracy of the prompt ({key})"), []
    except ConfigurationError as error:
        if common.rewards.accuracy_key is not None:
            raise
        means = found.groups.mean(found.rewards[found.total])
        note = f"prompts are sorted by their mean {found.total}, because there is no accuracy: {error}"
        return by_score(means, f"mean {found.total} of the prompt"), [note]


def _tables(result: Comparison) -> Iterator[tuple[str, str, Rows]]:
    rows: Rows = [("estimator", "dead groups", "A = 0", "mean |A|", "other sign", "rank correlation")]
    for at, (label, found) in enumerate(zip(result.labels, result.measures, strict=True)):
        against = (_interval(found.turned), _number(found.rank)) if at else ("", "")
        rows.append((label, _interval(found.dead), _interval(found.zero), _number(found.size), *against))
    count = len(result.rollouts.groups)
    yield f"Against {GRPO} on {result.rollouts.total}, {count:,} groups", AGAINST, rows
    rows = [("estimator", *result.keys, "rest")]
    for label, found in zip(result.labels, result.measures, strict=True):
        rows.append((label, *map(_share, found.explained)))
    yield f"Share of the variance of A that each reward explains, {count:,} groups", EXPLAINED, rows
    rows = [("estimator", *result.level.labels)]
    for label, found in zip(result.labels, result.measures, strict=True):
        rows.append((label, *(_number(mean, half) for mean, half in found.by_level)))
    rows.append(("(groups)", *(f"{number:,}" for number in result.level.counts)))
    yield f"Mean |A| by {result.level.title}", LEVEL, rows


def _groups(result: Comparison, top: int) -> Iterator[tuple[str, str, Rows]]:
    """Yield the title, the prompt and the table of the groups that are furthest from grpo."""
    found = result.rollouts
    keys = tuple(dict.fromkeys((*result.keys, found.total)))
    for at, group in furthest([each.distance for each in result.measures[1:]], top):
        base, outcome = result.outcomes[0], result.outcomes[at + 1]
        members = np.flatnonzero(found.groups.ids == group)
        members = members[np.argsort(-outcome.advantages[members], kind="stable")]
        table = found.table.iloc[members]
        texts = [_end(text, _LONGEST) for text in table.get("output", ())]
        rows: Rows = [(*keys, GRPO, outcome.variant.label, *(["answer"] if texts else []))]
        for at_row, row in enumerate(members.tolist()):
            advantages = [f"{each.advantages[row]:+.3f}" for each in (base, outcome)]
            rows.append((*(_number(found.rewards[key][row]) for key in keys), *advantages, *texts[at_row : at_row + 1]))
        distance = result.measures[at + 1].distance[group]
        title = (
            f"Where {outcome.variant.label} is furthest from grpo, both scaled to the same size ({distance:.2f}): step "
            f"{table['step'].iloc[0]}, prompt {table['uid'].iloc[0]}"
        )
        yield title, f"Prompt: {_end(table['input'].iloc[0], _LONGEST)}" if texts else "", rows


def _end(text: str, longest: int) -> str:
    """Return a text in one line; its end where it is long."""
    line = " ".join(text.split())
    return line if len(line) <= longest else f"...{line[3 - longest :]}"


def _share(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1%}"


def _interval(share: Share) -> str:
    return f"{share.value:.1%} ({100 * share.low:.0f}-{100 * share.high:.0f})"


def _number(value: float, half: float = math.nan) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.3f}" if math.isnan(half) else f"{value:.2f} ± {half:.2f}"


def _save(result: Comparison, path: Path) -> None:
    """Write one row a trajectory: where it comes from, its rewards and every variant's advantage."""
    found = result.rollouts
    table = found.table[["step", "update", "uid"]].assign(**{found.unit: found.lengths})
    for key in dict.fromkeys((found.total, *result.keys)):
        table[f"reward/{key}"] = found.rewards[key]
    for outcome in result.outcomes:
        table[f"advantage/{outcome.variant.label}"] = outcome.advantages
    with writing(path):
        table.to_parquet(path, index=False)
