"""`verl-ext check --try-reward`: call the reward function of a run on rows of its data, without a model.

`trial.collect` scores responses, `judge` returns the findings, and `summarize` returns the lines that are printed.
Without this check, most mistakes in a reward function would be found after the first rollout.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import torch

from verl_ext.advantages.estimator import compute, computing
from verl_ext.advantages.log import record_step_of_verl_estimator
from verl_ext.advantages.table import Table, is_number
from verl_ext.checks.responses import OF_FILE, TEMPLATES, Response, RewardProbe, number_of, shortened
from verl_ext.checks.rewards import ADDED_BY_MANAGER
from verl_ext.checks.scoring import ADDED_BY_ROLLOUT, MANAGER
from verl_ext.checks.summary import TOOLS
from verl_ext.checks.trial import Trial, collect
from verl_ext.core.batch import LARGEST_REWARD, SCORE
from verl_ext.core.row_index import RowIndex
from verl_ext.core.rubrics import Criteria
from verl_ext.errors import Finding, VerlExtError, listed
from verl_ext.run import Run
from verl_ext.run_config import FILTER, FUNCTION
from verl_ext.settings import ACCURACY, ACCURACY_BETWEEN, ANY_REWARD, VerlExtSettings

AGENT, SINGLE_TURN = "actor_rollout_ref.rollout.agent", "single_turn_agent"
NOT_RETURNED = ("reward", ANY_REWARD, ACCURACY_BETWEEN)
"""The metrics of a filter of groups that no reward function returns."""
NAMED_TEMPLATES = 3
"""The number of built-in templates that are named in a report about a reward that nothing receives."""


def try_reward(run: Run, options: argparse.Namespace, deadline: float) -> tuple[list[str], list[Finding]]:
    """Call the reward function; return a summary and the findings. The calls end at the time `deadline`."""
    trial = collect(run, options, deadline)
    findings = judge(trial, run)
    texts = [finding.text for finding in findings]
    lines = [line for line in summarize(trial, run) if line not in texts]  # what needs a review is printed once
    return lines, findings


def judge(trial: Trial, run: Run) -> list[Finding]:
    """Return the findings about the data and the reward function."""
    findings = [*trial.findings, *failures(trial)]
    if trial.training_results:
        findings += errors_of_first_batch(trial, run)
        findings += _equal_rewards(trial, run)
        findings += _filter_metric(trial, run)
    if tried_enough(trial):
        findings += unrewarded_ground_truths(trial, run)
        findings += constant_rewards(trial, run)
    return [*findings, *trial.prompts.findings(), *_unused_tools(trial, run)]


def failures(trial: Trial) -> Iterator[Finding]:
    """Report each mistake of the reward function once, with the first response for which it occurred."""
    for failure in trial.probe.failures.values():
        count, total = len(failure.where), len(trial.probe.results) + _count_failed(trial)
        yield Finding(
            "error",
            f"The reward function cannot score {count} of {total} responses, because {failure.error.text}. The first "
            f"of them: {failure.where[0]}.",
            failure.error.fix,
        )


def _count_failed(trial: Trial) -> int:
    return sum(len(failure.where) for failure in trial.probe.failures.values())


def errors_of_first_batch(trial: Trial, run: Run) -> Iterator[Finding]:
    """Report what would end the run at its first batch, by computing the advantages of the scored responses."""
    responses, columns, rewards = list(trial.training_results), trial.columns, run.settings.rewards
    scores = torch.tensor(columns[SCORE], dtype=torch.float64)
    without_dump = replace(run.settings, verl_ext=VerlExtSettings())
    run_of_trial = Run(run.name, without_dump, run.chain)
    table = Table(
        settings=rewards,
        row_index=RowIndex.of_padding(np.zeros(len(responses), dtype=bool)),
        labels=[response.where for response in responses],
        results=columns,
        score=scores.numpy(),
        truncated=np.ones(len(responses), dtype=bool),  # so that the number of turns is not compared
    )
    fields_of_steps = () if run.chain is None else run.chain.needs_fields
    missing = {*(rewards.keys or ()), *fields_of_steps} - columns.keys()
    if missing and (_manager_may_add(run) or not missing.isdisjoint({*ADDED_BY_ROLLOUT, *fields_of_steps})):
        return  # the reward manager, the rollout or verl adds what is missing
    try:
        with computing(run_of_trial, table):
            if run.chain is None:
                record_step_of_verl_estimator(run_of_trial, table)
            else:
                compute(run.name, scores[:, None], torch.ones(len(responses), 1))
        if rewards.accuracy_between is not None:
            table.accuracy()
        for key in rewards.rubrics or ():  # a rubric has the same criteria for all responses to a row
            Criteria.of(key, [response.place for response in responses], columns[key])
    except VerlExtError as error:
        yield Finding("error", str(error), "")
    except Exception as error:  # noqa: BLE001 - a custom step may raise anything
        text = f"The advantages of the scored responses cannot be computed ({type(error).__name__}: {error})."
        yield Finding("error", text, "Correct the step that raises this error.")


def _manager_may_add(run: Run) -> bool:
    """Return whether the run has a reward manager of its own, which may add components. The trial does not call it."""
    return run.select(f"{MANAGER}.name") not in ADDED_BY_MANAGER


def _equal_rewards(trial: Trial, run: Run) -> Iterator[Finding]:
    """Yield a note for two named rewards that are equal for all responses."""
    columns = trial.columns
    varying = [key for key in run.settings.rewards.keys or () if len({*map(str, columns.get(key, ()))}) > 1]
    for one, other in combinations(varying, 2):
        if columns[one] == columns[other]:
            fix = f"Remove {one} or {other} if it is redundant."
            if not trial.has_responses_of_file:
                fix = f"Add --responses with responses in which they differ. {fix}"
            yield Finding(
                "note",
                f"algorithm.rewards.keys: the rewards {one} and {other} are equal for all responses that were tried.",
                fix,
            )


def _filter_metric(trial: Trial, run: Run) -> Iterator[Finding]:
    """Yield a note if verl filters groups by something that the reward function does not return."""
    metric = run.filter_metric
    if metric is None or _manager_may_add(run):
        return
    if metric not in (*NOT_RETURNED, *trial.columns):
        yield Finding(
            "note",
            f"{FILTER}.metric={metric} is not among the values that the reward function returns.",
            f"Set it to one of {listed(trial.columns)}.",
        )


def tried_enough(trial: Trial) -> bool:
    """Return whether enough templates or responses were tried to judge a reward that nothing receives."""
    probe = trial.probe
    return not probe.is_expensive or bool(probe.custom_templates) or trial.has_responses_of_file


def unrewarded_ground_truths(trial: Trial, run: Run) -> Iterator[Finding]:
    """Yield notes about data sources, or rows, whose ground truths receive no reward or are never correct."""
    probe = trial.probe
    for source, rows in probe.rows.items():
        best = probe.best_template[source]
        if best is None:
            yield Finding("note", _reward_of_no_template(probe, source), _fix_of_function(run))
        elif best.kind != OF_FILE and any(not probe.gains(row.best) for row in rows):
            yield Finding("note", reward_of_template(probe, source), _fix_of_function(run))
        elif _is_never_correct(trial, run, source):
            shown = f"`{shortened(rows[0].best.text)}` of {rows[0].best.place} receives {_values(probe, rows[0].best)}"
            text = f"{_title(probe, source)} are never correct, although another reward is received: {shown}."
            yield Finding("note", text, _fix_of_function(run))


def _is_never_correct(trial: Trial, run: Run, source: str) -> bool:
    """Return whether no response to a training row of a data source is correct, although it has an accuracy.

    If no other data source is correct either, a score that named rewards replace may be a constant on purpose, and
    `constant_rewards` reports an accuracy that is a constant and a reward.
    """
    probe, results = trial.probe, trial.training_results
    accuracies = [probe.accuracy(result) for response, result in results.items() if response.data_source == source]
    if all(number_of(accuracy) is None for accuracy in accuracies):  # NaN means that the accuracy is not scored
        return False
    correct_sources = {response.data_source for response in results if probe.gain(response, probe.accuracy) > 0}
    if correct_sources:
        return source not in correct_sources
    name = run.settings.rewards.accuracy_key or ACCURACY
    values = {str(probe.accuracy(result)) for result in probe.results.values()}
    is_reported_as_constant = name in probe.measures and len(values) == 1
    return name in trial.columns and not is_reported_as_constant


def constant_rewards(trial: Trial, run: Run) -> Iterator[Finding]:
    """Yield a note for each reward that is the same for all responses, if another reward is received."""
    probe = trial.probe
    if not any(probe.best_template.values()):
        return
    for name, measure in probe.measures.items():
        values = {str(measure(result)) for result in probe.results.values()}
        if len(values) == 1 and values != {"None"}:  # a missing reward is an error, or the reward manager adds it
            text = f"Every response that was tried receives {name}={values.pop()}."
            yield Finding("note", text, _fix_of_function(run))


def _unused_tools(trial: Trial, run: Run) -> Iterator[Finding]:
    """Yield a note if tools are set in a run whose agent loop calls no tool."""
    tools = [name for name in TOOLS if run.select(name)]
    default = run.select(f"{AGENT}.default_agent_loop")
    agents = {row.get("agent_name") or default for row in trial.training_rows.values()}
    if tools and agents == {SINGLE_TURN}:
        yield Finding(
            "note",
            f"{tools[0]} is set, but the agent loop {SINGLE_TURN} calls no tool.",
            f"Set agent_name in the rows, or {AGENT}.default_agent_loop, to tool_agent.",
        )


def _fix_of_function(run: Run) -> str:
    path = run.select(f"{FUNCTION}.path") or "verl's reward function"
    return (
        "Add --answer-template 'TEXT {}' or --responses FILE, or correct how "
        f"{path} compares a response with reward_model.ground_truth."
    )


def summarize(trial: Trial, run: Run) -> list[str]:
    """Return lines about the components, the templates that are rewarded, and the prompts."""
    probe = trial.probe
    places = probe.tried_rows.keys()
    count = len(places & trial.training_rows.keys())
    count_of_validation = len(places & trial.validation_rows.keys())
    added = len(trial.training_rows) - trial.requested_rows
    more = f" ({added} more than --rows, so that each file and each data_source is included)" if added > 0 else ""
    scored, seconds = probe.scorer.scored, probe.scorer.seconds
    duration = f", in {seconds / scored:.2g} s each" if scored else ""
    lines = [
        f"The reward function scored {len(probe.results)} responses to {count} rows of data.train_files{more} and "
        f"{count_of_validation} of data.val_files{duration}:"
    ]
    lines += _components(trial.columns, run)
    for source, best in probe.best_template.items():
        if best is None:
            lines.append(_reward_of_no_template(probe, source))
        elif best.kind != OF_FILE:
            lines.append(reward_of_template(probe, source))
    return [*lines, trial.prompts.summary()]


def _components(columns: Mapping[str, Sequence[Any]], run: Run) -> Iterator[str]:
    """Yield the type and the range of each component."""
    accuracies = []
    for key, results in columns.items():
        values, lengths = _entries(key, results, run)
        numbers = [float(value) for value in values if is_number(value) and abs(value) <= LARGEST_REWARD]
        parts = [" or ".join(sorted({type(value).__name__ for value in values})) + lengths]
        if numbers:
            parts.append(f"{min(numbers):g} to {max(numbers):g}")
        others = len(values) - len(numbers)
        if others:
            parts.append(f"{others} are NaN, missing or not a number")
        yield f"  {key}: {', '.join(parts)}"
        if numbers and 0 <= min(numbers) < max(numbers) <= 1 and not lengths:
            accuracies.append(key)
    yield f"  components that vary within [0, 1], so that they can be used as an accuracy: {listed(accuracies)}"


def _entries(key: str, results: Sequence[Any], run: Run) -> tuple[Sequence[Any], str]:
    """Return the numbers of a component, and how many each response has if the component is a list."""
    rewards = run.settings.rewards
    is_rubric = key in (rewards.rubrics or ())
    if not is_rubric and key not in (rewards.per_turn or ()):
        return results, ""
    with suppress(TypeError, ValueError, LookupError):  # another finding reports a list that cannot be read
        lists = [json.loads(result) for result in results]
        counts = [len(entries) for entries in lists]
        entries = [entry[0] if is_rubric else entry for entries in lists for entry in entries]
        unit = "criteria per rubric" if is_rubric else "turns per response"
        return entries, f", {min(counts)} to {max(counts)} {unit}"
    return results, ""


def _title(probe: RewardProbe, source: str) -> str:
    return "Ground truths" + (f" of data_source {source}" if len(probe.best_template) > 1 else "")


def reward_of_template(probe: RewardProbe, source: str) -> str:
    """Return what the ground truths of a data source receive in its best template, and which receive less."""
    best, rows = probe.best_template[source], probe.rows[source]
    if best is None:
        return ""
    most = probe.gains(best)
    lower = [row.best for row in rows if _receives_less(probe, row.best, most)]
    text = (
        f"{_title(probe, source)} formatted as `{shortened(best.text)}` receive {_values(probe, best)} in "
        f"{len(rows) - len(lower):,} of {len(rows):,} rows."
    )
    for response in lower[:3]:
        text += (
            f" The ground truth `{shortened(response.text)}` of {response.place} receives {_values(probe, response)}."
        )
    return text


def _receives_less(probe: RewardProbe, response: Response, most: Mapping[str, float]) -> bool:
    """Return whether a response receives less than half of a reward that the best response receives."""
    gains = probe.gains(response)
    return any(2 * gains.get(name, 0.0) < gain for name, gain in most.items())


def _reward_of_no_template(probe: RewardProbe, source: str) -> str:
    """Return what the first ground truth of a data source receives, and the templates that receive no more."""
    row = probe.rows[source][0]
    tried = [response.kind for response in row.from_truth]
    candidates = (*TEMPLATES[:NAMED_TEMPLATES], *probe.custom_templates)
    named = [f"`{template}`" for template in candidates if template in tried]
    others = len(tried) - len(named)
    templates = ", ".join(named)
    if others:
        templates += f" and {others} other templates"
    return (
        f"{_title(probe, source)} receive no more reward than an empty response: `{shortened(row.best.text)}` receives "
        f"{_values(probe, row.best)}, and no template of {templates} receives more."
    )


def _values(probe: RewardProbe, response: Response) -> str:
    return ", ".join(f"{name}={value}" for name, value in probe.values(response).items())
