"""Compute the advantages that estimators give to scored answers, of a run or not, and compare them with grpo's."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from verl_ext.errors import ConfigurationError, reading
from verl_ext.files import say
from verl_ext.settings import Settings
from verl_ext.tools.compare import variants
from verl_ext.tools.compare.measures import Bins, Measures, Share, by_accuracy, by_score, measure, normalised
from verl_ext.tools.compare.read import read
from verl_ext.tools.compare.rollouts import Rollouts
from verl_ext.tools.compare.variants import GRPO, Outcome
from verl_ext.tools.tables import Rows, plain

AGAINST = (
    "A is the advantage; brackets hold a 95 % interval (Wilson's, for the number of groups). A = 0 and other sign are "
    "shares of trajectories. The rank correlation is Spearman's, over all trajectories."
)
EXPLAINED = (
    "R² of a linear regression of A on the rewards normalised in their groups, split by Shapley value. Rest: what no "
    "weighted sum of them with fixed weights explains."
)
LEVEL = "1 is the mean |A| over all groups; ± is a 95 % interval over the groups."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "rollouts",
        type=Path,
        help="a folder or a file: parquet of algorithm.verl_ext.dump_dir, JSON lines of verl's "
        "trainer.rollout_data_dir or trainer.validation_data_dir, or any .parquet or .jsonl with a row an answer",
    )
    parser.add_argument(
        "variants",
        nargs="*",
        metavar="VARIANT",
        help="an estimator, with its settings in one quoted argument, as in 'gdpo algorithm.gdpo.scale=mad'; a list of "
        "steps, as in '[weigh_and_sum,centre]'; or KEY=VALUE, which holds for all. Settings that no argument names "
        "are those of the run, where a dump has them",
    )
    parser.add_argument("--prompt", metavar="COLUMN", help="the column that is the same for answers to one prompt")
    parser.add_argument(
        "--step", metavar="COLUMN", help="the column of the step; with --prompt alone all rows are one batch"
    )
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


def compare(options: argparse.Namespace) -> int:
    """Write the requested files and print the tables."""
    with reading(options.rollouts):
        result = _compared(read(options.rollouts, options.prompt, options.step), options.variants)
    lines = list(result.notes)
    for title, remark, rows in _tables(result):
        lines += ["", title, plain(rows), remark]
    if options.output is not None:
        _save(result, options.output)
        lines.append(f"advantages: {options.output}")
    say("\n".join(lines))
    return 0


def _compared(found: Rollouts, arguments: list[str]) -> Comparison:
    compared, common = variants.parse(arguments, found)
    found = found.scored(common.rewards)
    outcomes = [variants.outcome(variant, found) for variant in compared]
    named = [key for each in outcomes[1:] for key in each.variant.settings.rewards.keys or ()]
    keys = tuple(dict.fromkeys(named)) or (found.total,)
    level, more = _level(found, common)
    raw = {key: found.reward(key, "algorithm.rewards.keys") for key in keys}
    measures = []
    for each in outcomes:
        seen = np.stack([each.seen.get(key, raw[key]) for key in keys], axis=1)
        scaled = normalised(seen, found.groups)
        measures.append(measure(each.advantages, outcomes[0].advantages, found.groups, scaled, level))
    notes = [*_notes(found, outcomes, common), *more]
    missing = {key: int(np.isnan(values).sum()) for key, values in raw.items()}
    notes += [f"{key} is not scored in {count:,} trajectories" for key, count in missing.items() if count]
    return Comparison(found, outcomes, measures, keys, level, notes)


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
    for outcome in outcomes[1:]:
        yield f"{outcome.variant.label}: {outcome.variant.text}"
        yield from outcome.notes


def _level(found: Rollouts, common: Settings) -> tuple[Bins, list[str]]:
    """Sort groups by accuracy; by the mean score where there is no accuracy."""
    try:
        key, values = variants.accuracy(common, found)
        return by_accuracy(found.of_prompts(values), f"accuracy of the prompt ({key})"), []
    except ConfigurationError as error:
        if common.rewards.accuracy_key is not None:
            raise
        means = found.of_prompts(found.rewards[found.total])
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


def _share(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1%}"


def _interval(share: Share) -> str:
    low, high = f"{100 * share.low:.0f}", f"{100 * share.high:.0f}"
    return f"{share.value:.1%}" if low == high else f"{share.value:.1%} ({low}-{high})"


def _number(value: float, half: float = math.nan) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.3f}" if math.isnan(half) else f"{value:.2f} ± {half:.2f}"


def _save(result: Comparison, path: Path) -> None:
    """Write one row a trajectory: where it comes from, its rewards and every variant's advantage."""
    found = result.rollouts
    table = found.table[["step", "update", "uid", *(["turn"] if found.turns.any() else [])]].assign(
        **{found.unit: found.counts["lengths"]}
    )
    for key in dict.fromkeys((found.total, *result.keys)):
        table[f"reward/{key}"] = found.rewards[key]
    for outcome in result.outcomes:
        table[f"advantage/{outcome.variant.label}"] = outcome.advantages
    path.parent.mkdir(parents=True, exist_ok=True)
    table.to_parquet(path, index=False)
