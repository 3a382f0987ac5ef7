"""Compute the advantages that estimators give to scored answers, of a run or not, and compare them with grpo's."""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from verl_ext.core.groups import Array
from verl_ext.core.metrics import reward_shares
from verl_ext.errors import ConfigurationError, DataError, reading
from verl_ext.files import say
from verl_ext.settings import Settings
from verl_ext.tools.compare import variants
from verl_ext.tools.compare.measures import Bins, Measures, by_accuracy, interval, measure
from verl_ext.tools.compare.read import read_rollouts
from verl_ext.tools.compare.rollouts import Rollouts
from verl_ext.tools.compare.variants import GRPO, Outcome
from verl_ext.tools.tables import Table, plain

AGAINST = (
    "A is the advantage; brackets hold a 95 % interval (Wilson's, for the number of groups). A = 0 and other sign are "
    "shares of trajectories."
)
SHARES = (
    "cov(x, S) / var(S) in a group, which weighs by its A²; x is what the reward adds to the sum S. Below 0 or above "
    "1: rewards oppose each other. Rest: what none of them adds."
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
        "steps, as in '[weighted_sum,center]'; or KEY=VALUE, which holds for all. Settings that no argument names "
        "are those of the run, where a dump has them",
    )
    parser.add_argument("--prompt", metavar="COLUMN", help="the column that is the same for answers to one prompt")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write every trajectory's advantages as parquet")


def compare(options: argparse.Namespace) -> int:
    """Print the tables, and write the advantages if asked to."""
    with reading(options.rollouts):
        rollouts = read_rollouts(options.rollouts, options.prompt)
    compared, common = variants.parse(options.variants, rollouts)
    rubrics = {key for variant in compared for key in variant.settings.rewards.rubrics or ()}
    rollouts = rollouts.with_items(rubrics).scored(common.rewards)
    outcomes = [variants.outcome(variant, rollouts) for variant in compared]
    named = [key for variant in compared[1:] for key in variant.settings.rewards.keys or ()]
    keys = tuple(dict.fromkeys(named)) or (rollouts.total,)
    raw = {key: rollouts.reward(key, "algorithm.rewards.keys") for key in keys}
    lines = [*_notes(rollouts, outcomes, common)]
    level, missing_level = _levels(rollouts, common)
    lines += missing_level
    measured: dict[str, Measures] = {}  # by the text of the variant; grpo's first
    shares: dict[str, Array] = {}
    groups, baseline = rollouts.groups, outcomes[0].advantages
    for outcome in outcomes:
        parts = np.stack([outcome.parts.get(key, np.zeros(len(baseline))) for key in keys], axis=1)
        shares[outcome.variant.text] = reward_shares(groups, np.nan_to_num(parts), outcome.total, outcome.advantages)
        measured[outcome.variant.text] = measure(outcome.advantages, baseline, groups, level)
    missing = {key: int(np.isnan(values).sum()) for key, values in raw.items()}
    lines += [f"{key} is not scored in {count:,} trajectories" for key, count in missing.items() if count]
    for title, remark, table in _tables(rollouts, measured, shares, keys, level):
        lines += ["", title, plain(table), remark]
    if options.output is not None:
        _save(rollouts, outcomes, keys, options.output)
        lines.append(f"advantages: {options.output}")
    say("\n".join(lines))
    return 0


def _levels(rollouts: Rollouts, common: Settings) -> tuple[Bins, list[str]]:
    """Return the groups by the accuracy of their prompt; without bins, and with a line that says why, if it is unknown.

    Only this table needs the accuracy. An estimator that needs it has raised an error before.
    """
    try:
        key, accuracies = variants.accuracy(common, rollouts)
    except (ConfigurationError, DataError) as error:
        if common.rewards.accuracy_key is not None:  # which is wrong
            raise
        nowhere = np.zeros(len(rollouts.groups), dtype=np.intp)
        return Bins("accuracy", (), nowhere), [f"the table by accuracy is left out: {error}"]
    return by_accuracy(rollouts.of_prompts(accuracies), f"accuracy of the prompt ({key})"), []


def _notes(rollouts: Rollouts, outcomes: list[Outcome], common: Settings) -> Iterator[str]:
    """Say what was read, and what may differ from a run."""
    yield rollouts.summary
    yield from rollouts.notes
    if alone := int((rollouts.groups.sizes == 1).sum()):
        yield f"{alone:,} groups have one trajectory: its advantage is 0 (verl's own grpo gives it its raw score)"
    if rollouts.run is not None:
        yield f"the run: {rollouts.run.estimator}; its settings hold for all variants, unless an argument names them"
    if common.given:
        yield f"settings: {json.dumps(common.given)}, loss_agg_mode={common.loss_agg_mode}"
    if common.given.get("use_kl_in_reward"):
        yield "the KL in the rewards is left out, because rollouts do not hold it"
    for outcome in outcomes[1:]:
        yield from outcome.notes


def _tables(
    rollouts: Rollouts, measured: dict[str, Measures], shares: dict[str, Array], keys: Sequence[str], level: Bins
) -> Iterator[tuple[str, str, Table]]:
    size = len(rollouts.groups)
    count = f"{size:,} groups"
    rows: Table = [("estimator", "dead groups", "A = 0", "mean |A|", "other sign")]
    for label, own in measured.items():
        turned = "" if len(rows) == 1 else _interval(own.turned, size)
        rows.append((label, _interval(own.dead, size), _interval(own.zero, size), _number(own.size), turned))
    yield f"Against {GRPO} on {rollouts.total}, {count}", AGAINST, rows
    rows = [("estimator", *keys, "rest")]
    rows += [(label, *map(_share, (*found, 1 - found.sum()))) for label, found in shares.items()]
    yield f"Share of A that each reward decides, {count}", SHARES, rows
    if not level.labels:
        return
    rows = [("estimator", *level.labels)]
    rows += [(label, *(_number(mean, half) for mean, half in own.by_level)) for label, own in measured.items()]
    counts = np.bincount(level.ids, minlength=len(level.labels))
    rows.append(("(groups)", *(f"{number:,}" for number in counts)))
    yield f"Mean |A| by {level.title}", LEVEL, rows


def _share(value: float) -> str:
    return "-" if math.isnan(value) else f"{round(value, 3) + 0.0:.1%}"  # no -0.0


def _interval(share: float, groups: int) -> str:
    low, high = (f"{100 * bound:.0f}" for bound in interval(share, groups))
    return f"{share:.1%}" if low == high else f"{share:.1%} ({low}-{high})"


def _number(value: float, half: float = math.nan) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.3f}" if math.isnan(half) else f"{value:.2f} ± {half:.2f}"


def _save(rollouts: Rollouts, outcomes: list[Outcome], keys: Sequence[str], path: Path) -> None:
    """Write one row a trajectory: where it comes from, its rewards and every variant's advantage."""
    table = rollouts.table[["step", "update", "uid", *(["turn"] if rollouts.turns.any() else [])]].assign(
        **{rollouts.unit: rollouts.counts["lengths"]}
    )
    for key in dict.fromkeys((rollouts.total, *keys)):
        table[f"reward/{key}"] = rollouts.rewards[key]
    for outcome in outcomes:
        table[f"advantage/{outcome.variant.text}"] = outcome.advantages
    path.parent.mkdir(parents=True, exist_ok=True)
    table.to_parquet(path, index=False)
