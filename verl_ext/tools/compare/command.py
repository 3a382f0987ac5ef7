"""Compute the advantages that estimators give to scored responses, and compare them with grpo's."""

import argparse
import json
import math
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from verl_ext.core.groups import Array
from verl_ext.core.metrics import reward_contributions
from verl_ext.errors import ConfigurationError, DataError, explaining_errors
from verl_ext.files import say
from verl_ext.settings import Settings
from verl_ext.tools.compare import variants
from verl_ext.tools.compare.measures import Bins, Measures, by_accuracy, interval, measure
from verl_ext.tools.compare.read import read_rollouts
from verl_ext.tools.compare.rollouts import Rollouts
from verl_ext.tools.compare.variants import GRPO, Outcome
from verl_ext.tools.tables import Table, plain

OVERVIEW = """\
A: advantage. In brackets: 95% confidence interval (Wilson, with the number of groups as sample size).
zero-variance groups: fraction of the groups in which every advantage is 0.
zero advantages: fraction of the {row} whose advantage is 0.
sign flips: fraction of the {row} whose advantage has the opposite sign of grpo's advantage."""
CONTRIBUTION = """\
Contribution: cov(x, S) / var(S) within a group, where S is the estimator's sum of rewards and x the term of one reward.
The value is a mean over the groups, weighted by their sum of A². Below 0% or above 100%, rewards oppose each other.
rest: contribution of everything in S that is none of these rewards.
-: the contribution is not defined, because the estimator forms no sum of rewards or the sum varies in no group."""
LEVEL = """\
1.00 is the mean |A| over all groups. ±: 95% confidence interval over the groups."""


def compare(options: argparse.Namespace) -> int:
    """Print the tables, and write the advantages if asked to."""
    with explaining_errors(options.rollouts):
        rollouts = read_rollouts(options.rollouts, options.prompt)
    compared, common = variants.parse(options.variants, rollouts)
    rubrics = {key for variant in compared for key in variant.settings.rewards.rubrics or ()}
    rollouts = rollouts.with_rubrics(rubrics).scored(common.rewards)
    outcomes = [variants.outcome(variant, rollouts) for variant in compared]
    named = [key for variant in compared[1:] for key in variant.settings.rewards.keys or ()]
    keys = tuple(dict.fromkeys(named)) or (rollouts.total,)
    raw = {key: rollouts.reward(key, "algorithm.rewards.keys") for key in keys}
    level, notes = _levels(rollouts, common)
    notes = [*_notes(rollouts, outcomes, common), *notes]
    measured: dict[str, Measures] = {}  # by the text of the variant; grpo's first
    contributions: dict[str, Array] = {}
    groups, baseline = rollouts.groups, outcomes[0].advantages
    for outcome in outcomes:
        parts = np.stack([outcome.parts.get(key, np.zeros(len(baseline))) for key in keys], axis=1)
        found = reward_contributions(groups, np.nan_to_num(parts), outcome.total, outcome.advantages)
        contributions[outcome.variant.text] = found
        measured[outcome.variant.text] = measure(outcome.advantages, baseline, groups, level)
    for key, values in raw.items():
        if missing := int(np.isnan(values).sum()):
            notes.append(f"The reward {key!r} is not scored in {missing:,} of {len(values):,} {rollouts.row}.")
    lines = [rollouts.summary, *(f"note: {note}" for note in notes)]
    for title, remark, table in _tables(rollouts, measured, contributions, keys, level):
        lines += ["", title, plain(table), textwrap.indent(remark, "  ")]
    if options.output is not None:
        _save(rollouts, outcomes, keys, options.output)
        lines += ["", f"advantages written to {options.output}"]
    say("\n".join(lines))
    return 0


def _levels(rollouts: Rollouts, common: Settings) -> tuple[Bins, list[str]]:
    """Return the groups by the accuracy of their prompt. If the accuracy is not known, return no bins and a note.

    Only this table needs the accuracy. An estimator that needs the accuracy has raised an error before.
    """
    try:
        key, accuracies = variants.accuracy(common, rollouts)
    except (ConfigurationError, DataError) as error:
        if common.rewards.accuracy_key is not None:  # the setting is wrong
            raise
        no_bins = np.zeros(len(rollouts.groups), dtype=np.intp)
        return Bins("accuracy", (), no_bins), [f"The table of mean |A| by prompt accuracy is omitted. {error}"]
    return by_accuracy(rollouts.of_prompts(accuracies), f"prompt accuracy ({key})"), []


def _notes(rollouts: Rollouts, outcomes: list[Outcome], common: Settings) -> Iterator[str]:
    """Yield sentences about the rollouts, the settings, and what may differ from a run."""
    yield from rollouts.notes
    if alone := int((rollouts.groups.sizes == 1).sum()):
        yield (
            f"{alone:,} group(s) have only one response, whose advantage is 0 here. verl's own grpo uses the score of "
            "such a response as its advantage."
        )
    if rollouts.run is not None:
        yield (
            f"The rollouts are from a run with {rollouts.run.estimator}. All variants use the settings of the run, "
            "unless an argument overrides them."
        )
    if common.given:
        yield f"All variants use algorithm={json.dumps(common.given)} and loss_agg_mode={common.loss_agg_mode}."
    if common.given.get("use_kl_in_reward"):
        yield "algorithm.use_kl_in_reward=True is ignored, because the rollouts do not contain the KL term."
    for outcome in outcomes[1:]:
        yield from outcome.notes


def _tables(
    rollouts: Rollouts,
    measured: dict[str, Measures],
    contributions: dict[str, Array],
    keys: Sequence[str],
    level: Bins,
) -> Iterator[tuple[str, str, Table]]:
    """Yield each table with its title, and with remarks that explain its columns."""
    size = len(rollouts.groups)
    count = f"{size:,} groups"
    rows: Table = [("estimator", "zero-variance groups", "zero advantages", "mean |A|", "sign flips")]
    for label, own in measured.items():
        sign_flips = "-" if len(rows) == 1 else _interval(own.sign_flips, size)
        zeros = (_interval(own.zero_variance, size), _interval(own.zero, size))
        rows.append((label, *zeros, f"{own.mean_magnitude:.3f}", sign_flips))
    title = f"Advantages compared with {GRPO} on the {rollouts.total} ({count})"
    yield title, OVERVIEW.format(row=rollouts.row), rows
    rows = [("estimator", *keys, "rest")]
    rows += [(label, *map(_contribution, (*found, 1 - found.sum()))) for label, found in contributions.items()]
    yield f"Contribution of each reward to the advantage ({count})", CONTRIBUTION, rows
    if not level.labels:
        return
    rows = [("estimator", *level.labels)]
    rows += [(label, *(_relative(mean, half) for mean, half in own.by_level)) for label, own in measured.items()]
    counts = np.bincount(level.ids, minlength=len(level.labels))
    rows.append(("(number of groups)", *(f"{number:,}" for number in counts)))
    yield f"Mean |A| by {level.title}, relative to all groups", LEVEL, rows


def _contribution(value: float) -> str:
    return "-" if math.isnan(value) else f"{round(value, 3) + 0.0:.1%}"  # no -0.0


def _interval(fraction: float, groups: int) -> str:
    low, high = (f"{100 * bound:.0f}" for bound in interval(fraction, groups))
    return f"{fraction:.1%}" if low == high else f"{fraction:.1%} ({low}-{high}%)"


def _relative(mean: float, half: float) -> str:
    """Return the mean |A| of a bin; a bin of one group has no interval."""
    if math.isnan(mean):
        return "-"
    return f"{mean:.2f}" if math.isnan(half) else f"{mean:.2f} ± {half:.2f}"


def _save(rollouts: Rollouts, outcomes: list[Outcome], keys: Sequence[str], path: Path) -> None:
    """Write one row per trajectory: its origin, its rewards, and the advantage of every variant."""
    table = rollouts.table[["step", "update", "uid", *(["turn"] if rollouts.turns.any() else [])]].assign(
        **{rollouts.unit: rollouts.counts["lengths"]}
    )
    for key in dict.fromkeys((rollouts.total, *keys)):
        table[f"reward/{key}"] = rollouts.rewards[key]
    for outcome in outcomes:
        table[f"advantage/{outcome.variant.text}"] = outcome.advantages
    path.parent.mkdir(parents=True, exist_ok=True)
    table.to_parquet(path, index=False)
