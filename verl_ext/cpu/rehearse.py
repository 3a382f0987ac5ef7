"""`verl-ext rehearse`: train, save, resume and validate a run in miniature on the CPU, and say what was seen.

It takes the words of `python -m verl.trainer.main_ppo`, and runs verl's own pipeline with the user's data, tokenizer,
tools, reward function and estimator. The models are random and small. What is shown comes from verl's log and metrics,
which stay in the folder `rehearsal` of the run's checkpoints. The exit status is 1 if anything failed.
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
from verl_ext.checks.command import add_configuration, check, composed
from verl_ext.checks.samples import rows_of
from verl_ext.checks.try_reward import add_trial
from verl_ext.cpu import session
from verl_ext.cpu.miniature import make_model, rehearsed
from verl_ext.cpu.patches import REHEARSAL
from verl_ext.errors import ConfigurationError, listed, reading
from verl_ext.files import METRICS, json_lines, say
from verl_ext.run_config import select

FAILED, LOOK, OK = "FAILED", "look", "ok"
WORKER = re.compile(r"^(?:\x1b\[\d+m)*\(\w+ pid=[^)]*\)(?:\x1b\[\d+m)* ?", re.M)
"""What Ray puts before a line of a worker."""
ERROR = re.compile(r"^(?!ray.exceptions.(?:RayTaskError|ActorDiedError))[\w.]*(?:Error|Exception|Exit)(?::.*)?$", re.M)
OTHERS = rf"{re.escape(verl_ext.__path__[0])}/|.*(?:site-packages|lib(?:64)?/python\d|verl/verl/)"
FRAME = re.compile(rf'^ +File "(?!{OTHERS})([^"<]+[.]py)", line (\d+)', re.M)
"""In a traceback, a line of the user's own files."""
MARKER = "verl_ext.rehearsal"
"""A file in the folder of a rehearsal: what has it may be deleted, and a rehearsal that runs has it locked."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command: those of verl, so that a command line can be pasted."""
    add_configuration(parser)
    parser.add_argument("--rows", type=int, default=100, help="to try the reward on first, 100 by default; 0: none")
    add_trial(parser)
    parser.add_argument("--minutes", type=float, default=20, help="until it is ended, 20 by default")


def rehearse(options: argparse.Namespace) -> int:
    """Check the run, and rehearse it if it is not refused, with a line for each stage; return 1 if one failed."""
    until = time.monotonic() + 60 * options.minutes
    if check(argparse.Namespace(**vars(options), try_reward=options.rows > 0, strict=False), until=until):
        return 1
    states = []
    for stage, state, text in _stages(options, until):
        say(f"{stage:9} {state:6}  {text}")
        states.append(state)
    failed, looks = FAILED in states, states.count(LOOK)
    say(f"the rehearsal {'failed' if failed else 'passed'}" + (f", with {looks} to look at" if looks else ""))
    return int(failed)


def _stages(options: argparse.Namespace, until: float) -> Iterator[tuple[str, str, str]]:
    with composed(options) as user:
        from verl.trainer.ppo.utils import need_critic

        folder = Path(user.trainer.default_local_dir).resolve() / "rehearsal"
        lock = emptied(folder)
        tokenizer = make_model(user, "actor_rollout_ref.model", folder / "model")
        if need_critic(user):
            make_model(user, "critic.model", folder / "critic")
        config, left_out = rehearsed(user, folder, options.answers)
    yield from (("left out", LOOK, text) for text in left_out)
    template = user.actor_rollout_ref.model.get("custom_chat_template") or tokenizer.chat_template
    tools = select(user, "actor_rollout_ref.rollout.multi_turn.enable")
    if tools and "tools" not in str(template):
        yield "tools", LOOK, "no prompt shows the tools: the tokenizer's chat template does not read `tools`"
    if tools and not options.answers:
        yield "tools", LOOK, "a random model calls none: give --answers that do"
    if options.rows > 0:
        yield from of_prompt(user, tokenizer, template)
    yield "runs", OK, f"two, of some minutes each; their logs are in {folder}"
    with lock:
        whole = start(folder / "train", config, until)
        yield from of_training(whole, user)
        yield from of_answers(whole, user, given=options.answers is not None)
        if whole.done:
            config.trainer.update(test_freq=3, resume_mode="resume_path")
            config.trainer.resume_from_path = str(whole.folder / "checkpoints/global_step_2")
            yield from of_resume(start(folder / "resume", config, until), whole, user)


def of_prompt(user: Any, tokenizer: Any, template: Any) -> Iterator[tuple[str, str, str]]:
    """Messages that the text of the first prompt lacks."""
    (row,) = rows_of(user, "data.train_files", 1, spread=False)[0].values()
    messages, words = row[user.data.prompt_key], user.data.get("apply_chat_template_kwargs") or {}
    with reading("the tokenizer's chat template", ConfigurationError, "applied"):
        text = tokenizer.apply_chat_template(messages, tokenize=False, chat_template=template, **words)
    if lost := [message["role"] for message in messages if str(message["content"] or "").strip() not in text]:
        yield "prompt", LOOK, f"the first lacks its message of {listed(lost)}: the tokenizer's chat template drops it"


def emptied(folder: Path) -> TextIO:
    """Empty the folder of the last rehearsal, if it is one's; return its marker, locked until it is closed."""
    place = f"trainer.default_local_dir: {folder}"
    with reading(place, ConfigurationError, "written"):
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()) and not (folder / MARKER).exists():
            raise ConfigurationError(f"{place} is no rehearsal's folder and would be emptied: move it, or set another")
        lock = (folder / MARKER).open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise ConfigurationError(f"{place}: another rehearsal runs there; set another folder") from None
        for left in ("model", "critic", "train", "resume"):
            if (folder / left).exists():
                shutil.rmtree(folder / left)
    return lock


class Rehearsal:
    """What a run left that has ended; the status is None if it was ended after its time."""

    def __init__(self, folder: Path, status: int | None, seconds: float) -> None:
        self.folder, self.status, self.seconds = folder, status, seconds
        log = (folder / "log.txt").read_text(encoding="utf-8", errors="replace")
        self.log = WORKER.sub("", log.replace("\r", "\n"))
        (folder / METRICS).touch()
        self.steps = {row["step"]: row["data"] for row in json_lines(folder / METRICS) if row}
        self.done = status == 0 and 3 in self.steps
        self.saved = (folder / "checkpoints/latest_checkpointed_iteration.txt").exists()

    def failure(self, stage: str) -> str:
        """What failed, and the first error of the log with the line of the user's that raised it."""
        stage = f"--minutes were over: {stage}" if self.status is None else stage
        text = "no error" if self.status is None else f"exit status {self.status}"
        if error := ERROR.search(self.log):
            frames = FRAME.findall(self.log[: error.start()])
            text = error[0] + (" ({}:{})".format(*frames[-1]) if frames else "")
        return f"{stage}: {text}; log: {self.folder}/log.txt"


def start(folder: Path, config: Any, until: float) -> Rehearsal:
    """Start verl's entry point with this configuration, and wait for it, no longer than `until` by the clock."""
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


def of_training(run: Rehearsal, user: Any) -> Iterator[tuple[str, str, str]]:
    """The stages of the uninterrupted run, up to the first that it did not reach."""
    yield from of_sessions(run)
    started, data = (run.folder / "started").exists(), user.data
    counted, prompts = run.folder / "prompts", "Ray and the data"
    if counted.exists():  # a dataset of the user's own may write none
        total, left = map(int, counted.read_text(encoding="utf-8").split()[:2])
        names = ("max_prompt_length", "filter_overlong_prompts", "train_batch_size")
        prompts = f"{left} of {total} prompts stay; data: {', '.join(f'{name}={data[name]}' for name in names)}"
        if left < data.train_batch_size:
            yield "data", FAILED, prompts
            return
    answers = "step 1"
    if step := run.steps.get(1):
        answers += ": score {critic/score/min:g} to {critic/score/max:g}, mean {critic/score/mean:.3g}".format(**step)
        if select(user, "actor_rollout_ref.rollout.multi_turn.enable") and step.get("num_turns/max", 0) <= 2:
            loop = select(user, "actor_rollout_ref.rollout.agent.default_agent_loop")
            answers += f"; no answer called a tool: agent_name of the rows, else default_agent_loop={loop}, must be "
            answers += "tool_agent, and --answers must call one"
    for stage, reached, text in (
        ("data", started or counted.exists(), prompts),
        ("start", started, "models, engine and rollout"),
        ("train", (run.folder / "checkpoints/global_step_2").exists(), answers),
        ("save", run.saved, "step 2"),
        ("train", run.done, f"3 steps, {run.seconds:.0f} s"),
    ):
        yield stage, OK if reached else FAILED, text if reached else run.failure(text)
        if not reached:
            if run.status is None and user.algorithm.filter_groups.enable:
                yield stage, LOOK, "filter_groups drops groups of equal scores: give --answers that differ in theirs"
            return


def of_answers(run: Rehearsal, user: Any, *, given: bool) -> Iterator[tuple[str, str, str]]:
    """What the answers of all steps show."""
    steps, limit = run.steps.values(), user.data.max_response_length
    if steps and all(step["critic/advantages/min"] == step["critic/advantages/max"] == 0 for step in steps):
        cause = "is the reward function right (check says what ground truths earn)?" if given else "give --answers"
        yield "groups", LOOK, f"every advantage is 0, as all answers to a prompt earn the same: {cause}"
    if given and steps and all(step["response_length/min"] >= limit for step in steps):
        yield "answers", LOOK, f"all are cut at data.max_response_length={limit}"


def of_sessions(run: Rehearsal) -> Iterator[tuple[str, str, str]]:
    """Errors of single answers, after which verl leaves the prompt out, and of tools, which it tells the model."""
    if failed := run.log.count("Error in _run_prompt"):
        stage = "reward" if "ray::RewardLoopWorker" in run.log else "rollout"
        yield stage, FAILED, run.failure(f"{failed} answers, and verl leaves their prompts out")
    if calls := re.findall("(?:Error executing tool|Unknown function|Invalid JSON in arguments for) '.*", run.log):
        yield "tools", LOOK, f"{len(calls)} calls that failed, the first: {calls[0]}"


def of_resume(run: Rehearsal, whole: Rehearsal, user: Any) -> Iterator[tuple[str, str, str]]:
    """Whether the resumed run repeats the third step of the uninterrupted one, and validates."""
    if not (run.done or run.saved):
        yield "resume", FAILED, run.failure("from step 2")
        return
    yield "resume", OK, f"from step 2, {run.seconds:.0f} s"
    if not run.done:
        run.log = run.log.rpartition("global_step_3")[2]
        yield "validate", FAILED, run.failure("on data.val_files")
        return
    yield from of_sessions(run)
    differ = [
        name
        for name, value in whole.steps[3].items()
        if not re.search("perf/|timing", name)
        and not np.isclose(value, run.steps[3].get(name, np.inf), rtol=1e-3, atol=1e-6, equal_nan=True)
    ]
    # A tool may answer otherwise, and asynchronous trainers take other prompts.
    same = select(user, "actor_rollout_ref.rollout.agent.default_agent_loop") == "single_turn_agent"
    same &= select(user, "trainer.v1.trainer_mode") in (None, "sync")
    still = whole.steps[3].get("actor/grad_norm") == 0
    state = (FAILED if same else LOOK) if differ else LOOK if still else OK
    text = "the metrics of step 3 are as without a break" + (f", but for {', '.join(differ)}" if differ else "")
    text += ", but its actor/grad_norm is 0, so it proves little: give --answers that earn differently" if still else ""
    yield "repeat", state, text
    scores = (f"{name}={value:g}" for name, value in run.steps[3].items() if name.startswith("val-core"))
    yield "validate", OK, ", ".join(scores)
