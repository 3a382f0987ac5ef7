"""`verl-ext rehearse`: train, save, resume and validate a run in miniature on the CPU, and say what was seen.

It takes the words of `python -m verl.trainer.main_ppo`. The data, tokenizer, chat template, tools, agent loop, reward
function, filters and estimator are those of the run, in verl's own pipeline. The models are random and small. What is
shown comes from verl's own log, metrics and dumps, which stay in the folder `rehearsal` of the run's checkpoints. The
exit status is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl_ext.cpu.miniature import make_model, rehearsed
from verl_ext.files import say
from verl_ext.integration.checks.command import add_configuration, check, composed
from verl_ext.integration.checks.read import ACTOR, select
from verl_ext.tools.lines import METRICS, json_lines

FAILED, LOOK, OK = "FAILED", "look", "ok"
Finding = tuple[str, str, str]
"""The stage; FAILED, LOOK or OK; a text."""
DUMP = "rollouts/{}.jsonl"
WORKER = re.compile(r"^(?:\x1b\[\d+m)*\(\w+ pid=[^)]*\)(?:\x1b\[\d+m)* ?", re.M)
"""What Ray puts before a line of a worker."""
ERROR = re.compile(r"^(?!ray.exceptions.RayTaskError)[\w.]*(?:Error|Exception|Exit)(?::.*)?$", re.M)
FRAME = re.compile(r'^ +File "(?!.*(?:site-packages|lib/python|verl_ext/|<))(.+)", line (\d+)', re.M)
"""In a traceback, a line of the user's own files."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command: those of verl, so that a command line can be pasted."""
    add_configuration(parser)
    parser.add_argument("--answers", type=Path, metavar="FILE", help="JSON lines: the answers of the model in turn")
    parser.add_argument("--minutes", type=float, default=10, help="until a run is ended, 10 by default")


def rehearse(options: argparse.Namespace) -> int:
    """Check the run and rehearse it, with a line for each stage; return 1 if one failed."""
    failed = check(argparse.Namespace(**{**vars(options), "try_reward": True, "rows": 100, "answers": None}))
    for stage, state, text in _stages(options):
        say(f"{stage:9} {state:6}  {text}")
        failed |= state == FAILED
    return failed


def _stages(options: argparse.Namespace) -> Iterator[Finding]:
    with composed(options) as user:
        from verl.trainer.ppo.utils import need_critic

        place = user.trainer.default_local_dir
        folder = Path(place).resolve() / "rehearsal"
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        except OSError as error:
            yield "save", FAILED, f"trainer.default_local_dir={place} cannot be written: {error}"
            return
        tokenizer = make_model(user, "actor_rollout_ref.model", folder / "model")
        if need_critic(user):
            make_model(user, "critic.model", folder / "critic")
        config, left_out = rehearsed(user, folder, options.answers)
    yield from (("model", LOOK, f"not rehearsed: {text}") for text in left_out)
    template = user.actor_rollout_ref.model.get("custom_chat_template") or tokenizer.chat_template
    if select(user, "actor_rollout_ref.rollout.multi_turn.enable") and "tools" not in str(template):
        yield "tools", LOOK, "no prompt shows the tools: the tokenizer's chat template does not read `tools`"
    whole = start(folder / "train", config, options.minutes)
    yield from of_training(whole, user)
    if whole.done:
        config.trainer.update(test_freq=3, resume_mode="resume_path")
        config.trainer.resume_from_path = str(whole.folder / "checkpoints/global_step_2")
        yield from of_resume(start(folder / "resume", config, options.minutes), whole, user)


class Rehearsal:
    """What a run left that has ended; the status is None if it was ended after its time."""

    def __init__(self, folder: Path, status: int | None, seconds: float) -> None:
        self.folder, self.status, self.seconds = folder, status, seconds
        log = (folder / "log.txt").read_text(encoding="utf-8", errors="replace")
        self.log = WORKER.sub("", log.replace("\r", "\n"))
        self.steps = {row["step"]: row["data"] for row in self.rows(METRICS)}
        self.done = status == 0 and 3 in self.steps

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The records of a file, but for those that a killed run left torn."""
        file = self.folder / name
        return list(filter(None, json_lines(file))) if file.exists() else []

    def failure(self, change: str) -> str:
        """The first error of the log, with the line of the user's that raised it; and what to change."""
        error, line = ERROR.search(self.log), ""
        ended = "ended, by --minutes," if self.status is None else f"exit status {self.status}"
        text = f"{ended} after {self.seconds:.0f} s"
        if error:
            text, frames = error[0], FRAME.findall(self.log[: error.start()])
            line = " ({}:{})".format(*frames[-1]) if frames else ""
        return f"{text}{line}; change {change}; log: {self.folder}/log.txt"


def start(folder: Path, config: Any, minutes: float) -> Rehearsal:
    """Start verl's entry point with this configuration, and wait for it."""
    folder.mkdir()
    shown = {"RAY_DEDUP_LOGS": "0", "HYDRA_FULL_ERROR": "1", "VERL_LOGGING_LEVEL": "INFO"}
    variables = {**shown, "VERL_FILE_LOGGER_PATH": str(folder / METRICS)}
    config.trainer.default_local_dir = str(folder / "checkpoints")
    config.ray_kwargs.ray_init.runtime_env.env_vars.update(variables)
    if select(config, "algorithm.verl_ext.dump_dir"):
        config.algorithm.verl_ext.dump_dir = str(folder / "dump")
    OmegaConf.save(config, folder / "run.yaml")
    command = [sys.executable, "-u", "-m", "verl.trainer.main_ppo", f"--config-path={folder}", "--config-name=run"]
    command += [f"hydra.run.dir={folder}", "hydra.output_subdir=null"]
    begin, status = time.monotonic(), None
    with (folder / "log.txt").open("w") as log, suppress(subprocess.TimeoutExpired):
        streams: Any = {"stdout": log, "stderr": log, "env": {**os.environ, **variables}}
        status = subprocess.run(command, timeout=60 * minutes, **streams).returncode  # noqa: S603 - the user's own run
    return Rehearsal(folder, status, time.monotonic() - begin)


def of_training(run: Rehearsal, user: Any) -> Iterator[Finding]:
    """The stages of the uninterrupted run, up to the first that it did not reach."""
    started = "Training Progress" in run.log
    counts = list(map(int, re.findall(r"^(?:filter )?dataset len: (\d+)", run.log, re.M)))
    if len(counts) < 2 and not started:  # a dataset of the user's own may be silent
        yield "data", FAILED, run.failure("data.train_files or data.val_files")
        return
    if len(counts) > 1:
        filtered, batch = bool(user.data.filter_overlong_prompts), user.data.train_batch_size
        left, longest = counts[filtered], user.data.max_prompt_length
        text = (
            f"{left} of {counts[0]} prompts stay; data.max_prompt_length={longest}, filter_overlong_prompts={filtered}"
        )
        if left < batch:
            yield "data", FAILED, f"{text}; fewer than data.train_batch_size={batch}: change one of these"
            return
        yield "data", OK, text
    yield from of_sessions(run)
    algorithm = f"algorithm or {ACTOR}"
    if run.status is None and user.algorithm.filter_groups.enable:
        algorithm = "algorithm.filter_groups, which drops groups of equal answers: give --answers, or set enable=False"
    saving = 2 in run.steps or "Saving checkpoint to" in run.log
    for stage, reached, text, change in (
        ("start", started, "models, engine and rollout", "actor_rollout_ref.model"),
        ("train", 1 in run.steps and saving, _rewards(run), algorithm),
        ("save", 2 in run.steps, "step 2", f"{ACTOR}.checkpoint"),
        ("train", run.done, f"3 steps, {run.seconds:.0f} s", algorithm),
    ):
        yield stage, OK if reached else FAILED, text if reached else run.failure(change)
        if not reached:
            return


def of_sessions(run: Rehearsal) -> Iterator[Finding]:
    """Errors of single answers: verl logs them, leaves the prompt out, and goes on."""
    if failed := run.log.count("Error in _run_prompt"):
        stage, change = "rollout", "actor_rollout_ref.rollout.agent or .multi_turn"
        if "ray::RewardLoopWorker" in run.log:
            stage, change = "reward", "the reward function"
        yield stage, FAILED, f"{failed} prompts: {run.failure(change)}"


def _rewards(run: Rehearsal) -> str:
    """What the answers earned: from a random model, what noise can earn."""
    rows = [row for step in run.steps for row in run.rows(DUMP.format(step))]
    scores = [row["score"] for row in rows] or [math.nan]
    varied = len({(row["input"], row["score"]) for row in rows}) - len({row["input"] for row in rows})
    text = "varies" if varied else "equal within each group, so that nothing is learnt: try others with --answers"
    return (
        f"{len(rows)} answers, score {min(scores):g} to {max(scores):g}, mean {sum(scores) / len(scores):.3g}, {text}"
    )


def of_resume(run: Rehearsal, whole: Rehearsal, user: Any) -> Iterator[Finding]:
    """Whether the resumed run repeats the third step of the uninterrupted one, and validates."""
    yield from of_sessions(run)
    if not run.done:
        validating = "in _validate" in run.log
        change = "data.val_files" if validating else f"{ACTOR}.checkpoint"
        yield "validate" if validating else "resume", FAILED, run.failure(change)
        return
    yield "resume", OK, f"from step 2, {run.seconds:.0f} s"
    yield "repeat", *_repeated(run, whole, user)
    rows = run.rows("validations/3.jsonl")
    names = sorted(rows[0].keys() - {"input", "output", "gts", "step", "uid", "reward"}) if rows else []
    yield "validate", OK if rows else FAILED, f"{len(rows)} answers: {', '.join(names)}"


def _repeated(run: Rehearsal, whole: Rehearsal, user: Any) -> tuple[str, str]:
    keys = ("input", "output", "score")
    dumps = [sorted([row[key] for key in keys] for row in part.rows(DUMP.format(3))) for part in (run, whole)]
    single = select(user, "actor_rollout_ref.rollout.agent.default_agent_loop") == "single_turn_agent"
    for column, state, text in (
        (0, FAILED, "other prompts than without a break: change data.custom_cls"),
        (1, FAILED if single else LOOK, "other answers than without a break: a tool's, or other weights"),
        (2, LOOK, "other scores of the same answers: the reward function is not deterministic"),
    ):
        one, other = ([row[column] for row in dump] for dump in dumps)
        if one != other:
            return state, text
    names = [name for name in whole.steps[3] if not re.search("perf/|timing|^val", name)]
    pairs = [(name, whole.steps[3][name], run.steps[3].get(name, math.nan)) for name in names]
    differ = [name for name, one, other in pairs if not math.isclose(one, other, rel_tol=1e-3, abs_tol=1e-6)]
    text = f"{len(dumps[0])} answers, their scores and {len(names)} metrics of step 3 as without a break"
    return (FAILED, f"{text}, but for {', '.join(differ)}") if differ else (OK, text)
