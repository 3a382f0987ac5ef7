"""`verl-ext check --try-reward`: call the reward function of a run on rows of its training file, without a model.

The function is loaded as verl loads it. Each row is scored with its ground truth as the answer, with an empty answer,
and with the answer in the same line of a file. Most mistakes in a reward function would else show after the first
rollout.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from verl_ext.core.batch import unit_accuracy
from verl_ext.core.rows import Rows
from verl_ext.errors import ConfigurationError, DataError, VerlExtError, listed
from verl_ext.integration.checks import Verdict
from verl_ext.integration.checks.read import select
from verl_ext.integration.checks.rewards import MANAGERS
from verl_ext.integration.components import SCORE, Components

PLACE = "algorithm.rewards"


def try_reward(config: Any, verdict: Verdict, *, rows: int, answers: Path | None) -> tuple[list[str], bool]:
    """Return lines about the reward function, and whether a run with it would fail."""
    from verl.trainer.ppo.reward import get_custom_reward_fn
    from verl.utils.reward_score import default_compute_score

    try:
        function = get_custom_reward_fn(config) or default_compute_score
    except Exception as error:
        raise ConfigurationError(f"the reward function cannot be loaded: {type(error).__name__}: {error}") from error
    path, samples = _rows(config, rows)
    given = answers.read_text(encoding="utf-8").splitlines() if answers is not None else []
    results, problems = {}, []
    for at, row in enumerate(samples):
        truth = row["reward_model"]["ground_truth"]
        kinds = {"the ground truth": truth if isinstance(truth, str) else json.dumps(truth), "an empty answer": ""}
        kinds |= {"the answer of the file": given[at]} if at < len(given) else {}
        for kind, answer in kinds.items():
            where = f"row {at}, {kind}"
            try:
                results[where] = _called(function, row, answer)
            except Exception as error:  # noqa: BLE001 - the function is the user's
                problems.append(f"{where}: the reward function raises {type(error).__name__}: {error}")
    names = dict.fromkeys(name for result in results.values() for name in result)
    columns = {name: [result.get(name) for result in results.values()] for name in names}
    if results:
        problems += _wrong(columns, list(results), verdict, MANAGERS.get(select(config, "reward.reward_manager.name")))
    lines = [f"the reward function on {len(samples)} rows of {path}, {len(results)} answers", *_lines(columns)]
    return [*lines, *(f"  - {text}" for text in problems)], bool(problems)


def _rows(config: Any, most: int) -> tuple[str, list[Any]]:
    """Return the first training file, and its first rows."""
    import pyarrow.json
    import pyarrow.parquet

    files = select(config, "data.train_files")
    path = str(files if isinstance(files, str) else next(iter(files or []), ""))
    read = pyarrow.parquet.read_table if path.endswith(".parquet") else pyarrow.json.read_json
    try:
        samples = read(path).slice(0, most).to_pylist()
    except (OSError, ValueError) as error:
        raise DataError(f"data.train_files={path} cannot be read: {error}") from error
    for at, row in enumerate(samples):
        if "ground_truth" not in (row.get("reward_model") or {}):
            raise DataError(f"row {at} of {path} has no reward_model.ground_truth, which verl needs: {listed(row)}")
    return path, samples


def _called(function: Any, row: Any, answer: str) -> dict[str, Any]:
    """Call the reward function as verl does."""
    truth, info = row["reward_model"]["ground_truth"], row.get("extra_info") or {}
    result = function(data_source=row.get("data_source"), solution_str=answer, ground_truth=truth, extra_info=info)
    result = asyncio.run(result) if inspect.iscoroutine(result) else result
    return dict(result) if isinstance(result, Mapping) else {"acc": result, SCORE: result}


def _wrong(
    columns: Mapping[str, Any], answers: Sequence[str], verdict: Verdict, added: tuple[str, ...] | None
) -> Iterator[str]:
    """Yield what would end the run at the first batch.

    `added` are the components that the reward manager adds; None: unknown.
    """
    if SCORE not in columns:
        yield f"the result has no `score`, which verl needs: {listed(columns)}"
    rows, rewards = Rows.of_padding(np.zeros(len(answers), dtype=bool)), verdict.settings.rewards
    found = Components(rows=rows, labels=answers, fields=columns)
    wanted = dict.fromkeys(rewards.keys or (), "keys")
    by_estimator = verdict.chain is not None and verdict.chain.needs_accuracy
    accuracy = rewards.accuracy_in(found) if by_estimator or rewards.accuracy_between is not None else None
    if accuracy is not None:
        wanted.setdefault(accuracy, "accuracy_key")
    for name, setting in wanted.items():
        if name not in found and (added is None or name in added):
            continue
        try:
            counts = verdict.chain is not None or name == accuracy
            column = found.column(name, f"{PLACE}.{setting}", counts=counts)
            if name == accuracy:
                unit_accuracy(column, answers, key=name, threshold=rewards.accuracy_threshold, where=PLACE)
        except VerlExtError as error:
            yield str(error)


def _lines(columns: Mapping[str, Sequence[Any]]) -> Iterator[str]:
    """Say the type and the range of each component."""
    accuracies = []
    for key, values in columns.items():
        numbers = [float(value) for value in values if isinstance(value, Real) and not math.isnan(float(value))]
        words = [f"{min(numbers):g} to {max(numbers):g}"] if numbers else []
        missing = sum(value is None for value in values)
        unscored = sum(isinstance(value, Real) and math.isnan(float(value)) for value in values)
        words += [f"{missing} missing or None"] if missing else []
        words += [f"{unscored} NaN (not scored)"] if unscored else []
        yield f"  {key}  {listed({type(value).__name__ for value in values})}  {', '.join(words)}"
        if numbers and min(numbers) >= 0 and max(numbers) <= 1:
            accuracies.append(key)
    yield f"  in [0, 1], as an accuracy must be: {listed(accuracies)}"
