"""`verl-ext compare`: arguments in; tables, picture, page and parquet out."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from verl_ext.compare import tables, variants
from verl_ext.compare.measures import (
    MOST_REWARDS,
    Bins,
    Measures,
    by_length,
    by_level,
    furthest,
    measure,
    normalised,
)
from verl_ext.compare.picture import draw
from verl_ext.compare.read import files, read
from verl_ext.compare.rollouts import SCORE_ALONE, Rollouts
from verl_ext.compare.variants import Outcome, Variant
from verl_ext.errors import ConfigurationError, printable
from verl_ext.estimators import ESTIMATORS
from verl_ext.files import write, writing
from verl_ext.report.outputs import check_outputs
from verl_ext.settings import Settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument(
        "rollouts",
        type=Path,
        help="a folder or a file: JSON lines of verl's trainer.rollout_data_dir or trainer.validation_data_dir, or "
        "parquet of algorithm.verl_ext.dump_dir",
    )
    parser.add_argument(
        "variants",
        nargs="*",
        metavar="VARIANT",
        help="an estimator, with its settings in one quoted argument, as in 'gdpo algorithm.gdpo.scale=mad'; a list of "
        "steps, as in '[weigh_and_sum,centre]'; or KEY=VALUE, which holds for all",
    )
    parser.add_argument("--length", metavar="KEY", help="the entry of the JSON lines with the number of tokens")
    parser.add_argument(
        "--top", type=int, default=1, help="groups to show for each variant, the furthest from grpo first (default: 1)"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a picture")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one page with the picture, tables and texts")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write every trajectory's advantages as parquet")


@dataclass(frozen=True)
class Comparison:
    """All that is shown."""

    rollouts: Rollouts
    outcomes: list[Outcome]
    measures: list[Measures]
    rewards: tuple[str, ...]
    """The rewards whose share of the advantage is shown."""
    level: Bins
    length: Bins | None
    groups: list[tuple[int, int]]
    """The groups to show: the variant and the group."""
    notes: list[str]

    @property
    def labels(self) -> list[str]:
        return [outcome.variant.label for outcome in self.outcomes]


def compare(options: argparse.Namespace) -> str:
    """Write the requested files; return the text to print."""
    if options.top < 0:
        raise ConfigurationError(f"--top must be at least 0, found {options.top}")
    check_outputs(files(options.rollouts), plot=options.plot, html=options.html, output=options.output)
    named, common = variants.parse(options.variants)
    if len(named) == 1:
        raise ConfigurationError(
            f"name at least one estimator to compare with grpo: {', '.join(ESTIMATORS)}, or a list of steps in [...]"
        )
    settings = [common, *(variant.settings for variant in named)]
    found = read(options.rollouts, variants.wanted(settings), length=options.length)
    result = _compared(found, named, common, options.top)
    text = [tables.text(result)]
    if options.plot is not None:
        with writing(options.plot):
            draw(result, options.plot)
        text.append(f"picture: {printable(options.plot)}")
    if options.html is not None:
        write(options.html, tables.html(result))
        text.append(f"page: {printable(options.html)}")
    if options.output is not None:
        _save(result, options.output)
        text.append(f"advantages: {printable(options.output)}")
    return "\n".join(text)


def _compared(rollouts: Rollouts, named: list[Variant], common: Settings, top: int) -> Comparison:
    results = variants.outcomes(named, rollouts)
    notes = [*rollouts.summary(), *variants.legend(results, rollouts)]
    keys = tuple(dict.fromkeys(key for variant in named for key in variant.rewards)) or (rollouts.total,)
    if len(keys) > MOST_REWARDS:
        raise ConfigurationError(f"{len(keys)} rewards are too many for Shapley values, at most {MOST_REWARDS}")
    if keys == (rollouts.total,):
        others = [name for name in rollouts.names if name != rollouts.total]
        more = f"also {', '.join(others)}: name them with 'algorithm.rewards.keys=[...]'" if others else "no other"
        notes.append(f"one reward only, {rollouts.total}; the rollouts have {more}")
        notes += [SCORE_ALONE] if rollouts.score_alone else []
    notes += _sums(rollouts, named)
    level, note = _level(rollouts, common)
    notes += note
    length = None if rollouts.lengths is None else by_length(rollouts.lengths, rollouts.unit)
    matrix = np.stack([rollouts.column(key, "algorithm.rewards.keys") for key in keys], axis=1)
    scaled = normalised(matrix, rollouts.groups)
    baseline = results[0].advantages
    measures = [measure(each.advantages, baseline, rollouts.groups, scaled, level, length) for each in results]
    chosen = [(at + 1, group) for at, group in furthest([each.distance for each in measures[1:]], top)] if top else []
    return Comparison(rollouts, results, measures, keys, level, length, chosen, notes)


def _sums(rollouts: Rollouts, named: list[Variant]) -> list[str]:
    """Say where grpo's score is not the weighted sum that the others work on."""
    said: dict[str, None] = {}
    for own in (variant.settings.rewards for variant in named if variant.rewards):
        weights = own.weights or (1.0,) * len(own.keys or ())
        columns = [rollouts.column(key, "algorithm.rewards.keys") for key in own.keys or ()]
        total = np.nan_to_num(np.stack(columns, axis=1)) @ np.array(weights)
        score = rollouts.column(rollouts.total, "the score")
        differs = float((np.abs(total - score) > 1e-5 * np.maximum(1, np.abs(score))).mean())
        if differs:
            written = " + ".join(
                key if weight == 1 else f"{weight:g} {key}" for key, weight in zip(own.keys or (), weights, strict=True)
            )
            said[
                f"{rollouts.total} is not {written} in {differs:.1%} of trajectories: grpo works on {rollouts.total}"
                f"{', as in verl' if rollouts.source is not None else ''}; the variant `grpo` shows grpo on the sum"
            ] = None
    return list(said)


def _level(rollouts: Rollouts, common: Settings) -> tuple[Bins, list[str]]:
    """The bins by accuracy; by the mean score where there is no accuracy."""
    try:
        key, values = variants.accuracy(common, rollouts)
        return by_level(values, rollouts.groups, f"accuracy of the prompt ({key})", unit=True), []
    except ConfigurationError as error:
        if common.rewards.accuracy_key is not None:
            raise
        score = rollouts.column(rollouts.total, "the score")
        note = f"prompts are sorted by their mean {rollouts.total}, because {error}"
        return by_level(score, rollouts.groups, f"mean {rollouts.total} of the prompt", unit=False), [note]


def _save(result: Comparison, path: Path) -> None:
    try:
        import pyarrow
    except ImportError as error:
        raise ConfigurationError(f"--output {path} needs pyarrow: pip install pyarrow") from error
    from verl_ext.integration.dump import save, storable

    rollouts = result.rollouts
    uids = pyarrow.array([storable(uid) for uid in rollouts.prompts])
    ids = pyarrow.array(rollouts.groups.ids.astype(np.int32))
    columns = {"step": rollouts.step, "update": rollouts.update, "uid": pyarrow.DictionaryArray.from_arrays(ids, uids)}
    if rollouts.source is not None:
        columns["line"] = rollouts.source.line
    if rollouts.lengths is not None:
        columns[rollouts.unit] = rollouts.lengths
    for key in dict.fromkeys((rollouts.total, *result.rewards)):
        columns[f"reward/{storable(key)}"] = rollouts.columns[key]
    for outcome in result.outcomes:
        columns[f"advantage/{outcome.variant.label}"] = outcome.advantages
    with writing(path):
        save(path, columns)
