"""`verl-ext check --try-reward`: call the reward function of a run on rows of its data, without a model.

verl's own reward manager calls the function. For each row it scores a response made from the ground truth in the format
that the function reads, an empty response, and the response in the same line of `--responses`. Without this check, most
mistakes in a reward function would be found after the first rollout.
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
from typing import Any

import numpy as np
import torch

from verl_ext.advantages.estimator import compute, computing
from verl_ext.advantages.log import log_estimator_of_verl
from verl_ext.advantages.table import Table, is_number
from verl_ext.checks.forms import Answer, Number, Trial
from verl_ext.checks.plan import TOOLS
from verl_ext.checks.prompts import LIMIT, Prompts
from verl_ext.checks.rewards import MANAGERS, accuracy_of
from verl_ext.checks.samples import read_responses, rows_of
from verl_ext.checks.scoring import IN_PROCESS, MANAGER, ROLLOUT, EndedError, Scorer
from verl_ext.core.batch import LARGEST_REWARD, SCORE
from verl_ext.core.row_index import RowIndex
from verl_ext.core.rubrics import Criteria
from verl_ext.errors import ConfigurationError, DataError, Finding, VerlExtError, listed
from verl_ext.run import Run
from verl_ext.run_config import FILTER, FUNCTION, select
from verl_ext.settings import ACCURACY_BETWEEN, ANY_REWARD, VerlExtSettings

AGENT, SINGLE_TURN = "actor_rollout_ref.rollout.agent", "single_turn_agent"
NO_REWARDS = ("reward", ANY_REWARD, ACCURACY_BETWEEN)
"""The metrics of a filter of groups that no reward function returns."""


def try_reward(config: Any, run: Run, options: argparse.Namespace, until: float) -> tuple[list[str], list[Finding]]:
    """Call the reward function; return a summary and the findings. `until`: when to end, by `time.monotonic()`."""
    if select(config, "reward.reward_model.enable") and select(config, f"{FUNCTION}.path") is None:
        raise ConfigurationError(
            f"This run is scored by a reward model, which cannot be tried here. Set {FUNCTION}.path=FILE to try or "
            "rehearse the run with a function."
        )
    for template in options.answer_template:
        if "{}" not in template:
            raise ConfigurationError(
                f"--answer-template={template!r} has no {{}}. Write {{}} where the ground truth is inserted."
            )
    given = ["\n".join(turns) for turns in read_responses(options.responses)] if options.responses is not None else []
    prompts = Prompts(config)
    samples, findings = rows_of(config, "data.train_files", options.rows, spread=not given, visit=prompts)
    if options.rows < 1 or not samples:
        raise DataError(
            f"--rows={options.rows} selects no rows of data.train_files. Set --rows to at least 1, and name files with "
            "rows."
        )
    validated, _ = rows_of(config, "data.val_files", 1)
    begun = time.monotonic()
    with closing(Scorer(config, options.seconds, until, nan=run.chain is not None)) as scorer:
        costly = scorer.is_async or select(config, f"{MANAGER}.name") not in IN_PROCESS
        costly |= bool(select(config, "reward.reward_model.enable"))
        trial = Trial(scorer, _numbers(config, run), options.answer_template, costly=costly)
        try:
            for number, (place, row) in enumerate([*samples.items(), *validated.items()]):
                responses = given[number : number + 1] if number < len(samples) else []
                trial.row(place, row, responses, training=place in samples)
            findings += trial.again()
        except EndedError as error:
            findings.append(Finding("error", str(error), ""))
    seconds = f", in {(time.monotonic() - begun) / scorer.scored:.2g} s each" if scorer.scored else ""
    findings += [Finding("error", text[0].upper() + text[1:], "") for text in trial.problems]
    results = {answer: result for answer, result in trial.results.items() if answer.training}
    names = dict.fromkeys(name for result in results.values() for name in result)
    columns: dict[str, list[Any]] = {name: [result.get(name) for result in results.values()] for name in names}
    if results:
        more = select(config, f"{MANAGER}.name") not in MANAGERS
        findings += [Finding("error", text, "") for text in _wrong(columns, list(results), run, more=more)]
    certain = bool(not costly or options.answer_template or given)
    lines, notes = _summaries(config, trial, prompts, certain=certain)
    findings += notes
    findings += _notes_on_names(run, columns, given=bool(given))
    findings += _notes_on_agents(config, samples.values())
    rest = len(samples) - options.rows
    more_rows = f" ({rest} more than --rows, so that each data_source is included)" if rest > 0 else ""
    where = f"{len(samples)} rows of data.train_files{more_rows} and {len(validated)} of data.val_files"
    title = f"The reward function scored {len(trial.results)} responses to {where}{seconds}:"
    return [title, *_lines(columns, run), *lines], findings


def _summaries(config: Any, trial: Trial, prompts: Prompts, *, certain: bool) -> tuple[list[str], list[Finding]]:
    """Return sentences about the rewards and the prompts, and those that need a review as notes.

    `certain`: whether enough answer templates were tried to judge a ground truth without a reward.
    """
    path = select(config, f"{FUNCTION}.path") or "verl's reward function"
    fix = (
        "Add --answer-template 'TEXT {}' or --responses FILE, or correct how "
        f"{path} compares a response with reward_model.ground_truth."
    )
    prompts_fix = f"Raise {LIMIT}, shorten the prompts, or correct the chat template."
    sentences = [(text, needs_review and certain, fix) for text, needs_review in trial.summary()]
    sentences += [(text, needs_review, prompts_fix) for text, needs_review in prompts.summary()]
    lines = [text for text, needs_review, _ in sentences if not needs_review]
    notes = [Finding("note", text, fix_of_text) for text, needs_review, fix_of_text in sentences if needs_review]
    if any(trial.chosen.values()):
        constant = [f"Every response that was tried receives {value}." for value in trial.constant()]
        notes += [Finding("note", text, fix) for text in constant]
    return lines, notes


def _notes_on_names(run: Run, columns: Mapping[str, Any], *, given: bool) -> Iterator[Finding]:
    """Yield what is doubtful about the names of the rewards. `given`: whether --responses was used."""
    for one, other in combinations(run.settings.rewards.keys or (), 2):
        if len({*map(str, columns.get(one, ()))}) > 1 and columns[one] == columns.get(other):
            fix = f"Remove {one} or {other} if it is redundant."
            yield Finding(
                "note",
                f"algorithm.rewards.keys: the rewards {one} and {other} are equal for all responses that were tried.",
                fix if given else f"Add --responses with responses in which they differ. {fix}",
            )
    if columns and (metric := run.filter_metric) not in (None, *NO_REWARDS, *columns):
        yield Finding(
            "note",
            f"{FILTER}.metric={metric} is not among the values that the reward function returns.",
            f"Set it to one of {listed(columns)}.",
        )


def _notes_on_agents(config: Any, rows: Iterable[Any]) -> Iterator[Finding]:
    """Yield a note if tools are set in a run whose agent loop calls no tool."""
    default = select(config, f"{AGENT}.default_agent_loop")
    tools = [name for name in TOOLS if select(config, name)]
    if tools and {row.get("agent_name") or default for row in rows} == {SINGLE_TURN}:
        yield Finding(
            "note",
            f"{tools[0]} is set, but the agent loop {SINGLE_TURN} calls no tool.",
            f"Set agent_name in the rows, or {AGENT}.default_agent_loop, to tool_agent.",
        )


def _numbers(config: Any, run: Run) -> dict[str, Number]:
    """The numbers that matter: the named rewards, the accuracy at its threshold, and the score."""
    added = (*MANAGERS.get(select(config, f"{MANAGER}.name"), ()), *ROLLOUT)
    keys = run.settings.rewards.keys or ()
    names = keys if keys and run.computes_advantages else (*keys, SCORE)
    numbers: dict[str, Number] = {name: methodcaller("get", name) for name in names if name not in added}
    if (threshold := run.settings.rewards.accuracy_threshold) is not None:
        key, bound = accuracy_of(run.settings), float(threshold)
        numbers[f"{key} above {bound:g}"] = lambda result: is_number(result.get(key)) and result[key] > bound
    return numbers


def _wrong(columns: Mapping[str, Any], answers: Sequence[Answer], run: Run, *, more: bool) -> Iterator[str]:
    """Yield what would end the run at the first batch. `more`: the reward manager may add components."""
    labels = [answer.where for answer in answers]
    settings = replace(run.settings, verl_ext=VerlExtSettings())  # without a dump
    trial_run = Run(run.name, settings, run.chain)
    size = len(answers)
    scores = torch.tensor(columns[SCORE], dtype=torch.float64)[:, None]
    table = Table(
        settings=settings.rewards,
        rows=RowIndex.of_padding(np.zeros(size, dtype=bool)),
        labels=labels,
        results=columns,
        score=scores[:, 0].numpy(),
        truncated=np.ones(size, dtype=bool),  # the number of its turns is not known
    )
    of_chain = () if run.chain is None else run.chain.needs_fields
    missing = {*(settings.rewards.keys or ()), *of_chain} - columns.keys()
    if missing and (more or not missing.isdisjoint({*ROLLOUT, *of_chain})):
        return
    try:
        with computing(trial_run, table):
            if run.chain is None:
                log_estimator_of_verl(trial_run, table)
            else:
                compute(run.name, scores, torch.ones(size, 1))
        if settings.rewards.accuracy_between is not None:
            table.accuracy()
        for key in settings.rewards.rubrics or ():
            Criteria.of(key, [answer.place for answer in answers], columns[key])  # the same for a row
    except VerlExtError as error:
        yield str(error)


def _lines(columns: Mapping[str, Sequence[Any]], run: Run) -> Iterator[str]:
    """Yield the type and the range of each component."""
    accuracies = []
    for key, given in columns.items():
        values, turns = given, ""
        with suppress(TypeError, ValueError):
            rubrics = key in (run.settings.rewards.rubrics or ())
            if rubrics or key in (run.settings.rewards.per_turn or ()):
                lists = list(map(json.loads, given))
                entries, counts = [entry for entries in lists for entry in entries], list(map(len, lists))
                values = [value for value, _ in entries] if rubrics else entries
                turns = f", {min(counts)} to {max(counts)} {'criteria per rubric' if rubrics else 'turns per response'}"
        numbers = [float(value) for value in values if is_number(value) and abs(value) <= LARGEST_REWARD]
        words = [f"{min(numbers):g} to {max(numbers):g}"] if numbers else []
        words += [f"{rest} are NaN, missing or not a number"] if (rest := len(values) - len(numbers)) else []
        types = " or ".join(sorted({type(value).__name__ for value in values}))
        yield f"  {key}: {types}{turns}, {', '.join(words) or 'no number'}"
        if numbers and 0 <= min(numbers) < max(numbers) <= 1 and not turns:
            accuracies.append(key)
    yield f"  components that vary within [0, 1], so that they can be used as an accuracy: {listed(accuracies)}"
