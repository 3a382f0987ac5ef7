"""Summarize a run: what verl_ext does in it, and its start, steps, checkpoints and validation.

The log of a training has the first part, `check` has both. The second part reads the data and the checkpoints on this
machine.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl_ext import __version__
from verl_ext.checks.rewards import accuracy_of
from verl_ext.checks.samples import batches, files_of, has_custom_dataset, without_prompts
from verl_ext.core.chain import Step
from verl_ext.errors import ConfigurationError, Finding, explaining_errors
from verl_ext.registry import ADDED_ESTIMATORS
from verl_ext.run import Run
from verl_ext.run_config import ACTOR, FUNCTION, ROLLOUT, owner, select, uses_default_trainer
from verl_ext.settings import ACCURACY, ACCURACY_BETWEEN

MODEL_PATH = "actor_rollout_ref.model.path"
TOOLS = tuple(f"{ROLLOUT}.multi_turn.{name}" for name in ("tool_config_path", "function_tool_path"))
FILES = (
    *("data.train_files", "data.val_files", f"{FUNCTION}.path", "data.custom_cls.path", *TOOLS),
    f"{ROLLOUT}.agent.agent_loop_config_path",
)
"""Settings that name files; so does `actor_rollout_ref.model.path`, unless it is a name on a hub."""


def describe(run: Run) -> Iterator[str]:
    """Yield a line for each part of the run that verl_ext determines."""
    import verl

    yield f"version    verl_ext {__version__}, verl {verl.__version__}"
    yield f"estimator  {run.name}{_owner(run)}"
    if run.chain is not None:
        yield f"steps      {', '.join(map(_step, run.chain.steps))}"
    rewards = _rewards(run)
    if rewards:
        yield f"rewards    {rewards}"
    if run.chain is not None and run.chain.needs_accuracy:
        yield f"accuracy   {_accuracy(run)}"
    yield f"loss       {_loss(run)}"
    bounds = run.settings.rewards.accuracy_between
    if run.filter_metric == ACCURACY_BETWEEN and bounds:
        lowest, highest = bounds
        yield f"filter     groups whose mean accuracy is outside {lowest:g} to {highest:g} are dropped"


def _owner(run: Run) -> str:
    other = owner(run.name) if run.name in ADDED_ESTIMATORS else None
    return f" (registered by {other}, so verl_ext does not compute it)" if other else ""


def _step(step: Step) -> str:
    return f"{step.name} over {step.over}" if hasattr(step, "over") else step.name


def _rewards(run: Run) -> str:
    """Return the rewards with their weights; empty if an error says why they cannot be read."""
    rewards = run.settings.rewards
    keys = rewards.keys
    if not keys:
        return "" if run.select("algorithm.rewards.keys") else "the score"
    weights = rewards.weights or [1.0] * len(keys)
    texts = []
    for key, weight in zip(keys, weights, strict=True):
        text = f"{weight:g} {key}"
        if key in (rewards.per_turn or ()):
            text += " per turn"
        if key in (rewards.rubrics or ()):
            text += " (rubric)"
        condition = (rewards.conditions or {}).get(key)
        if condition is not None:
            text += f" where {condition.reward} is at least {condition.at_least:g}"
        texts.append(text)
    only_logged = "" if run.computes_advantages else f" (logged only, because verl's {run.name} uses the score)"
    return ", ".join(texts) + only_logged


def _accuracy(run: Run) -> str:
    rewards = run.settings.rewards
    text = accuracy_of(run.settings)
    if text not in (rewards.accuracy_key, ACCURACY):
        text += f", or `{ACCURACY}` if the reward function returns it"
    if rewards.accuracy_threshold is not None:
        text += f" above {rewards.accuracy_threshold:g}"
    return text


def _loss(run: Run) -> str:
    text = f"{run.select(f'{ACTOR}.policy_loss.loss_mode')}, loss_agg_mode={run.select(f'{ACTOR}.loss_agg_mode')}"
    factor = run.select(f"{ACTOR}.loss_scale_factor")
    return text if factor is None else f"{text}, loss_scale_factor={factor}"


def plan(run: Run) -> tuple[list[str], list[Finding]]:
    """Return lines about the start, the steps, the checkpoints and the validation of a run, and findings."""
    folder = _resumed_checkpoint(run.config.trainer)
    start = "from the beginning"
    first_step = 0
    if folder is not None:
        first_step = int(folder.rpartition("global_step_")[2])
        start = f"resumes after step {first_step} from {folder}"
    rows = _training_rows(run.config)
    lines = [
        f"start      {start}",
        f"trains     {_training(run, rows)}",
        f"saves      {_saves(run)}",
        f"validates  {_validation(run)}",
    ]
    findings = [*_findings_on_steps(run, rows, first_step), *_missing_files(run.config)]
    for setting in ("data.train_files", "data.val_files"):
        findings += without_prompts(run.config, setting)
    return lines, findings


def _batch_size(run: Run) -> int:
    """Return the number of rows of a step. RayPPOTrainer may generate other batches than it trains on."""
    size: int = run.config.data.train_batch_size
    if not uses_default_trainer(run.config):
        size = run.select("data.gen_batch_size") or size
    return size


def _steps_of_data(run: Run, rows: int | None) -> int | None:
    """Return the number of steps for which the data suffice; None if the number of rows is not known."""
    if rows is None:
        return None
    steps: int = rows // _batch_size(run) * run.config.trainer.total_epochs
    return steps


def _last_step(run: Run, rows: int | None) -> int | None:
    """Return the last step of the training; None if it is not known."""
    limits = [_steps_of_data(run, rows), run.config.trainer.total_training_steps]
    return min((limit for limit in limits if limit is not None), default=None)


def _training(run: Run, rows: int | None) -> str:
    if run.only_validates:
        return "never (trainer.val_only=True)"
    trainer = run.config.trainer
    row_count = "all" if rows is None else f"{rows:,}"
    text = f"{trainer.total_epochs} epochs of {row_count} rows with batch size {_batch_size(run)}"
    if trainer.total_training_steps is not None:
        text += f", trainer.total_training_steps={trainer.total_training_steps}"
    last_step = _last_step(run, rows)
    return text if last_step is None else f"to step {last_step:,}: {text}"


def _saves(run: Run) -> str:
    trainer = run.config.trainer
    if run.only_validates:
        return "never (trainer.val_only=True)"
    if trainer.save_freq <= 0:
        return f"never (trainer.save_freq={trainer.save_freq})"
    text = f"every {trainer.save_freq} steps and after the last, to {trainer.default_local_dir}"
    kept = trainer.get("max_actor_ckpt_to_keep")
    return text if kept is None else f"{text}; keeps the last {kept}"


def _validation(run: Run) -> str:
    trainer = run.config.trainer
    files = files_of(run.config, "data.val_files")
    times = ["before the first step"] if trainer.get("val_before_train", True) else []
    if trainer.test_freq > 0 and not run.only_validates:
        times.append(f"every {trainer.test_freq} steps and after the last")
    return f"{' and '.join(times)}, on {', '.join(files)}" if times and files else "never"


def _findings_on_steps(run: Run, rows: int | None, first_step: int) -> Iterator[Finding]:
    """Warn about data for less than one step or less than the configured steps, and about a finished training."""
    batch_size = _batch_size(run)
    steps_of_data, last_step = _steps_of_data(run, rows), _last_step(run, rows)
    if rows is not None and rows < batch_size:
        yield Finding(
            "warning",
            f"data.train_files has {rows} rows, fewer than the batch size {batch_size}.",
            f"Set data.train_batch_size to at most {rows}, or add rows.",
        )
        return
    if run.only_validates or last_step is None:
        return
    configured = run.config.trainer.total_training_steps
    if rows is not None and steps_of_data is not None and configured is not None and steps_of_data < configured:
        steps_per_epoch = rows // batch_size
        epochs = -(-configured // steps_per_epoch)
        yield Finding(
            "warning",
            f"trainer.total_training_steps={configured} cannot be reached, because the data end after step "
            f"{steps_of_data} ({run.config.trainer.total_epochs} epochs of {rows} rows with batch size {batch_size}).",
            f"Set trainer.total_epochs={epochs}, or trainer.total_training_steps={steps_of_data}.",
        )
    if first_step >= last_step:
        yield Finding(
            "warning",
            f"The run resumes after step {first_step} of {last_step}, so no step remains to be trained.",
            "Set trainer.resume_mode=disable, or another trainer.default_local_dir.",
        )


def _resumed_checkpoint(trainer: Any) -> str | None:
    """Return the checkpoint from which a run resumes, or None."""
    from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

    if trainer.resume_mode == "disable":
        return None
    if trainer.resume_mode == "resume_path":
        path = str(trainer.resume_from_path)
        if not re.search(r"global_step_\d+$", path):
            raise ConfigurationError(
                f"trainer.resume_from_path={path} does not end with global_step_N. Set it to the folder of one "
                "checkpoint."
            )
        return path
    with redirect_stdout(io.StringIO()), explaining_errors("trainer.default_local_dir", ConfigurationError):
        latest: str | None = find_latest_ckpt_path(trainer.default_local_dir)
    return latest


def _training_rows(config: Any) -> int | None:
    """Return the number of rows of the training data before filtering; None if it is not known."""
    if has_custom_dataset(config):
        return None
    with suppress(OSError, ValueError):
        rows: int = sum(batches(path, [])[0] for path in files_of(config, "data.train_files"))
        maximum = select(config, "data.train_max_samples") or -1
        return min(rows, maximum) if maximum > 0 else rows
    return None


def _missing_files(config: Any) -> Iterator[Finding]:
    """Yield a note for each file and module that does not exist on this machine."""
    for path, setting in (*_files_of_settings(config), *_modules_of_tools(config)):
        yield Finding(
            "note",
            f"{path}, named by {setting}, does not exist on this machine.",
            "Correct the path, or run the check on the machine that has it.",
        )


def _files_of_settings(config: Any) -> Iterator[tuple[str, str]]:
    """Yield each file that does not exist, and the setting that names it."""
    settings = [*FILES]
    model = str(select(config, MODEL_PATH))
    if model.startswith(("/", ".", "~")):
        settings.append(MODEL_PATH)
    if config.trainer.resume_mode == "resume_path":
        settings.append("trainer.resume_from_path")
    for setting in settings:
        for path in files_of(config, setting):
            if "://" not in path and not Path(path).exists():  # verl does not expand `~`
                yield path, setting


def _modules_of_tools(config: Any) -> Iterator[tuple[str, str]]:
    """Yield each module of a tool that cannot be found, and the file that names it."""
    for path in files_of(config, TOOLS[0]):
        if not Path(path).is_file():
            continue
        with explaining_errors(f"{TOOLS[0]}={path}", ConfigurationError):
            body: Any = OmegaConf.load(path)
            for tool in body.get("tools") or ():
                missing = _missing_module(str(tool.class_name).rpartition(".")[0])
                if missing is not None:
                    yield missing, path


def _missing_module(name: str) -> str | None:
    """Return the module if it cannot be found, or the first package above it that cannot be found."""
    try:
        return None if find_spec(name) else name
    except ModuleNotFoundError as error:
        return str(error.name)
