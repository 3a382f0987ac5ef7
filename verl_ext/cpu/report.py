"""Report the stages of a rehearsal from the log, metrics and files of its two runs.

Each `report_*` function yields lines about one stage. A line has the stage, its state and a text.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import verl_ext
from verl_ext.checks.on_cpu import TRAINER_MODE
from verl_ext.checks.samples import sample
from verl_ext.cpu import progress
from verl_ext.errors import ConfigurationError, explaining_errors, listed
from verl_ext.files import METRICS, json_lines
from verl_ext.run_config import select

ERROR, NOTE, OK = "error", "note", "ok"
"""The states of a stage, with which its line begins."""
Line = tuple[str, str, str]
"""The stage, its state, and the text of a printed line."""
STEPS = 3
"""The steps of a rehearsal. It saves after the one before the last, and repeats the last one in a resumed run."""
CHAT_TEMPLATE = "actor_rollout_ref.model.custom_chat_template"
AGENT_LOOP = "actor_rollout_ref.rollout.agent.default_agent_loop"
MULTI_TURN = "actor_rollout_ref.rollout.multi_turn.enable"
USE_RESPONSES = "Use --responses FILE with responses whose rewards differ within each prompt."
CHANGE_RESPONSES = "Change the responses of --responses so that their rewards differ within each prompt."
RAY_PREFIX = re.compile(r"^(?:\x1b\[\d+m)*\(\w+ pid=[^)]*\)(?:\x1b\[\d+m)* ?", re.M)
"""The prefix that Ray adds to a line of a worker."""
RAY_ERROR = "ray.exceptions.(?:RayTaskError|ActorDiedError)"
EXCEPTION = re.compile(rf"^(?!{RAY_ERROR})[\w.]*(?:Error|Exception|Exit)(?::.*)?$", re.M)
"""The last line of a traceback, except for Ray's own errors, which repeat another one."""
LIBRARY_FILE = rf"{re.escape(verl_ext.__path__[0])}/|.*(?:site-packages|lib(?:64)?/python\d|verl/verl/)"
USER_FRAME = re.compile(rf'^ +File "(?!{LIBRARY_FILE})([^"<]+[.]py)", line (\d+)', re.M)
"""In a traceback, a line of the user's code."""
TOOL_ERROR = re.compile("(?:Error executing tool|Unknown function|Invalid JSON in arguments for) '.*")
"""A line of verl's log about a tool call that failed."""


class FinishedRun:
    """The log, metrics and files of a run that has ended; the status is None if it reached its time limit."""

    def __init__(self, folder: Path, status: int | None, seconds: float) -> None:
        self.folder, self.status, self.seconds = folder, status, seconds
        log = (folder / "log.txt").read_text(encoding="utf-8", errors="replace")
        self.log = RAY_PREFIX.sub("", log.replace("\r", "\n"))
        (folder / METRICS).touch()
        self.steps = {row["step"]: row["data"] for row in json_lines(folder / METRICS) if row}
        self.has_started = (folder / progress.STARTED).exists()
        self.has_trained_two_steps = (folder / "checkpoints/global_step_2").exists()
        self.has_saved = (folder / "checkpoints/latest_checkpointed_iteration.txt").exists()
        self.is_complete = status == 0 and STEPS in self.steps

    def failure(self, when: str) -> str:
        """Say that the run ended before it had completed a stage, with the first error of its log."""
        if self.status is None:
            text = f"The time limit --minutes ended the run {when}. {self.first_error()}"
            return f"{text} Use a larger --minutes if the log shows that the run was only slow."
        return f"verl ended with exit status {self.status} {when}. {self.first_error()}"

    def first_error(self) -> str:
        """Say which error is the first of the log, which line of the user's code raised it, and where the log is."""
        text = "The log contains no error."
        error = EXCEPTION.search(self.log)
        if error:
            frames = USER_FRAME.findall(self.log[: error.start()])
            line = ""
            if frames:
                file, number = frames[-1]
                line = f" ({file}:{number})"
            text = f"The first error is {error[0].rstrip('.')}{line}."
        return f"{text} The log is {self.folder}/log.txt."

    def prompts(self) -> tuple[int, int] | None:
        """Return the number of training prompts before and after filtering.

        Return None if verl has not read the data, or if a custom dataset class did not record the numbers.
        """
        file = self.folder / progress.PROMPTS
        if not file.exists():
            return None
        total, kept = file.read_text(encoding="utf-8").split()[:2]
        return int(total), int(kept)


def counted(number: int, noun: str) -> str:
    """Write a number with its noun.

    >>> counted(1, "note"), counted(0, "note")
    ('1 note', '0 notes')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def report_settings(user: Any, left_out: list[str]) -> Iterator[Line]:
    """Report what the user's run has on and the rehearsal leaves out."""
    for setting in left_out:
        yield "settings", NOTE, f"The rehearsal does not cover {setting}."
    if select(user, TRAINER_MODE) == "separate_async":
        text = f"The rehearsal runs {TRAINER_MODE}=colocate_async instead of separate_async"
        yield "settings", NOTE, f"{text}, because verl's checkpoint engines for separate_async need a GPU."


def report_prompt(user: Any, tokenizer: Any, template: Any) -> Iterator[Line]:
    """Report messages of the first prompt that are missing in its text."""
    (row,) = sample(user, "data.train_files", 1, stratify=False).rows.values()
    messages = row[user.data.prompt_key]
    settings = user.data.get("apply_chat_template_kwargs") or {}
    fix = f"Set {CHAT_TEMPLATE} to a template that accepts the messages of the first row of data.train_files."
    with explaining_errors("The tokenizer's chat template", ConfigurationError, "applied", fix):
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, chat_template=template, **settings)
    dropped_roles = []
    for message in messages:
        content = str(message["content"] or "").strip()
        if content not in prompt:
            dropped_roles.append(message["role"])
    if dropped_roles:
        text = (
            f"The tokenizer's chat template drops messages of the first prompt, with the roles {listed(dropped_roles)}."
        )
        yield "prompt", NOTE, f"{text} Set {CHAT_TEMPLATE} to a template that keeps them, or remove them from the data."


def report_tools(user: Any, template: Any, *, has_responses: bool) -> Iterator[Line]:
    """Report reasons why no response can call a tool, if the user's run has tools."""
    if not select(user, MULTI_TURN):
        return
    if "tools" not in str(template):
        text = "No prompt shows the tools to the model, because the tokenizer's chat template does not read `tools`."
        yield "tools", NOTE, f"{text} Set {CHAT_TEMPLATE} to a template that reads `tools`."
    if not has_responses:
        text = "A model with random weights calls no tools."
        yield "tools", NOTE, f"{text} Use --responses FILE with responses that call them."


class Stage(NamedTuple):
    """A stage of the uninterrupted run."""

    name: str
    is_reached: bool
    text: str
    """What to report if the run has reached the stage."""
    when: str
    """Otherwise, when the run ended."""


def report_training(run: FinishedRun, user: Any, *, has_responses: bool = False) -> Iterator[Line]:
    """Report the stages of the uninterrupted run, up to the first that it did not complete."""
    yield from report_failed_responses(run)
    data_text, fills_batch = _describe_data(run, user.data)
    if not fills_batch:
        fix = "Set a smaller data.train_batch_size, or a larger data.max_prompt_length if prompts are too long."
        yield "data", ERROR, f"{data_text} They do not fill a batch. {fix}"
        return
    for stage in _stages_of_training(run, data_text):
        if stage.is_reached:
            yield stage.name, OK, stage.text
            continue
        yield stage.name, ERROR, run.failure(stage.when)
        if run.status is None and user.algorithm.filter_groups.enable:
            text = "algorithm.filter_groups.enable=True drops groups with equal scores, so a batch may never fill."
            yield stage.name, NOTE, f"{text} {CHANGE_RESPONSES if has_responses else USE_RESPONSES}"
        return


def _describe_data(run: FinishedRun, data: Any) -> tuple[str, bool]:
    """Say how many prompts verl keeps, and return whether they fill a batch of the user's run."""
    prompts = run.prompts()
    if prompts is None:
        return "verl read the data.", True
    total, kept = prompts
    names = ("max_prompt_length", "filter_overlong_prompts", "train_batch_size")
    settings = ", ".join(f"data.{name}={data[name]}" for name in names)
    return f"verl keeps {kept} of {total} prompts ({settings}).", kept >= data.train_batch_size


def _stages_of_training(run: FinishedRun, data_text: str) -> list[Stage]:
    """Return the stages in the order in which a run reaches them."""
    has_read_data = run.has_started or run.prompts() is not None
    first_step = "Step 1 is done."
    end_of_first_steps = "before the end of step 1"
    if 1 in run.steps:
        scores = "The scores range from {critic/score/min:g} to {critic/score/max:g}, mean {critic/score/mean:.3g}."
        first_step += " " + scores.format(**run.steps[1])
        end_of_first_steps = "after step 1, before the end of step 2"
    whole_run = f"3 steps took {run.seconds:.0f} s."
    return [
        Stage("data", has_read_data, data_text, "before it started Ray and read the data"),
        Stage(
            "start",
            run.has_started,
            "The models, the engine and the rollout started.",
            "before models and rollout had started",
        ),
        Stage("train", run.has_trained_two_steps, first_step, end_of_first_steps),
        Stage("save", run.has_saved, "Step 2 was saved.", "before the checkpoint of step 2 was complete"),
        Stage("train", run.is_complete, whole_run, "before it completed all 3 steps"),
    ]


def report_responses(run: FinishedRun, user: Any, *, has_responses: bool) -> Iterator[Line]:
    """Report what is unusual in the responses of all steps; `has_responses` says whether --responses gives them."""
    steps = list(run.steps.values())
    if not steps:
        return
    calls_tool = any(step.get("num_turns/max", 0) > 2 for step in steps)
    if select(user, MULTI_TURN) and has_responses and not calls_tool:
        text = f"No response called a tool with {AGENT_LOOP}={select(user, AGENT_LOOP)}."
        text += " A row with its own agent_name does not use this setting."
        fix = "Set the agent loop to one that calls tools, such as tool_agent."
        yield "tools", NOTE, f"{text} {fix} Use --responses FILE with responses that call a tool."
    if all(step["critic/advantages/min"] == step["critic/advantages/max"] == 0 for step in steps):
        fix = USE_RESPONSES
        if has_responses:
            fix = "Check the reward function: `verl-ext check --try-reward` prints the reward of the ground truths."
        yield "groups", NOTE, f"Every advantage is 0, because all responses to a prompt have the same reward. {fix}"
    limit = user.data.max_response_length
    if has_responses and all(step["response_length/min"] >= limit for step in steps):
        text = f"All responses are truncated at data.max_response_length={limit}."
        yield "responses", NOTE, f"{text} Set a larger data.max_response_length."


def report_failed_responses(run: FinishedRun) -> Iterator[Line]:
    """Report errors that do not end a run: those of single responses, whose prompts verl drops, and those of tools."""
    failed_responses = run.log.count("Error in _run_prompt")
    if failed_responses:
        stage = "reward" if "ray::RewardLoopWorker" in run.log else "rollout"
        responses = counted(failed_responses, "response")
        text = f"verl drops the prompt of a response that raises an error, here of {responses}."
        yield stage, ERROR, f"{text} {run.first_error()}"
    messages = TOOL_ERROR.findall(run.log)
    if messages:
        text = (
            f"{counted(len(messages), 'tool call')} failed. verl returns the error message to the model and continues."
        )
        yield "tools", NOTE, f"{text} The first message is: {messages[0]}"


def report_resumed_run(
    resumed: FinishedRun, uninterrupted: FinishedRun, user: Any, *, has_responses: bool = False
) -> Iterator[Line]:
    """Report whether the resumed run repeats the last step of the uninterrupted one, and validates."""
    if not (resumed.is_complete or resumed.has_saved):
        yield "resume", ERROR, resumed.failure("while it resumed from step 2")
        return
    yield "resume", OK, f"The run resumed from step 2. It took {resumed.seconds:.0f} s."
    if not resumed.is_complete:
        # Errors before the last save did not end the run.
        resumed.log = resumed.log.rpartition("global_step_3")[2]
        yield "validate", ERROR, resumed.failure("while it validated on data.val_files")
        return
    yield from report_failed_responses(resumed)
    yield compare_last_steps(resumed.steps[STEPS], uninterrupted.steps[STEPS], user, has_responses=has_responses)
    scores = [f"{name}={value:g}" for name, value in resumed.steps[STEPS].items() if name.startswith("val-core")]
    yield "validate", OK, f"The validation metrics are {', '.join(scores)}." if scores else "The validation ended."


def compare_last_steps(
    resumed: dict[str, float], uninterrupted: dict[str, float], user: Any, *, has_responses: bool
) -> Line:
    """Compare the metrics of the last step of both runs."""
    state, text = OK, "After resuming, step 3 matches step 3 of the uninterrupted run."
    names = differing_metrics(resumed, uninterrupted)
    if names:
        text = f"After resuming, step 3 differs from step 3 of the uninterrupted run in {', '.join(names)}."
        if _repeats_exactly(user):
            state = ERROR
            text += " Either the saved state is incomplete, or the reward function is not deterministic."
            text += " Run `verl-ext check --try-reward`, which scores a response twice."
        else:
            state = NOTE
            text += " Tools and asynchronous trainers can cause such differences."
    if uninterrupted.get("actor/grad_norm") == 0:
        state = NOTE if state == OK else state
        fix = CHANGE_RESPONSES if has_responses else USE_RESPONSES
        text += f" Its actor/grad_norm is 0, so this comparison proves little. {fix}"
    return "repeat", state, text


def differing_metrics(resumed: dict[str, float], uninterrupted: dict[str, float]) -> list[str]:
    """Return the names of metrics with other values in the resumed run, except for times. NaN equals NaN."""
    names = []
    for name, value in uninterrupted.items():
        is_time = "perf/" in name or "timing" in name
        resumed_value = resumed.get(name, np.inf)
        if not is_time and not np.isclose(value, resumed_value, rtol=1e-3, atol=1e-6, equal_nan=True):
            names.append(name)
    return names


def _repeats_exactly(user: Any) -> bool:
    """Return whether a step of the user's run is deterministic.

    Tools may return something else, and asynchronous trainers take other prompts.
    """
    has_one_turn = select(user, AGENT_LOOP) == "single_turn_agent"
    is_synchronous = select(user, TRAINER_MODE) in (None, "sync")
    return has_one_turn and is_synchronous
