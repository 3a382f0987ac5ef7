"""`verl-ext rehearse`: train, save, resume and validate a scaled-down copy of a run on the CPU, and report each stage.

It takes the arguments of `python -m verl.trainer.main_ppo`, and runs verl's pipeline with the user's data, tokenizer,
tools, reward function and estimator. The models are small and have random weights. The report is made from verl's log
and metrics, which are kept in the folder `rehearsal` of `trainer.default_local_dir`. The exit status is 1 if a stage
failed.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from omegaconf import OmegaConf

import verl_ext
from verl_ext.checks.command import check
from verl_ext.checks.configuration import composed
from verl_ext.checks.samples import sample
from verl_ext.cpu import session
from verl_ext.cpu.miniature import make_model, rehearsed
from verl_ext.cpu.patches import REHEARSAL
from verl_ext.errors import ConfigurationError, explaining_errors, listed
from verl_ext.files import METRICS, json_lines, say
from verl_ext.run_config import select

ERROR, NOTE, OK = "error", "note", "ok"
"""The states of a stage, with which its line begins."""
Line = tuple[str, str, str]
"""The stage, its state, and the text of a printed line."""
CHAT_TEMPLATE = "actor_rollout_ref.model.custom_chat_template"
AGENT_LOOP = "actor_rollout_ref.rollout.agent.default_agent_loop"
USE_RESPONSES = "Use --responses FILE with responses whose rewards differ within each prompt."
CHANGE_RESPONSES = "Change the responses of --responses so that their rewards differ within each prompt."
WORKER = re.compile(r"^(?:\x1b\[\d+m)*\(\w+ pid=[^)]*\)(?:\x1b\[\d+m)* ?", re.M)
"""The prefix that Ray adds to a line of a worker."""
OF_RAY = "ray.exceptions.(?:RayTaskError|ActorDiedError)"
EXCEPTION = re.compile(rf"^(?!{OF_RAY})[\w.]*(?:Error|Exception|Exit)(?::.*)?$", re.M)
"""The last line of a traceback, except for Ray's own errors, which repeat another one."""
OTHERS = rf"{re.escape(verl_ext.__path__[0])}/|.*(?:site-packages|lib(?:64)?/python\d|verl/verl/)"
FRAME = re.compile(rf'^ +File "(?!{OTHERS})([^"<]+[.]py)", line (\d+)', re.M)
"""In a traceback, a line of the user's code."""
MARKER = "verl_ext.rehearsal"
"""A file in the folder of a rehearsal. A folder that contains it may be emptied. It is locked during a rehearsal."""


def rehearse(options: argparse.Namespace) -> int:
    """Check the run, rehearse it unless it is rejected, and print a line for each stage; return 1 if one failed."""
    until = time.monotonic() + 60 * options.minutes
    if check(argparse.Namespace(**vars(options), try_reward=options.rows > 0, strict=False), deadline=until):
        return 1
    states = []
    for stage, state, text in _stages(options, until):
        say(f"{state:5}  {stage}: {text}")
        states.append(state)
    failed = ERROR in states
    result = "failed" if failed else "passed"
    say(f"The rehearsal {result}. The lines above contain {counted(states.count(NOTE), 'note')}.")
    return int(failed)


def counted(number: int, noun: str) -> str:
    """Write a number with its noun.

    >>> counted(1, "note"), counted(0, "note")
    ('1 note', '0 notes')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _stages(options: argparse.Namespace, until: float) -> Iterator[Line]:
    with composed(options) as user:
        from verl.trainer.ppo.utils import need_critic

        folder = Path(user.trainer.default_local_dir).resolve() / "rehearsal"
        lock = emptied(folder)
        tokenizer = make_model(user, "actor_rollout_ref.model", folder / "model")
        if need_critic(user):
            make_model(user, "critic.model", folder / "critic")
        config, left_out = rehearsed(user, folder, options.responses)
    yield from (("settings", NOTE, f"The rehearsal does not cover {setting}.") for setting in left_out)
    template = user.actor_rollout_ref.model.get("custom_chat_template") or tokenizer.chat_template
    tools = select(user, "actor_rollout_ref.rollout.multi_turn.enable")
    if tools and "tools" not in str(template):
        text = "No prompt shows the tools to the model, because the tokenizer's chat template does not read `tools`."
        yield "tools", NOTE, f"{text} Set {CHAT_TEMPLATE} to a template that reads `tools`."
    if tools and not options.responses:
        text = "A model with random weights calls no tools."
        yield "tools", NOTE, f"{text} Use --responses FILE with responses that call them."
    if options.rows > 0:
        yield from of_prompt(user, tokenizer, template)
    yield "runs", OK, f"Two runs follow, of a few minutes each. Their logs are in {folder}."
    with lock:
        whole = start(folder / "train", config, until)
        given = options.responses is not None
        yield from of_training(whole, user, given=given)
        yield from of_responses(whole, user, given=given)
        if whole.done:
            config.trainer.update(test_freq=3, resume_mode="resume_path")
            config.trainer.resume_from_path = str(whole.folder / "checkpoints/global_step_2")
            yield from of_resume(start(folder / "resume", config, until), whole, user, given=given)


def of_prompt(user: Any, tokenizer: Any, template: Any) -> Iterator[Line]:
    """Report messages of the first prompt that are missing in its text."""
    (row,) = sample(user, "data.train_files", 1, stratify=False).rows.values()
    messages, words = row[user.data.prompt_key], user.data.get("apply_chat_template_kwargs") or {}
    fix = f"Set {CHAT_TEMPLATE} to a template that accepts the messages of the first row of data.train_files."
    with explaining_errors("The tokenizer's chat template", ConfigurationError, "applied", fix):
        text = tokenizer.apply_chat_template(messages, tokenize=False, chat_template=template, **words)
    if lost := [message["role"] for message in messages if str(message["content"] or "").strip() not in text]:
        text = f"The tokenizer's chat template drops messages of the first prompt, with the roles {listed(lost)}."
        yield "prompt", NOTE, f"{text} Set {CHAT_TEMPLATE} to a template that keeps them, or remove them from the data."


def emptied(folder: Path) -> TextIO:
    """Empty the folder of the last rehearsal; return its marker, which is locked until it is closed.

    Raise if the folder was not created by a rehearsal, or if another rehearsal is running in it.
    """
    fix = "Set trainer.default_local_dir to a folder that can be written."
    with explaining_errors(f"The folder {folder} of trainer.default_local_dir", ConfigurationError, "written", fix):
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()) and not (folder / MARKER).exists():
            raise ConfigurationError(
                f"{folder} was not created by rehearse and would be deleted. Move it, or set another "
                "trainer.default_local_dir."
            )
        lock = (folder / MARKER).open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise ConfigurationError(
                f"Another rehearsal is running in {folder}. Wait for its end, or set another trainer.default_local_dir."
            ) from None
        for left in ("model", "critic", "train", "resume"):
            if (folder / left).exists():
                shutil.rmtree(folder / left)
    return lock


class Rehearsal:
    """The log, metrics and files of a run that has ended; the status is None if it reached its time limit."""

    def __init__(self, folder: Path, status: int | None, seconds: float) -> None:
        self.folder, self.status, self.seconds = folder, status, seconds
        log = (folder / "log.txt").read_text(encoding="utf-8", errors="replace")
        self.log = WORKER.sub("", log.replace("\r", "\n"))
        (folder / METRICS).touch()
        self.steps = {row["step"]: row["data"] for row in json_lines(folder / METRICS) if row}
        self.done = status == 0 and 3 in self.steps
        self.saved = (folder / "checkpoints/latest_checkpointed_iteration.txt").exists()

    def failure(self, when: str) -> str:
        """Say that the run ended before it had completed a stage, with the first error of its log."""
        if self.status is None:
            text = f"The time limit --minutes ended the run {when}. {self.first_error()}"
            return f"{text} Use a larger --minutes if the log shows that the run was only slow."
        return f"verl ended with exit status {self.status} {when}. {self.first_error()}"

    def first_error(self) -> str:
        """Say which error is the first of the log, which line of the user's code raised it, and where the log is."""
        text = "The log contains no error."
        if error := EXCEPTION.search(self.log):
            frames = FRAME.findall(self.log[: error.start()])
            place = " ({}:{})".format(*frames[-1]) if frames else ""
            text = f"The first error is {error[0].rstrip('.')}{place}."
        return f"{text} The log is {self.folder}/log.txt."


def start(folder: Path, config: Any, until: float) -> Rehearsal:
    """Start verl's entry point with this configuration, and wait for its end, at most until this time of the clock."""
    folder.mkdir()
    variables = config.ray_kwargs.ray_init.runtime_env.env_vars
    variables.update({"VERL_FILE_LOGGER_PATH": str(folder / METRICS), REHEARSAL: str(folder)})
    config.trainer.default_local_dir = str(folder / "checkpoints")
    OmegaConf.save(config, folder / "run.yaml")
    command = [sys.executable, "-u", "-m", "verl.trainer.main_ppo", f"--config-path={folder}", "--config-name=run"]
    command += [f"hydra.run.dir='{folder}'", "hydra.output_subdir=null"]
    begin = time.monotonic()
    with (folder / "log.txt").open("w") as log:
        known = {**os.environ, **{name: str(value) for name, value in variables.items()}}
        status = session.run(command, until - begin, stdout=log, stderr=log, env=known)
    return Rehearsal(folder, status, time.monotonic() - begin)


def of_training(run: Rehearsal, user: Any, *, given: bool = False) -> Iterator[Line]:
    """Report the stages of the uninterrupted run, up to the first that it did not complete."""
    yield from of_sessions(run)
    started, data = (run.folder / "started").exists(), user.data
    file, prompts = run.folder / "prompts", "verl read the data."
    if file.exists():  # a custom dataset class may not write it
        total, left = map(int, file.read_text(encoding="utf-8").split()[:2])
        names = ("max_prompt_length", "filter_overlong_prompts", "train_batch_size")
        settings = ", ".join(f"data.{name}={data[name]}" for name in names)
        prompts = f"verl keeps {left} of {total} prompts ({settings})."
        if left < data.train_batch_size:
            fix = "Set a smaller data.train_batch_size, or a larger data.max_prompt_length if prompts are too long."
            yield "data", ERROR, f"{prompts} They do not fill a batch. {fix}"
            return
    scores, first_steps = "Step 1 is done.", "before the end of step 1"
    if step := run.steps.get(1):
        scores += " The scores range from {critic/score/min:g} to {critic/score/max:g}, mean {critic/score/mean:.3g}."
        scores, first_steps = scores.format(**step), "after step 1, before the end of step 2"
    for stage, reached, text, when in (
        ("data", started or file.exists(), prompts, "before it started Ray and read the data"),
        ("start", started, "The models, the engine and the rollout started.", "before models and rollout had started"),
        ("train", (run.folder / "checkpoints/global_step_2").exists(), scores, first_steps),
        ("save", run.saved, "Step 2 was saved.", "before the checkpoint of step 2 was complete"),
        ("train", run.done, f"3 steps took {run.seconds:.0f} s.", "before it completed all 3 steps"),
    ):
        yield stage, OK if reached else ERROR, text if reached else run.failure(when)
        if not reached:
            if run.status is None and user.algorithm.filter_groups.enable:
                text = "algorithm.filter_groups.enable=True drops groups with equal scores, so a batch may never fill."
                yield stage, NOTE, f"{text} {CHANGE_RESPONSES if given else USE_RESPONSES}"
            return


def of_responses(run: Rehearsal, user: Any, *, given: bool) -> Iterator[Line]:
    """Report what is unusual in the responses of all steps; `given` says whether they come from --responses."""
    steps, limit = run.steps.values(), user.data.max_response_length
    tools = select(user, "actor_rollout_ref.rollout.multi_turn.enable")
    if tools and given and steps and all(step.get("num_turns/max", 0) <= 2 for step in steps):
        text = f"No response called a tool with {AGENT_LOOP}={select(user, AGENT_LOOP)}."
        text += " A row with its own agent_name does not use this setting."
        fix = "Set the agent loop to one that calls tools, such as tool_agent."
        yield "tools", NOTE, f"{text} {fix} Use --responses FILE with responses that call a tool."
    if steps and all(step["critic/advantages/min"] == step["critic/advantages/max"] == 0 for step in steps):
        fix = USE_RESPONSES
        if given:
            fix = "Check the reward function: `verl-ext check --try-reward` prints the reward of the ground truths."
        yield "groups", NOTE, f"Every advantage is 0, because all responses to a prompt have the same reward. {fix}"
    if given and steps and all(step["response_length/min"] >= limit for step in steps):
        text = f"All responses are truncated at data.max_response_length={limit}."
        yield "responses", NOTE, f"{text} Set a larger data.max_response_length."


def of_sessions(run: Rehearsal) -> Iterator[Line]:
    """Report errors that do not end a run: those of single responses, whose prompts verl drops, and those of tools."""
    if failed := run.log.count("Error in _run_prompt"):
        stage = "reward" if "ray::RewardLoopWorker" in run.log else "rollout"
        text = f"verl drops the prompt of a response that raises an error, here of {counted(failed, 'response')}."
        yield stage, ERROR, f"{text} {run.first_error()}"
    if calls := re.findall("(?:Error executing tool|Unknown function|Invalid JSON in arguments for) '.*", run.log):
        text = f"{counted(len(calls), 'tool call')} failed. verl returns the error message to the model and continues."
        yield "tools", NOTE, f"{text} The first message is: {calls[0]}"


def of_resume(run: Rehearsal, whole: Rehearsal, user: Any, *, given: bool = False) -> Iterator[Line]:
    """Report whether the resumed run repeats the third step of the uninterrupted one, and validates."""
    if not (run.done or run.saved):
        yield "resume", ERROR, run.failure("while it resumed from step 2")
        return
    yield "resume", OK, f"The run resumed from step 2. It took {run.seconds:.0f} s."
    if not run.done:
        run.log = run.log.rpartition("global_step_3")[2]
        yield "validate", ERROR, run.failure("while it validated on data.val_files")
        return
    yield from of_sessions(run)
    differ = [
        name
        for name, value in whole.steps[3].items()
        if not re.search("perf/|timing", name)
        and not np.isclose(value, run.steps[3].get(name, np.inf), rtol=1e-3, atol=1e-6, equal_nan=True)
    ]
    # Tools may return something else, and asynchronous trainers take other prompts.
    same = select(user, AGENT_LOOP) == "single_turn_agent"
    same &= select(user, "trainer.v1.trainer_mode") in (None, "sync")
    state, text = OK, "After resuming, step 3 matches step 3 of the uninterrupted run."
    if differ:
        text = f"After resuming, step 3 differs from step 3 of the uninterrupted run in {', '.join(differ)}."
    if differ and same:
        state = ERROR
        text += " Either the saved state is incomplete, or the reward function is not deterministic."
        text += " Run `verl-ext check --try-reward`, which scores a response twice."
    elif differ:
        state = NOTE
        text += " Tools and asynchronous trainers can cause such differences."
    if whole.steps[3].get("actor/grad_norm") == 0:
        state = ERROR if state == ERROR else NOTE
        fix = CHANGE_RESPONSES if given else USE_RESPONSES
        text += f" Its actor/grad_norm is 0, so this comparison proves little. {fix}"
    yield "repeat", state, text
    scores = [f"{name}={value:g}" for name, value in run.steps[3].items() if name.startswith("val-core")]
    yield "validate", OK, f"The validation metrics are {', '.join(scores)}." if scores else "The validation ended."
