"""Call the reward function of a run on rows of its data, and collect the results.

verl's own reward manager calls the function. For each row it scores a response made from the ground truth in the
template that the function reads, an empty response, and the response in the same line of `--responses`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from operator import methodcaller
from typing import Any

from verl_ext.advantages.table import is_number
from verl_ext.checks.prompts import PromptLengths
from verl_ext.checks.responses import Measure, Response, RewardProbe
from verl_ext.checks.rewards import ADDED_BY_MANAGER, accuracy_of, reward_options
from verl_ext.checks.samples import Row, read_responses, sample
from verl_ext.checks.scoring import ADDED_BY_ROLLOUT, IN_PROCESS, MANAGER, Scorer, ScorerEndedError
from verl_ext.core.batch import SCORE
from verl_ext.errors import ConfigurationError, DataError, Finding
from verl_ext.run import Run
from verl_ext.run_config import FUNCTION
from verl_ext.settings import ACCURACY


@dataclass
class Trial:
    """The rows of data that were chosen, and the responses to them that were scored."""

    probe: RewardProbe
    training_rows: dict[str, Row]
    validation_rows: dict[str, Row]
    prompts: PromptLengths
    requested_rows: int
    has_responses_of_file: bool
    findings: list[Finding]
    """What is wrong with the data, and why the trial ended before its end."""

    @property
    def training_results(self) -> dict[Response, dict[str, Any]]:
        """The results of the responses to rows of `data.train_files`."""
        return {response: result for response, result in self.probe.results.items() if response.is_training}

    @property
    def columns(self) -> dict[str, list[Any]]:
        """The components of `training_results`, each with one value per response."""
        results = self.training_results.values()
        names = dict.fromkeys(name for result in results for name in result)
        return {name: [result.get(name) for result in results] for name in names}


def collect(run: Run, options: argparse.Namespace, deadline: float) -> Trial:
    """Score responses to rows of the training data, and to a row of each file of the validation data."""
    _require_options(run, options)
    responses = read_responses(options.responses) if options.responses is not None else []
    texts = ["\n".join(turns) for turns in responses]
    training = sample(run.config, "data.train_files", options.rows, stratify=not responses)
    if not training.rows:
        raise DataError("data.train_files has no rows. Name files with rows.")
    validation = sample(run.config, "data.val_files", 1)
    prompts = PromptLengths(run.config)
    prompts.count(training.prompts)
    findings = [*training.findings]
    with closing(Scorer(run.config, options.seconds, deadline, accepts_nan=run.chain is not None)) as scorer:
        is_expensive = _is_expensive(run, scorer)
        probe = RewardProbe(scorer, _measures(run), _accuracy(run), options.answer_template, is_expensive=is_expensive)
        try:
            for number, (place, row) in enumerate(training.rows.items()):
                probe.score_row(place, row, texts[number : number + 1], is_training=True)
            for place, row in validation.rows.items():
                probe.score_row(place, row, [], is_training=False)
            findings += _random_function(probe)
        except ScorerEndedError as error:
            findings.append(Finding("error", str(error), ""))
    return Trial(
        probe=probe,
        training_rows=training.rows,
        validation_rows=validation.rows,
        prompts=prompts,
        requested_rows=options.rows,
        has_responses_of_file=bool(responses),
        findings=findings,
    )


def _require_options(run: Run, options: argparse.Namespace) -> None:
    """Raise if a reward model scores the run, or if an option cannot be used."""
    if options.rows < 1:
        raise ConfigurationError(
            f"--rows={options.rows} selects no rows of data.train_files. Set --rows to at least 1."
        )
    if run.select("reward.reward_model.enable") and run.select(f"{FUNCTION}.path") is None:
        raise ConfigurationError(
            f"This run is scored by a reward model, which cannot be tried here. Set {FUNCTION}.path=FILE to try or "
            "rehearse the run with a function."
        )
    for template in options.answer_template:
        if "{}" not in template:
            raise ConfigurationError(
                f"--answer-template={template!r} has no {{}}. Write {{}} where the ground truth is inserted."
            )


def _is_expensive(run: Run, scorer: Scorer) -> bool:
    """Return whether a call of the reward function may ask a service, so that few responses are scored."""
    has_own_manager = run.select(f"{MANAGER}.name") not in IN_PROCESS
    return scorer.is_async or has_own_manager or bool(run.select("reward.reward_model.enable"))


def _measures(run: Run) -> dict[str, Measure]:
    """Return the numbers that matter: the named rewards, the accuracy at its threshold, and the score."""
    added = (*ADDED_BY_MANAGER.get(run.select(f"{MANAGER}.name"), ()), *ADDED_BY_ROLLOUT)
    rewards = run.settings.rewards
    names = [*(rewards.keys or ())]
    if not names or not run.computes_advantages:
        names.append(SCORE)
    measures: dict[str, Measure] = {name: methodcaller("get", name) for name in names if name not in added}
    if rewards.accuracy_threshold is not None:
        measures[f"{accuracy_of(run.settings)} above {rewards.accuracy_threshold:g}"] = _accuracy(run)
    return measures


def _accuracy(run: Run) -> Measure:
    """Return the function that reads the accuracy of a result; None if the result has none."""
    rewards = run.settings.rewards
    options = reward_options(run.config)
    of_function = [] if options is None else [name for name in options.accuracies if name != SCORE]
    only_key = rewards.keys[0] if rewards.keys and len(rewards.keys) == 1 else SCORE
    candidates = [rewards.accuracy_key] if rewards.accuracy_key else [ACCURACY, *of_function, only_key]

    def accuracy(result: Mapping[str, Any]) -> Any:
        value: Any = next((result[name] for name in candidates if name in result), None)
        if rewards.accuracy_threshold is None or not is_number(value):
            return value
        return value > rewards.accuracy_threshold

    return accuracy


def _random_function(probe: RewardProbe) -> Iterator[Finding]:
    """Yield a note if the reward function scores the first response otherwise when it is called again."""
    differences = probe.differences_when_repeated()
    if differences:
        response = next(iter(probe.results))
        values = ", ".join(f"{name}={before} and {name}={after}" for name, (before, after) in differences.items())
        yield Finding(
            "note",
            f"The reward function is not deterministic. Scored twice, {response.where}, received {values}. A resumed "
            "run will not repeat the same numbers.",
            "Remove randomness and state from the reward function, if that was not intended.",
        )
