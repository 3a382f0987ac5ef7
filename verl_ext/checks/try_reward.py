"""`verl-ext check --try-reward`: call the reward function of a run on rows of its data, without a model.

verl's own reward manager calls the function. Each row is scored with its ground truth as the answer, in the form that
the function reads, with an empty answer, and with the answer in the same line of a file. Most mistakes in a reward
function would else show after the first rollout.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from itertools import combinations
from operator import methodcaller
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl_ext.checks.forms import Answer, Number, Trial
from verl_ext.checks.judge import Verdict
from verl_ext.checks.plan import TOOLS
from verl_ext.checks.prompts import LIMIT, Prompts
from verl_ext.checks.rewards import MANAGERS, accuracy_of
from verl_ext.checks.samples import read_answers, rows_of
from verl_ext.checks.scoring import IN_PROCESS, MANAGER, ROLLOUT, EndedError, Scorer
from verl_ext.core.batch import LARGEST_REWARD, SCORE
from verl_ext.core.groups import Groups
from verl_ext.core.items import Items
from verl_ext.core.rows import Rows
from verl_ext.errors import ConfigurationError, DataError, VerlExtError, listed
from verl_ext.integration.advantage import compute, log_and_dump
from verl_ext.integration.run import Run
from verl_ext.integration.sampling import outside
from verl_ext.integration.table import Table, is_number
from verl_ext.run_config import FILTER, FUNCTION, select
from verl_ext.settings import ACCURACY_BETWEEN, ANY_REWARD, VerlExtSettings

AGENT, SINGLE_TURN = "actor_rollout_ref.rollout.agent", "single_turn_agent"
NO_REWARDS = ("reward", ANY_REWARD, ACCURACY_BETWEEN)
"""The metrics of a filter of groups that no reward function returns."""


def add_trial(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a trial."""
    parser.add_argument("--answers", type=Path, metavar="FILE", help="JSON lines: an answer to each row, or its turns")
    parser.add_argument(
        "--answer-template", action="append", default=[], metavar="TEXT", help="such as 'The answer: {}'"
    )
    parser.add_argument("--seconds", type=float, default=20, help="for the score of an answer, 20 by default")


def try_reward(config: Any, verdict: Verdict, options: argparse.Namespace, until: float) -> tuple[list[str], list[str]]:
    """Return lines about the reward function, and what would end a run with it. `until`: when to end, by the clock."""
    if select(config, "reward.reward_model.enable") and select(config, f"{FUNCTION}.path") is None:
        raise ConfigurationError(f"a reward model scores this run: to try or rehearse it, set {FUNCTION}.path=FILE")
    if wrong := [form for form in options.answer_template if "{}" not in form]:
        raise ConfigurationError(f"--answer-template {wrong[0]!r} has no {{}}, where the ground truth stands")
    given = ["\n".join(turns) for turns in read_answers(options.answers)] if options.answers is not None else []
    prompts = Prompts(config)
    samples, lacks = rows_of(config, "data.train_files", options.rows, spread=not given, visit=prompts)
    if options.rows < 1 or not samples:
        raise DataError(f"there is nothing to try: --rows={options.rows} of data.train_files")
    validated, _ = rows_of(config, "data.val_files", 1)
    problems, looks = ([text for text, fatal in lacks if fatal is kind] for kind in (True, False))
    begun = time.monotonic()
    with closing(Scorer(config, options.seconds, until, nan=verdict.chain is not None)) as scorer:
        costly = scorer.is_async or select(config, f"{MANAGER}.name") not in IN_PROCESS
        costly |= bool(select(config, "reward.reward_model.enable"))
        trial = Trial(scorer, _numbers(config, verdict), options.answer_template, costly=costly)
        try:
            for number, (place, row) in enumerate([*samples.items(), *validated.items()]):
                answers = given[number : number + 1] if number < len(samples) else []
                trial.row(place, row, answers, training=place in samples)
            looks += trial.again()
        except EndedError as error:
            problems.append(str(error))
    each = (time.monotonic() - begun) / max(1, scorer.scored)
    problems += trial.problems
    results = {answer: result for answer, result in trial.results.items() if answer.training}
    names = dict.fromkeys(name for result in results.values() for name in result)
    columns: dict[str, list[Any]] = {name: [result.get(name) for result in results.values()] for name in names}
    if results:
        more = select(config, f"{MANAGER}.name") not in MANAGERS
        problems += _wrong(columns, list(results), verdict, more=more)
    path = select(config, f"{FUNCTION}.path") or "verl's function"
    advice = (
        f"give --answer-template 'TEXT {{}}' or --answers, or look what {path} compares with reward_model.ground_truth"
    )
    certain = bool(not costly or options.answer_template or given)
    told = [(f"truths     {text}", odd and certain, advice) for text, odd in trial.told()]
    told += [(f"prompts    {text}", odd, f"raise {LIMIT}, or shorten them") for text, odd in prompts.told()]
    lines = [text for text, odd, _ in told if not odd]
    looks += [f"{text.partition(' ')[2].strip()}: {mend}" for text, odd, mend in told if odd]
    if any(trial.chosen.values()):
        looks += [f"every answer earns {text}: {advice}" for text in trial.constant()]
    looks += _looks(verdict, columns, given=bool(given))
    looks += _agents(config, samples.values())
    rest = len(samples) - options.rows
    more_rows = f" ({rest} more than --rows, for their data_source)" if rest > 0 else ""
    where = f"{len(samples)} rows of data.train_files{more_rows}, {len(validated)} of data.val_files"
    title = f"the reward function on {where}: {len(trial.results)} answers, {each:.2g} s each"
    return [title, *_lines(columns, verdict), *lines, *(f"look       {text}" for text in looks)], problems


def _looks(verdict: Verdict, columns: Mapping[str, Any], *, given: bool) -> Iterator[str]:
    """Yield what is doubtful about the names of the rewards. `given`: whether there were answers of a file."""
    for one, other in combinations(verdict.settings.rewards.keys or (), 2):
        if len({*map(str, columns.get(one, ()))}) > 1 and columns[one] == columns.get(other):
            tell = "one of them may be superfluous" if given else "give --answers in which they differ"
            yield f"algorithm.rewards.keys: {one} and {other} are equal in all answers: {tell}"
    if columns and (metric := verdict.filter) not in (None, *NO_REWARDS, *columns):
        yield f"{FILTER}.metric={metric} is not what the function returns: set one of {listed(columns)}"


def _agents(config: Any, rows: Iterable[Any]) -> Iterator[str]:
    """Yield that tools are set in a run whose agent loop calls none."""
    default = select(config, f"{AGENT}.default_agent_loop")
    tools = [name for name in TOOLS if select(config, name)]
    if tools and {row.get("agent_name") or default for row in rows} == {SINGLE_TURN}:
        where = f"agent_name in the rows, or {AGENT}.default_agent_loop, to tool_agent"
        yield f"{tools[0]} is set, but {SINGLE_TURN} calls no tool: set {where}"


def _numbers(config: Any, verdict: Verdict) -> dict[str, Number]:
    """The numbers that matter: the named rewards, the accuracy at its threshold, and the score."""
    added = (*MANAGERS.get(select(config, f"{MANAGER}.name"), ()), *ROLLOUT)
    keys = verdict.settings.rewards.keys or ()
    names = keys if keys and verdict.computes else (*keys, SCORE)
    numbers: dict[str, Number] = {name: methodcaller("get", name) for name in names if name not in added}
    if (threshold := verdict.settings.rewards.accuracy_threshold) is not None:
        key, bound = accuracy_of(verdict.settings), float(threshold)
        numbers[f"{key} above {bound:g}"] = lambda result: is_number(result.get(key)) and result[key] > bound
    return numbers


def _wrong(columns: Mapping[str, Any], answers: Sequence[Answer], verdict: Verdict, *, more: bool) -> Iterator[str]:
    """Yield what would end the run at the first batch. `more`: the reward manager may add components."""
    labels = [answer.where for answer in answers]
    settings = replace(verdict.settings, verl_ext=VerlExtSettings())  # without a dump
    run, size = Run(verdict.name, settings, verdict.chain), len(answers)
    scores = torch.tensor(columns[SCORE], dtype=torch.float64)[:, None]
    table = Table(
        settings=settings.rewards,
        rows=Rows.of_padding(np.zeros(size, dtype=bool)),
        labels=labels,
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
            outside(Groups.of(labels), table)
        for key in settings.rewards.rubrics or ():
            Items.of(key, [answer.place for answer in answers], columns[key])  # the same for a row
    except VerlExtError as error:
        yield str(error)


def _lines(columns: Mapping[str, Sequence[Any]], verdict: Verdict) -> Iterator[str]:
    """Say the type and the range of each component."""
    accuracies = []
    for key, given in columns.items():
        values, turns = given, ""
        with suppress(TypeError, ValueError):
            rubrics = key in (verdict.settings.rewards.rubrics or ())
            if rubrics or key in (verdict.settings.rewards.per_turn or ()):
                lists = list(map(json.loads, given))
                entries, counts = [entry for entries in lists for entry in entries], list(map(len, lists))
                values = [value for value, _ in entries] if rubrics else entries
                turns = f" by {'item' if rubrics else 'turn'}, {min(counts)} to {max(counts)} entries"
        numbers = [float(value) for value in values if is_number(value) and abs(value) <= LARGEST_REWARD]
        words = [f"{min(numbers):g} to {max(numbers):g}"] if numbers else []
        words += [f"{rest} NaN, missing or no number"] if (rest := len(values) - len(numbers)) else []
        yield f"  {key}  {listed({type(value).__name__ for value in values})}{turns}  {', '.join(words)}"
        if numbers and 0 <= min(numbers) < max(numbers) <= 1 and not turns:
            accuracies.append(key)
    yield f"  in [0, 1] and not constant, as an accuracy: {listed(accuracies)}"
