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
from dataclasses import dataclass, field
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
from verl_ext.integration.components import SCORE, Components, is_number

PLACE = "algorithm.rewards"


@dataclass
class Tried:
    """What a reward function did with some answers."""

    calls: int = 0
    answers: list[str] = field(default_factory=list)
    """The answers for which the function returned something."""
    results: list[dict[str, Any]] = field(default_factory=list)
    """What it returned for them."""
    problems: list[str] = field(default_factory=list)

    def values(self) -> dict[str, list[Any]]:
        """Return the values of each component, None where the function did not return it."""
        names = dict.fromkeys(name for result in self.results for name in result)
        return {name: [result.get(name) for result in self.results] for name in names}


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
    tried = Tried()
    for at, row in enumerate(samples):
        truth = row["reward_model"]["ground_truth"]
        kinds = {"the ground truth": truth if isinstance(truth, str) else json.dumps(truth), "an empty answer": ""}
        kinds |= {"the answer of the file": given[at]} if at < len(given) else {}
        for kind, answer in kinds.items():
            _call(tried, function, row, answer, f"row {at}, {kind}")
    if tried.results:
        tried.problems += _wrong(tried, verdict, MANAGERS.get(select(config, "reward.reward_manager.name")))
    problems = list(dict.fromkeys(tried.problems))
    lines = [*_lines(tried, f"{len(samples)} rows of {path}", verdict), *(f"  - {text}" for text in problems)]
    return lines, bool(problems)


def _wrong(tried: Tried, verdict: Verdict, added: tuple[str, ...] | None) -> Iterator[str]:
    """Yield what would end the run at the first batch.

    `added` are the components that the reward manager adds; None: unknown.
    """
    rows = Rows.of_padding(np.zeros(len(tried.results), dtype=bool))
    found, rewards = Components(rows=rows, labels=tried.answers, fields=tried.values()), verdict.settings.rewards
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
                unit_accuracy(column, tried.answers, key=name, threshold=rewards.accuracy_threshold)
        except VerlExtError as error:
            yield str(error)


def _rows(config: Any, most: int) -> tuple[str, list[Any]]:
    """Return the first training file, and its first rows."""
    import pandas
    from omegaconf import OmegaConf

    files = OmegaConf.select(config, "data.train_files")
    path = str(files if isinstance(files, str) else next(iter(files or []), ""))
    try:
        frame = (
            pandas.read_parquet(path) if path.endswith(".parquet") else pandas.read_json(path, lines="jsonl" in path)
        )
    except (OSError, ValueError) as error:
        raise DataError(f"data.train_files={path} cannot be read: {error}") from error
    samples = [_plain(row) for row in frame.head(most).to_dict("records")]
    for at, row in enumerate(samples):
        if not isinstance(row.get("reward_model"), Mapping) or "ground_truth" not in row["reward_model"]:
            raise DataError(f"row {at} of {path} has no reward_model.ground_truth, which verl needs: {listed(row)}")
    return path, samples


def _plain(value: Any) -> Any:
    """Return arrays as lists, as verl's loader has them."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    value = value.tolist() if hasattr(value, "tolist") else value
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _call(tried: Tried, function: Any, row: Any, answer: str, where: str) -> None:
    tried.calls += 1
    try:
        result = function(
            data_source=row.get("data_source"),
            solution_str=answer,
            ground_truth=row["reward_model"]["ground_truth"],
            extra_info=row.get("extra_info") or {},
        )
        result = asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result
    except Exception as error:  # noqa: BLE001 - the function is the user's
        tried.problems.append(f"{where}: the reward function raises {type(error).__name__}: {error}")
        return
    values = dict(result) if isinstance(result, Mapping) else {"acc": result, "score": result}
    if "score" not in values:
        tried.problems.append(f"the result has no `score`, which verl needs: {listed(values)}")
    tried.answers.append(where)
    tried.results.append(values)


async def _awaited(result: Any) -> Any:
    return await result


def _lines(tried: Tried, source: str, verdict: Verdict) -> Iterator[str]:
    yield f"the reward function on {source}, {tried.calls} answers"
    columns, rewards, accuracies = tried.values(), verdict.settings.rewards, []
    width = max(map(len, columns), default=0)
    for key, values in columns.items():
        numbers = [float(value) for value in values if isinstance(value, Real) and not math.isnan(float(value))]
        what = [f"{min(numbers):g} to {max(numbers):g}"] if numbers else []
        what += list(_odd(values))
        yield f"  {key.ljust(width)}  {listed({type(value).__name__ for value in values})}  {', '.join(what)}"
        if numbers and min(numbers) >= 0 and max(numbers) <= 1:
            accuracies.append(key)
    yield f"  in [0, 1], as an accuracy must be: {listed(accuracies)}"
    keys = rewards.keys or ()
    if keys and all(map(is_number, (value for name in (SCORE, *keys) for value in columns.get(name, [None])))):
        weights = np.array(rewards.weights or [1.0] * len(keys))
        total = weights @ np.array([columns[key] for key in keys], dtype=float)
        off = np.nan_to_num(np.abs(np.array(columns[SCORE], dtype=float) - total)).max()
        used = "the sum" if verdict.chain is not None else "the score"
        if off > 1e-6:
            yield f"  the score differs from the weighted sum of the named rewards by up to {off:g}; {used} is used"


def _odd(values: Sequence[Any]) -> Iterator[str]:
    """Words about values that are no finite number."""
    nan = sum(isinstance(value, Real) and math.isnan(float(value)) for value in values)
    for words, count in (("missing or None", sum(value is None for value in values)), ("NaN (not scored)", nan)):
        if count:
            yield f"{count} {words}"
    if any(isinstance(value, Mapping | list | tuple) for value in values):
        yield "nested: return flat keys with numbers"
