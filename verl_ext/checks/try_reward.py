"""`verl-ext check --try-reward`: call the reward function of a run on rows of its data, without a model.

verl's own reward manager calls the function. Each row is scored with its ground truth as the answer, with an empty
answer, and with the answer in the same line of a file. Most mistakes in a reward function would else show after the
first rollout.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

from verl_ext.checks.judge import Verdict
from verl_ext.checks.rewards import MANAGERS, accuracy_of
from verl_ext.checks.samples import read_answers, rows_of
from verl_ext.core.batch import LARGEST_REWARD, SCORE
from verl_ext.core.groups import Groups
from verl_ext.core.items import Items
from verl_ext.core.rows import Rows
from verl_ext.errors import ConfigurationError, DataError, VerlExtError, listed, reading, unknown
from verl_ext.files import say
from verl_ext.integration.advantage import compute, log_and_dump
from verl_ext.integration.run import Run
from verl_ext.integration.sampling import outside
from verl_ext.integration.table import Table, is_number
from verl_ext.run_config import FUNCTION, select
from verl_ext.settings import VerlExtSettings

MANAGER = "reward.reward_manager"
TOOLS = [f"actor_rollout_ref.rollout.multi_turn.{name}" for name in ("tool_config_path", "function_tool_path")]
SINGLE_TURN = "single_turn_agent"
IN_PROCESS = ("naive", "dapo", "gdpo")
"""verl's reward managers that need neither Ray nor a service; `naive` calls the function for the others."""
ROLLOUT = {"min_global_steps": 0, "max_global_steps": 0, "turn_scores": [], "tool_rewards": []}
"""What a rollout of one turn adds to `extra_info`, at the first step."""


def try_reward(config: Any, verdict: Verdict, *, rows: int, answers: Path | None) -> tuple[list[str], list[str]]:
    """Return lines about the reward function, and what would end a run with it."""
    if select(config, "reward.reward_model.enable") and select(config, f"{FUNCTION}.path") is None:
        raise ConfigurationError(f"a reward model scores this run: to try or rehearse it, set {FUNCTION}.path=FILE")
    given = ["\n".join(turns) for turns in read_answers(answers)] if answers is not None else []
    samples, lacks = rows_of(config, "data.train_files", rows, spread=not given)
    if rows < 1 or not samples:
        raise DataError(f"there is nothing to try: --rows={rows} of data.train_files")
    validated, _ = rows_of(config, "data.val_files", 1)
    tried = []
    for number, (place, row) in enumerate([*samples.items(), *validated.items()]):
        truth = (row["reward_model"] or {}).get("ground_truth")
        kinds = {"the ground truth": truth if isinstance(truth, str) else json.dumps(truth), "an empty answer": ""}
        kinds |= {"the answer of the file": given[number]} if number < min(len(given), len(samples)) else {}
        tried += [(f"{place}, {kind}", place in samples, row, text) for kind, text in kinds.items()]
    problems, looks = ([text for text, fatal in lacks if fatal is kind] for kind in (True, False))
    results: dict[str, dict[str, Any]] = {}
    # A response is one token, the number of the answer.
    manager = _manager(config, SimpleNamespace(decode=lambda tokens, **_options: tried[int(tokens[0])][-1]))
    begun = told = time.monotonic()
    for done, (where, _, row, _) in enumerate([*tried, tried[0]]):
        if time.monotonic() - told > 10:
            told = time.monotonic()
            say(f"{done} of {len(tried)} answers are scored, {(told - begun) / done:.2g} s each", sys.stderr)
        try:
            result = _scored(manager, row, done % len(tried), verdict)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the function is the user's
            problems.append(f"{where}: scoring raises {type(error).__name__}: {error}")
            continue
        first = results.setdefault(where, result)
        if differ := [name for name in result if repr(result[name]) != repr(first.get(name))]:
            twice = ", ".join(f"{name}={first.get(name)} and {result[name]}" for name in differ)
            looks.append(f"{where}, scored twice: {twice}; a resumed run cannot repeat")
    each = (time.monotonic() - begun) / (len(tried) + 1)
    trained = {where: results[where] for where, training, _, _ in tried if training and where in results}
    names = dict.fromkeys(name for result in trained.values() for name in result)
    columns: dict[str, list[Any]] = {name: [result.get(name) for result in trained.values()] for name in names}
    if trained:
        problems += _wrong(columns, list(trained), verdict, more=select(config, f"{MANAGER}.name") not in MANAGERS)
    for one, other in combinations(verdict.settings.rewards.keys or (), 2):
        if len({*map(str, columns.get(one, ()))}) > 1 and columns[one] == columns.get(other):
            tell = "give --answers in which they differ" if answers is None else "one of them may be superfluous"
            looks.append(f"algorithm.rewards.keys: {one} and {other} are equal in all answers: {tell}")
    judged, threshold = dict(columns), verdict.settings.rewards.accuracy_threshold
    if threshold is not None and (key := accuracy_of(verdict.settings)) in columns:
        bound = float(threshold)
        judged[f"{key} above {bound:g}"] = [is_number(value) and value > bound for value in columns[key]]
    for key in (*(verdict.settings.rewards.keys or ()), *judged.keys() - columns.keys(), SCORE):
        if len(values := {*map(str, judged.get(key, ()))}) == 1:
            advice = "compares with reward_model.ground_truth, or give --answers in the format that it wants"
            path = select(config, f"{FUNCTION}.path") or "verl"
            looks.append(
                f"the ground truth itself earns {key}={values.pop()}, as every answer: look what {path} {advice}"
            )
    default = select(config, "actor_rollout_ref.rollout.agent.default_agent_loop")
    loops = {row.get("agent_name") or default for row in samples.values()}
    if (tools := [name for name in TOOLS if select(config, name)]) and loops == {SINGLE_TURN}:
        looks.append(
            f"{tools[0]} is set, but {SINGLE_TURN} calls no tool: set agent_name in the rows, or "
            "actor_rollout_ref.rollout.agent.default_agent_loop, to tool_agent"
        )
    more = f" ({len(samples) - rows} more than --rows, for their data_source)" if len(samples) > rows else ""
    where = f"{len(samples)} rows of data.train_files{more}, {len(validated)} of data.val_files"
    sources = "ground truths, empty ones, those of the file" if given else "ground truths, empty ones"
    title = f"the reward function on {where}: {len(results)} answers ({sources}), {each:.2g} s each"
    return [title, *_lines(columns, verdict), *(f"look       {text}" for text in looks)], problems


def _manager(config: Any, tokenizer: Any) -> Any:
    """Return the run's reward manager, with its reward function."""
    from verl.trainer.ppo.reward import load_reward_manager

    name = select(config, f"{MANAGER}.name")
    called: Any = OmegaConf.merge(config, {"reward": {"reward_manager": {"source": "register"}}})
    called.reward.reward_manager.name = name if name in IN_PROCESS else "naive"
    file, function = Path(f"{select(config, f'{FUNCTION}.path')}"), f"{select(config, f'{FUNCTION}.name')}"
    source = file.read_text("utf-8", "replace") if file.is_file() else function
    if not re.search(rf"\b{function}\b", source):
        valid = re.findall(r"^(?:async )?def (\w+)", source, re.M)
        raise ConfigurationError(f"{FUNCTION}.name: {unknown('function', function, valid)}, of {file}")
    with reading("the reward function", ConfigurationError):
        manager = load_reward_manager(called, tokenizer)
    # Without this Python before 3.12 waits for ever for a function that raises StopIteration.
    manager.loop.set_exception_handler(_stop)
    return manager


def _stop(loop: Any, context: dict[str, Any]) -> None:
    """Log an error of a loop, and end what runs in it."""
    loop.default_exception_handler(context)
    loop.stop()


def _scored(manager: Any, row: Mapping[str, Any], number: int, verdict: Verdict) -> dict[str, Any]:
    """Score an answer, and store the score as verl's rollout does; raise where a run would end."""
    from tensordict import TensorDict
    from verl import DataProto

    fields = {**row, "extra_info": dict(row.get("extra_info") or {})}
    fields |= {"tool_extra_fields": dict(ROLLOUT), "__num_turns__": 2, "reward_scores": {}}
    token = torch.full((1, 1), number)
    tensors = {"prompts": token, "responses": token, "attention_mask": torch.ones(1, 2, dtype=torch.long)}
    data = DataProto(
        batch=TensorDict(tensors, [1]),
        non_tensor_batch={name: np.array([value, None], dtype=object)[:1] for name, value in fields.items()},
    )
    result = manager.loop.run_until_complete(manager.run_single(data))
    score, stored = result["reward_score"], torch.full((1,), torch.inf)
    with suppress(TypeError, ValueError, RuntimeError):
        stored[-1] = score
    if stored.isinf() or (stored.isnan() and verdict.chain is None):
        raise DataError(f"the score is {score!r}, expected a float that is finite")
    return {**result["reward_extra_info"], SCORE: score}


def _wrong(columns: Mapping[str, Any], answers: Sequence[str], verdict: Verdict, *, more: bool) -> Iterator[str]:
    """Yield what would end the run at the first batch. `more`: the reward manager may add components."""
    settings = replace(verdict.settings, verl_ext=VerlExtSettings())  # without a dump
    run, size = Run(verdict.name, settings, verdict.chain), len(answers)
    scores = torch.tensor(columns[SCORE], dtype=torch.float64)[:, None]
    table = Table(
        settings=settings.rewards,
        rows=Rows.of_padding(np.zeros(size, dtype=bool)),
        labels=answers,
        fields=columns,
        returned=list(columns),
        score=scores[:, 0].numpy(),
        cut=np.ones(size, dtype=bool),  # nobody knows its turns
    )
    of_chain = () if run.chain is None else run.chain.needs_fields
    untold = {*(settings.rewards.keys or ()), *of_chain} - columns.keys()
    if untold and (more or not untold.isdisjoint({*ROLLOUT, *of_chain})):
        return
    try:
        with run.computing(table):
            if run.chain is None:
                log_and_dump(run, table, None)
            else:
                compute(run.name, scores, torch.ones(size, 1))
        if settings.rewards.accuracy_between is not None:
            outside(Groups.of(answers), table)
        for key in settings.rewards.by_item or ():
            Items.of(key, [answer.rpartition(", ")[0] for answer in answers], columns[key])  # the same for a row
    except VerlExtError as error:
        yield str(error)


def _lines(columns: Mapping[str, Sequence[Any]], verdict: Verdict) -> Iterator[str]:
    """Say the type and the range of each component."""
    accuracies = []
    for key, given in columns.items():
        values, turns = given, ""
        with suppress(TypeError, ValueError):
            by_item = key in (verdict.settings.rewards.by_item or ())
            if by_item or key in (verdict.settings.rewards.by_turn or ()):
                lists = list(map(json.loads, given))
                entries, counts = [entry for entries in lists for entry in entries], list(map(len, lists))
                values = [value for value, _ in entries] if by_item else entries
                turns = f" by {'item' if by_item else 'turn'}, {min(counts)} to {max(counts)} entries"
        numbers = [float(value) for value in values if is_number(value) and abs(value) <= LARGEST_REWARD]
        words = [f"{min(numbers):g} to {max(numbers):g}"] if numbers else []
        words += [f"{rest} NaN, missing or no number"] if (rest := len(values) - len(numbers)) else []
        yield f"  {key}  {listed({type(value).__name__ for value in values})}{turns}  {', '.join(words)}"
        if numbers and 0 <= min(numbers) < max(numbers) <= 1 and not turns:
            accuracies.append(key)
    yield f"  in [0, 1] and not constant, as an accuracy: {listed(accuracies)}"
