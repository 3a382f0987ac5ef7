"""Compute the advantages that estimators give to scored responses, and compare them with grpo's."""

import argparse
import json
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from verl_ext.errors import ConfigurationError, DataError, explaining_errors
from verl_ext.files import aligned, say
from verl_ext.settings import Settings
from verl_ext.tools.compare import variants
from verl_ext.tools.compare.comparison import Bins, by_accuracy, contributions, magnitudes_by_accuracy, overview
from verl_ext.tools.compare.read import read_rollouts
from verl_ext.tools.compare.rollouts import Rollouts
from verl_ext.tools.compare.variants import Outcome, Variant


def compare(options: argparse.Namespace) -> int:
    """Print the tables, and write the advantages if asked to."""
    with explaining_errors(options.rollouts):
        rollouts = read_rollouts(options.rollouts, options.prompt)
    compared, shared = variants.parse(options.variants, rollouts)
    rollouts = rollouts.with_rubrics(_rubrics(compared)).with_score(shared.rewards)
    outcomes = [variants.compute_outcome(variant, rollouts) for variant in compared]
    keys = _keys(compared) or (rollouts.total_key,)
    bins, notes_on_accuracy = _accuracy_bins(rollouts, shared)
    notes = [*_notes(rollouts, outcomes, shared), *notes_on_accuracy, *_notes_on_unscored_rewards(rollouts, keys)]
    sections = [overview(rollouts, outcomes), contributions(rollouts, outcomes, keys)]
    if bins is not None:
        sections.append(magnitudes_by_accuracy(rollouts, outcomes, bins))
    lines = [rollouts.summary, *(f"note: {note}" for note in notes)]
    for section in sections:
        lines += ["", section.title, aligned(section.table), textwrap.indent(section.remarks, "  ")]
    if options.output is not None:
        _save(rollouts, outcomes, keys, options.output)
        lines += ["", f"advantages written to {options.output}"]
    say("\n".join(lines))
    return 0


def _rubrics(compared: Sequence[Variant]) -> tuple[str, ...]:
    """Return the keys of all rubrics of the variants."""
    rubrics = [key for variant in compared for key in variant.settings.rewards.rubrics or ()]
    return tuple(dict.fromkeys(rubrics))


def _keys(compared: Sequence[Variant]) -> tuple[str, ...]:
    """Return the keys of all rewards that the variants name. The first variant is grpo on the score."""
    keys = [key for variant in compared[1:] for key in variant.settings.rewards.keys or ()]
    return tuple(dict.fromkeys(keys))


def _accuracy_bins(rollouts: Rollouts, shared: Settings) -> tuple[Bins | None, list[str]]:
    """Return the groups by the accuracy of their prompt, or a note that says why the accuracy is not known.

    Only one table needs the accuracy. An estimator that needs the accuracy has raised an error before.
    """
    try:
        key, accuracies = variants.accuracy(shared, rollouts)
    except (ConfigurationError, DataError) as error:
        if shared.rewards.accuracy_key is not None:  # the setting is wrong
            raise
        return None, [f"The table of mean |A| by prompt accuracy is omitted. {error}"]
    return by_accuracy(rollouts.prompt_means(accuracies), f"prompt accuracy ({key})"), []


def _notes(rollouts: Rollouts, outcomes: Sequence[Outcome], shared: Settings) -> Iterator[str]:
    """Yield sentences about the rollouts, the settings, and what may differ from a run."""
    yield from rollouts.notes
    groups_of_one = np.count_nonzero(rollouts.groups.sizes == 1)
    if groups_of_one:
        yield (
            f"{groups_of_one:,} group(s) have only one response, whose advantage is 0 here. verl's own grpo uses the "
            "score of such a response as its advantage."
        )
    if rollouts.run is not None:
        yield (
            f"The rollouts are from a run with {rollouts.run.estimator}. All variants use the settings of the run, "
            "unless an argument overrides them."
        )
    if shared.given:
        yield f"All variants use algorithm={json.dumps(shared.given)} and loss_agg_mode={shared.loss_agg_mode}."
    if shared.given.get("use_kl_in_reward"):
        yield "algorithm.use_kl_in_reward=True is ignored, because the rollouts do not contain the KL term."
    for outcome in outcomes[1:]:
        yield from outcome.notes


def _notes_on_unscored_rewards(rollouts: Rollouts, keys: Sequence[str]) -> Iterator[str]:
    """Yield for each reward in how many rows it is not scored."""
    for key in keys:
        values = rollouts.rewards[key]
        unscored = np.count_nonzero(np.isnan(values))
        if unscored:
            yield f"The reward {key!r} is not scored in {unscored:,} of {len(values):,} {rollouts.row_name}."


def _save(rollouts: Rollouts, outcomes: Sequence[Outcome], keys: Sequence[str], path: Path) -> None:
    """Write one row per trajectory or turn: its origin, its rewards, and the advantage of every variant."""
    origin = ["step", "update", "uid"]
    if rollouts.turns.any():
        origin.append("turn")
    table = rollouts.table[origin].copy()
    table[rollouts.length_unit] = rollouts.counts["lengths"]
    for key in (rollouts.total_key, *keys):
        table[f"reward/{key}"] = rollouts.rewards[key]
    for outcome in outcomes:
        table[f"advantage/{outcome.variant.label}"] = outcome.advantages
    path.parent.mkdir(parents=True, exist_ok=True)
    table.to_parquet(path, index=False)
