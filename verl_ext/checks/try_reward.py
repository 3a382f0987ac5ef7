"""`verl-ext check --try-reward`: call the reward function of a run on rows of its data, without a model.

`trial.collect` scores responses, `_findings` says what is wrong, and `_summary` returns the lines that are printed.
Without this check, most mistakes in a reward function would be found after the first rollout.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import torch

from verl_ext.advantages.estimator import compute, computing
from verl_ext.advantages.log import record_step_of_verl_estimator
from verl_ext.advantages.table import Table, is_number
from verl_ext.checks.managers import manager_of_verl
from verl_ext.checks.responses import TEMPLATES, Response, RewardProbe, ScoredRow, number_of, shortened
from verl_ext.checks.rewards import named_accuracy
from verl_ext.checks.scorer_process import ADDED_BY_ROLLOUT
from verl_ext.checks.summary import TOOLS
from verl_ext.checks.trial import Trial, collect
from verl_ext.core.batch import LARGEST_REWARD, SCORE
from verl_ext.core.row_index import RowIndex
from verl_ext.core.rubrics import Criteria
from verl_ext.errors import Finding, VerlExtError, listed
from verl_ext.run import Run
from verl_ext.run_config import FILTER, FUNCTION
from verl_ext.settings import ACCURACY_BETWEEN, ANY_REWARD, VerlExtSettings

AGENT, SINGLE_TURN = "actor_rollout_ref.rollout.agent", "single_turn_agent"
NOT_RETURNED = ("reward", ANY_REWARD, ACCURACY_BETWEEN)
"""The metrics of a filter of groups that no reward function returns."""


class SourceResult(NamedTuple):
    """What the ground truths of a data source receive."""

    text: str
    needs_review: bool
    """Whether the text is printed as a note, and not only as a line of the summary."""


def try_reward(run: Run, options: argparse.Namespace, deadline: float) -> tuple[list[str], list[Finding]]:
    """Call the reward function; return a summary and the findings. The calls end at the time `deadline`."""
    trial = collect(run, options, deadline)
    return _summary(trial, run), _findings(trial, run)


def _findings(trial: Trial, run: Run) -> list[Finding]:
    """Return the findings about the data and the reward function."""
    findings = [*trial.findings, *_failures(trial)]
    if trial.training_results:
        findings += _errors_of_first_batch(trial, run)
        findings += _equal_rewards(trial, run)
        findings += _filter_metric(trial, run)
    findings += unrewarded_ground_truths(trial, run)
    findings += constant_rewards(trial, run)
    return [*findings, *trial.prompts.findings(), *_unused_tools(trial, run)]


def _failures(trial: Trial) -> Iterator[Finding]:
    """Report each mistake of the reward function once, with the first response for which it occurred."""
    probe = trial.probe
    total = len({*probe.results, *probe.failed})
    for error in probe.failures.values():
        yield Finding(
            "error",
            f"The reward function cannot score {len(error.where)} of {total} responses, because {error.text}. The "
            f"first of them: {error.where[0]}.",
            error.fix,
        )


def _errors_of_first_batch(trial: Trial, run: Run) -> Iterator[Finding]:
    """Report what would end the run at its first batch, by computing the advantages of the scored responses.

    The responses of a trial have no groups, because they are not samples of a model for a prompt. So the advantages
    have no meaning, and only the errors count.
    """
    if _lacks_what_is_added_later(trial, run):
        return
    run_of_trial = Run(run.name, replace(run.settings, verl_ext=VerlExtSettings()), run.chain)  # writes no dump
    rewards, table = run.settings.rewards, _table_of(trial, run)
    try:
        with computing(run_of_trial, table):
            if run.chain is None:
                record_step_of_verl_estimator(run_of_trial, table)
            else:
                scores = torch.tensor(trial.columns[SCORE], dtype=torch.float64)
                one_token_per_response = torch.ones(len(scores), 1)
                compute(run.name, scores[:, None], one_token_per_response)
        if rewards.accuracy_between is not None:
            table.accuracy()
        rows = [response.place for response in trial.training_results]
        for key in rewards.rubrics or ():  # a rubric has the same criteria for all responses to a row
            Criteria.of(key, rows, trial.columns[key])
    except VerlExtError as error:
        yield Finding("error", str(error), "")
    except Exception as error:  # noqa: BLE001 - a custom step may raise anything
        text = f"The advantages of the scored responses cannot be computed ({type(error).__name__}: {error})."
        yield Finding("error", text, "Correct the step that raises this error.")


def _lacks_what_is_added_later(trial: Trial, run: Run) -> bool:
    """Return whether the reward function does not return something that a run reads, because others may add it.

    Others are a custom reward manager, the rollout, and verl, which adds the fields that custom steps read.
    """
    fields_of_steps = () if run.chain is None else run.chain.needs_fields
    keys = run.settings.rewards.keys or ()
    missing = {*keys, *fields_of_steps} - trial.columns.keys()
    if not missing:
        return False
    added_by_verl = {*ADDED_BY_ROLLOUT, *fields_of_steps}
    return _manager_may_add(run) or not missing.isdisjoint(added_by_verl)


def _table_of(trial: Trial, run: Run) -> Table:
    """Return the scored responses to training rows as a batch of the run, with the responses as labels for errors."""
    responses, columns = list(trial.training_results), trial.columns
    return Table(
        settings=run.settings.rewards,
        row_index=RowIndex.of_padding(np.zeros(len(responses), dtype=bool)),
        labels=[response.where for response in responses],
        results=columns,
        score=np.asarray(torch.tensor(columns[SCORE], dtype=torch.float64)),
        truncated=np.ones(len(responses), dtype=bool),  # so that the number of turns is not compared
    )


def _manager_may_add(run: Run) -> bool:
    """Return whether the run has a custom reward manager, which may add components. The trial does not call it."""
    return manager_of_verl(run.select) is None


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
    for result in _source_results(trial, run):
        if result.needs_review:
            yield Finding("note", result.text, _fix_of_function(run))


def _source_results(trial: Trial, run: Run) -> Iterator[SourceResult]:
    """Yield what the ground truths of each data source receive, and whether that needs a review."""
    probe, can_judge = trial.probe, tried_enough(trial)
    for source, rows in probe.rows.items():
        has_unrewarded_row = any(not probe.gains(row.best) for row in rows)
        needs_review = False
        if source in probe.best_template:
            needs_review = can_judge and has_unrewarded_row
            yield SourceResult(reward_of_template(probe, source), needs_review)
        elif source not in probe.rewarded_by_file:
            needs_review = can_judge
            yield SourceResult(_reward_of_no_template(probe, source), needs_review)
        if can_judge and not needs_review and _is_never_correct(trial, run, source):
            yield SourceResult(_never_correct(probe, source), needs_review=True)


def _is_never_correct(trial: Trial, run: Run, source: str) -> bool:
    """Return whether no response to a training row of a data source is correct, although it should be.

    A response should be correct if another data source has a correct one. If none has, a response should be correct if
    the accuracy is named: a score that named rewards replace may be a constant on purpose. An accuracy that is also a
    reward and the same for all responses is left to `constant_rewards`.
    """
    probe, results = trial.probe, trial.training_results
    accuracies = [probe.accuracy(result) for response, result in results.items() if response.data_source == source]
    if all(number_of(accuracy) is None for accuracy in accuracies):  # NaN means that the accuracy is not scored
        return False
    correct_sources = {response.data_source for response in results if probe.gain(response, probe.accuracy) > 0}
    if correct_sources:
        return source not in correct_sources
    name = named_accuracy(run.settings, trial.columns)
    score_may_be_constant_on_purpose = name is None or name not in trial.columns
    values = {str(probe.accuracy(result)) for result in probe.results.values()}
    is_reported_as_constant = name in probe.measures and len(values) == 1
    return not score_may_be_constant_on_purpose and not is_reported_as_constant


def _never_correct(probe: RewardProbe, source: str) -> str:
    """Return a sentence with the first ground truth of a data source that is never correct."""
    best = probe.rows[source][0].best
    return (
        f"{_title(probe, source)} are never correct, although another reward is received: `{shortened(best.text)}` of "
        f"{best.place} receives {_values(probe, best)}."
    )


def constant_rewards(trial: Trial, run: Run) -> Iterator[Finding]:
    """Yield a note for each reward that is the same for all responses, if another reward is received."""
    probe = trial.probe
    is_any_rewarded = probe.best_template or probe.rewarded_by_file
    if not is_any_rewarded or not tried_enough(trial):
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


def _summary(trial: Trial, run: Run) -> list[str]:
    """Return lines about the components, the templates that are rewarded, and the prompts.

    What needs a review is a note, so it is not a line as well.
    """
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
    lines += [result.text for result in _source_results(trial, run) if not result.needs_review]
    if not trial.prompts.needs_review:
        lines.append(trial.prompts.summary())
    return lines


def _components(columns: Mapping[str, Sequence[Any]], run: Run) -> Iterator[str]:
    """Yield the type and the range of each component."""
    accuracies = []
    for key, results in columns.items():
        values, lengths = _entries(key, results, run)
        numbers = [float(value) for value in values if is_number(value) and abs(value) <= LARGEST_REWARD]
        types = sorted({type(value).__name__ for value in values})
        facts = [" or ".join(types), lengths]
        if numbers:
            facts.append(f"{min(numbers):g} to {max(numbers):g}")
        others = len(values) - len(numbers)
        if others:
            facts.append(f"{others} are NaN, missing or not a number")
        yield f"  {key}: {', '.join(fact for fact in facts if fact)}"
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
        return entries, f"{min(counts)} to {max(counts)} {unit}"
    return results, ""


def _title(probe: RewardProbe, source: str) -> str:
    return "Ground truths" + (f" of data_source {source}" if len(probe.rows) > 1 else "")


def reward_of_template(probe: RewardProbe, source: str) -> str:
    """Return what the ground truths of a data source receive in its best template, in how many rows, and in which not.

    A reward may depend on the ground truth, for example on its length. So a row counts if it receives at least half of
    what the best one gains over an empty response.
    """
    best, rows = probe.best_template[source], probe.rows[source]
    in_template = [row.in_template(best.kind) for row in rows]
    values_of_best, gains_of_best = _values(probe, best), probe.gains(best)
    lower: list[ScoredRow] = []
    values_received = set()
    for row, response in zip(rows, in_template, strict=True):
        if response is None or _receives_less(probe, response, gains_of_best):
            lower.append(row)
        else:
            values_received.add(_values(probe, response))
    varies = values_received != {values_of_best}
    or_less = ", or at least half of this gain over an empty response," if varies else ""
    text = (
        f"{_title(probe, source)} formatted as `{shortened(best.text)}` receive {values_of_best}{or_less} in "
        f"{len(rows) - len(lower):,} of {len(rows):,} rows."
    )
    for row in lower[:3]:
        text += (
            f" The ground truth `{shortened(row.best.text)}` of {row.best.place} receives {_values(probe, row.best)}."
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
    well_known_templates = (*TEMPLATES[:3], *probe.custom_templates)
    named = [f"`{template}`" for template in well_known_templates if template in tried]
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
