"""Call the reward function of a run on rows of its data, and collect the results.

verl's own reward manager calls the function. `responses.RewardProbe` says which responses to a row are scored: an empty
one, the ground truth in one or all templates, and for training rows the response in the same line of `--responses`.
`PromptLengths` counts the tokens of the prompts of these rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from operator import methodcaller
from typing import Any

from verl_ext.advantages.table import is_number
from verl_ext.checks.managers import manager_of_verl
from verl_ext.checks.responses import Measure, Response, RewardProbe
from verl_ext.checks.rewards import accuracy_of, named_accuracy, reward_options
from verl_ext.checks.samples import Row, read_responses, sample
from verl_ext.checks.scorer_process import ADDED_BY_ROLLOUT
from verl_ext.checks.scoring import Scorer, ScorerEndedError
from verl_ext.checks.summary import TOOLS
from verl_ext.core.batch import SCORE
from verl_ext.errors import ConfigurationError, DataError, Finding
from verl_ext.files import exit_on_signals
from verl_ext.hooks import temporarily
from verl_ext.run import Run
from verl_ext.run_config import FUNCTION, resolved, select


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
    """Score responses to rows of the training data, and to one row of each data source and file of validation data."""
    _require_options(run, options)
    responses = read_responses(options.responses) if options.responses is not None else []
    texts = ["\n".join(turns) for turns in responses]  # the turns of a session are scored as one text
    training = sample(run.config, "data.train_files", options.rows, stratify=not responses)
    if not training.rows:
        raise DataError("data.train_files has no rows. Name files with rows.")
    validation = sample(run.config, "data.val_files", 1)
    prompts = PromptLengths(run.config)
    prompts.count(training.prompts)
    findings = [*training.findings, *_unused_responses(len(responses), options, len(training.rows))]
    exit_on_signals()  # so that the scorer ends its process
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


def _unused_responses(responses: int, options: argparse.Namespace, rows: int) -> Iterator[Finding]:
    """Yield a note if the file of `--responses` has more responses than training rows were chosen."""
    if responses <= rows:
        return
    fix = f"Set --rows={responses} to score all of them."
    if options.rows > rows:
        fix = "Write one response for each row of the first file of data.train_files, in the same order."
    yield Finding(
        "note",
        f"--responses has {responses:,} responses, but only {rows:,} rows of data.train_files are tried, so the other "
        "responses are not scored.",
        fix,
    )


def _is_expensive(run: Run, scorer: Scorer) -> bool:
    """Return whether a call of the reward function may ask a service, so that few responses are scored."""
    manager = manager_of_verl(run.select)
    may_ask_service = manager is None or manager.needs_service
    return scorer.is_async or may_ask_service or bool(run.select("reward.reward_model.enable"))


def _measures(run: Run) -> dict[str, Measure]:
    """Return the numbers that matter: the named rewards, the accuracy at its threshold, and the score.

    The score is not one of them if an estimator of verl_ext replaces it by named rewards.
    """
    manager = manager_of_verl(run.select)
    added_by_others = (*(manager.components if manager is not None else ()), *ADDED_BY_ROLLOUT)
    rewards = run.settings.rewards
    names = [*(rewards.keys or ())]
    if not names or not run.computes_advantages:
        names.append(SCORE)
    measures: dict[str, Measure] = {name: methodcaller("get", name) for name in names if name not in added_by_others}
    if rewards.accuracy_threshold is not None:
        measures[f"{accuracy_of(run.settings)} above {rewards.accuracy_threshold:g}"] = _accuracy(run)
    return measures


def _accuracy(run: Run) -> Measure:
    """Return the function that reads the accuracy of a result; None if the result has none.

    A run without a named accuracy uses its only key or the score, which may be a reward for the format. A reward
    function of verl_ext says which of its components are accuracies, so the first of them is used here instead.
    """
    rewards = run.settings.rewards
    options = reward_options(run.config)
    declared = [] if options is None else [name for name in options.accuracies if name != SCORE]

    def accuracy(result: Mapping[str, Any]) -> Any:
        name = named_accuracy(run.settings, result)
        if name is None:
            name = declared[0] if declared else rewards.accuracy_in(result)
        value: Any = result.get(name)
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


LIMIT = "data.max_prompt_length"
ENOUGH = 0.9
"""The fraction of prompts within the limit below which a note is printed."""
FIX = f"Raise {LIMIT}, shorten the prompts, or correct the chat template."


class PromptLengths:
    """The numbers of tokens of prompts, if the tokenizer is on this machine; nothing is downloaded."""

    def __init__(self, config: Any) -> None:
        self.limit = select(config, LIMIT)
        self.lengths: list[int] = []
        self.why_not_counted = ""
        """Why the lengths are not known; empty if they are."""
        self.template_raises = False
        if any(select(config, name) for name in TOOLS):
            self.why_not_counted = "they contain the descriptions of tools"
        if self.limit is None:
            self.why_not_counted = f"{LIMIT} is not set"
        if self.why_not_counted:
            return
        model: Any = select(config, "actor_rollout_ref.model")
        self._template_options = resolved(select(config, "data.apply_chat_template_kwargs")) or {}
        self._template_options |= {
            "chat_template": model.get("custom_chat_template"),
            "add_generation_prompt": True,
        }
        path = model.get("tokenizer_path") or model.path
        try:
            self._tokenizer = _local_tokenizer(path, trust_remote_code=bool(model.get("trust_remote_code")))
        except Exception as error:  # noqa: BLE001 - it reads files of others
            self.why_not_counted = f"the tokenizer of {path} is not on this machine ({type(error).__name__})"

    def count(self, prompts: Iterable[list[dict[str, Any]]]) -> None:
        """Count the tokens of prompts."""
        for messages in prompts:
            if self.why_not_counted:
                return
            try:
                tokens = self._tokenizer.apply_chat_template(
                    messages, tokenize=True, return_dict=False, **self._template_options
                )
            except Exception as error:  # noqa: BLE001 - a template is a program
                self.why_not_counted = f"the chat template raises {type(error).__name__}: {error}"
                self.template_raises = True
            else:
                self.lengths.append(len(tokens))

    def summary(self) -> str:
        """Return a sentence about the lengths."""
        if self.why_not_counted or not self.lengths:
            return f"Prompt lengths were not counted, because {self.why_not_counted or 'there are no prompts'}."
        return (
            f"{self._count_within():,} of {len(self.lengths):,} prompts have at most {LIMIT}={self.limit} tokens; the "
            f"longest has {max(self.lengths):,}."
        )

    @property
    def needs_review(self) -> bool:
        """Whether many prompts are too long, or the chat template raises an error."""
        too_few_within_limit = self._count_within() < ENOUGH * len(self.lengths)
        return self.template_raises or too_few_within_limit

    def findings(self) -> list[Finding]:
        """Return the summary as a note if it needs a review."""
        return [Finding("note", self.summary(), FIX)] if self.needs_review else []

    def _count_within(self) -> int:
        return sum(1 for length in self.lengths if length <= self.limit)


def _local_tokenizer(path: str, *, trust_remote_code: bool) -> Any:
    from huggingface_hub import constants
    from transformers import AutoTokenizer

    with temporarily(constants, "HF_HUB_OFFLINE", True):  # otherwise it asks the hub in spite of `local_files_only`
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
