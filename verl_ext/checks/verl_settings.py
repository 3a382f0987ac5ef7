"""Rules about settings of verl that prevent learning, end the run, or that verl does not read."""

from __future__ import annotations

import math
import shlex
import warnings
from collections.abc import Iterator
from typing import Any, Literal

from omegaconf import OmegaConf

from verl_ext.checks import unread
from verl_ext.checks.estimators import kl_in_loss, why_not_kl_in_reward
from verl_ext.checks.managers import MANAGER, MANAGER_ARGUMENTS, REWARD_MANAGERS
from verl_ext.checks.presets import written_settings
from verl_ext.checks.rewards import needs_nonnegative_sum
from verl_ext.checks.unread import KL_IN_LOSS, KL_IN_REWARD, Switch
from verl_ext.errors import Finding, listed
from verl_ext.run import Run
from verl_ext.run_config import ACTOR, ROLLOUT, uses_default_trainer

GREEDY = (("temperature", 0, 1), ("top_k", 1, -1))
"""Settings of the rollout, each with the value that makes responses identical, and a usual value."""
MINI_BATCH = "ppo_mini_batch_size"
FSDP = ("fsdp", "fsdp2")


def settings_without_switch(run: Run) -> Iterator[Finding]:
    """Warn about settings that verl reads only together with another setting."""
    written = {path: setting.value for path, setting in written_settings(run).items()}
    for path, value, switch in unread.behind_switches(written, run.select):
        state = f"{switch.path}={switch.default}"
        if switch.default is None:
            state = f"{switch.path} is not set"
        fix = _fix_of_switch(run, path, value, switch)
        yield Finding("warning", f"verl does not read {path}={value} while {state}.", fix)


def _fix_of_switch(run: Run, path: str, value: Any, switch: Switch) -> str:
    """Return the fix for a setting that verl does not read: the line with the switch, if the run is accepted with it.

    Edge cases: an estimator may reject a KL term in the reward, or warn about a KL term in the loss. Then the fix
    removes the setting, or names the KL term that the estimator accepts.
    """
    if switch.path == KL_IN_REWARD and why_not_kl_in_reward(run) is not None:
        in_loss = kl_in_loss(run)
        instead = f" To train with a KL term, set {in_loss} and its coefficient {ACTOR}.kl_loss_coef."
        return f"Remove {path}.{instead if in_loss else ''}"
    line = kl_in_loss(run) if switch.path == KL_IN_LOSS else switch.line.format(value=value)
    return f"Set {line}, or remove {path}." if line else f"Remove {path}."


def arguments_of_manager(run: Run) -> Iterator[Finding]:
    """Warn about entries of `reward.reward_kwargs` that verl's reward manager does not read."""
    paths = unread.arguments_not_read(written_settings(run), run.select)
    if not paths:
        return
    name = run.select(f"{MANAGER}.name")
    read_by_dapo = {f"{MANAGER_ARGUMENTS}.{argument}" for argument in REWARD_MANAGERS["dapo"].arguments}
    arguments = ", ".join(REWARD_MANAGERS["dapo"].arguments)
    # The penalty is a part of the score. `keys` replace the score, and some steps need a score of at least 0.
    has_keys = run.chain is not None and run.settings.rewards.keys is not None
    rejects_penalty = has_keys or needs_nonnegative_sum(run.chain)
    fix = f"Remove {', '.join(paths)}."
    if name == "dapo":
        fix += f" Use only entries of reward.reward_kwargs that dapo reads: {arguments}."
    elif not rejects_penalty and read_by_dapo.issuperset(paths):
        fix = f"Set {MANAGER}.name=dapo, which reads {arguments}. Otherwise, remove {', '.join(paths)}."
    yield Finding(
        "warning", f"verl's reward manager does not read {', '.join(paths)} while {MANAGER}.name={name}.", fix
    )


def old_sections(config: Any, severity: Literal["error", "warning"] = "error") -> Iterator[Finding]:
    """Report each setting in a section of older versions of verl that has no effect on `verl.trainer.main_ppo`."""
    for path, value, line in unread.old_settings(config):
        text = f"{path}={value} has no effect, because verl.trainer.main_ppo does not read it."
        if line is None:
            yield Finding(severity, f"{text} No current setting of verl replaces it.", f"Remove {path}.")
        else:
            yield Finding(severity, text, f"Set {shlex.quote(line)} instead.")


def unused_pf_ppo(run: Run) -> Iterator[Finding]:
    """Warn about PF-PPO, which works only with gae on RayPPOTrainer."""
    if not run.select("algorithm.use_pf_ppo"):
        return
    if run.name != "gae":
        effect = f"has no effect on algorithm.adv_estimator={run.name}"
    elif uses_default_trainer(run.config):
        effect = "assigns responses the returns of other responses on verl's default trainer (trainer.use_v1=True)"
    else:
        return
    yield Finding("warning", f"algorithm.use_pf_ppo=True {effect}.", "Set algorithm.use_pf_ppo=False.")


def greedy_rollout(run: Run) -> Iterator[Finding]:
    """Warn about settings with which all responses to a prompt are identical."""
    count = run.select(f"{ROLLOUT}.n")
    if count == 1:
        return
    for name, greedy, usual in GREEDY:
        setting = f"{ROLLOUT}.{name}"
        if run.select(setting) == greedy:
            text = (
                f"With {setting}={greedy}, the {count} responses to a prompt are identical, and so are their rewards."
            )
            yield Finding("warning", text, f"Set {setting}={usual}.")


def endless_warmup(run: Run) -> Iterator[Finding]:
    """Warn about a warm-up that lasts as long as the training, or longer."""
    setting = f"{ACTOR}.optim.lr_warmup_steps"
    warmup = run.select(setting)
    steps = run.select("trainer.total_training_steps")
    updates_per_step = run.select(f"trainer.v1.{run.select('trainer.v1.trainer_mode')}.parameter_sync_step") or 1
    if not all(isinstance(number, int) for number in (warmup, steps, updates_per_step)):
        return
    updates = steps * updates_per_step
    if warmup >= updates:
        yield Finding(
            "warning",
            f"{setting}={warmup} does not end before the training, which has {updates} updates "
            f"(trainer.total_training_steps={steps}). The learning rate would not reach its configured value.",
            f"Set {setting}={updates // 10}, for example.",
        )


def validation_on_training_data(run: Run) -> Iterator[Finding]:
    """Warn about files that are used for training and for validation."""
    validates_later = (run.select("trainer.test_freq") or 0) > 0
    if not validates_later and not run.select("trainer.val_before_train"):
        return
    common = _files(run, "data.train_files") & _files(run, "data.val_files")
    if common:
        yield Finding(
            "warning",
            f"data.val_files and data.train_files both contain {listed(common)}. The model would be validated on its "
            "training data.",
            "Set data.val_files to other files.",
        )


def _files(run: Run, setting: str) -> set[Any]:
    files = run.select(setting)
    return {*files} if OmegaConf.is_list(files) else {files} - {None}


def incomplete_checkpoint(run: Run) -> Iterator[Finding]:
    """Warn about checkpoints without the model or the optimizer, and about a resume that does not read one of them."""
    for part in ("save_contents", "load_contents"):
        setting = f"{ACTOR}.checkpoint.{part}"
        contents = run.select(setting)
        if not OmegaConf.is_list(contents):
            continue
        missing = [name for name in ("model", "optimizer") if name not in contents]
        if missing:
            complete = [*map(str, contents), *missing]
            yield Finding(
                "warning",
                f"{setting}={[*contents]} does not contain {listed(missing)}. A resumed run would start over without "
                f"the saved {' and '.join(missing)}.",
                f"Set '{setting}=[{','.join(complete)}]'.",
            )


def short_micro_batch(run: Run) -> Iterator[Finding]:
    """Warn about FSDP micro-batches that may be shorter than one sequence: verl stops at the first such sequence."""
    setting = f"{ACTOR}.ppo_max_token_len_per_gpu"
    tokens_per_gpu = run.select(setting)
    strategy = run.select(f"{ACTOR}.strategy")
    if tokens_per_gpu is None or not run.select(f"{ACTOR}.use_dynamic_bsz") or strategy not in FSDP:
        return
    prompt_length = run.select("data.max_prompt_length") or 0
    response_length = run.select("data.max_response_length") or 0
    sequence_length = prompt_length + response_length
    ranks = _ranks_per_sequence(run, ACTOR)
    tokens = tokens_per_gpu * ranks
    if tokens < sequence_length:
        yield Finding(
            "warning",
            f"{setting}={tokens_per_gpu} allows micro-batches of {tokens} tokens, but one sequence may have "
            f"{sequence_length} tokens (data.max_prompt_length plus data.max_response_length). verl would stop at the "
            "first sequence that is too long.",
            f"Set {setting}={-(-sequence_length // ranks)}.",
        )


def indivisible_mini_batch(run: Run) -> Iterator[Finding]:
    """Reject mini-batches that the data-parallel ranks of FSDP cannot share: verl stops after the first rollout."""
    responses_per_prompt = run.select(f"{ROLLOUT}.n")
    gpus_per_node, nodes = run.select("trainer.n_gpus_per_node"), run.select("trainer.nnodes")
    for engine in (ACTOR, "critic") if _has_critic(run) else (ACTOR,):
        setting = f"{engine}.{MINI_BATCH}"
        prompts = run.select(setting)
        numbers = (prompts, responses_per_prompt, gpus_per_node, nodes)
        are_known = all(isinstance(number, int) and number > 0 for number in numbers)
        if not are_known or run.select(f"{engine}.strategy") not in FSDP:
            continue
        responses = prompts * responses_per_prompt
        ranks = gpus_per_node * nodes // _ranks_per_sequence(run, engine)
        if ranks > 0 and responses % ranks != 0:
            multiple = ranks // math.gcd(ranks, responses_per_prompt)
            fitting = -(-prompts // multiple) * multiple
            yield Finding(
                "error",
                f"{setting}={prompts} with {ROLLOUT}.n={responses_per_prompt} gives mini-batches of {responses} "
                f"responses, which {ranks} data-parallel ranks cannot share equally. verl would stop after the first "
                "rollout.",
                f"Set {setting}={fitting} and data.train_batch_size to a multiple of {fitting}, or use another number "
                "of GPUs.",
            )


def _has_critic(run: Run) -> bool:
    from verl.trainer.ppo.utils import need_critic

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # verl warns about an estimator that needs no critic
        return bool(need_critic(run.config))


def _ranks_per_sequence(run: Run, engine: str) -> int:
    """Return the number of FSDP ranks that compute one sequence together (Ulysses sequence parallelism)."""
    sections = (engine, f"{engine}.fsdp_config", f"{engine}.fsdp")
    return max(run.select(f"{section}.ulysses_sequence_parallel_size") or 1 for section in sections)
