"""Rules about the configuration of a run; those about rewards and losses are in `rewards` and `losses`.

A rule yields what it has against a run: an error, or a warning. An estimator has a rule of its own beside its formula.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from verl_ext import hooks
from verl_ext.checks.losses import loss_of_verl
from verl_ext.checks.presets import late_preset, other_preset, replaced_preset, written
from verl_ext.checks.rewards import lists_of_rewards, lost_penalty, negative_rewards, wrong_accuracy, wrong_components
from verl_ext.checks.trial import trial
from verl_ext.conf import PRESETS
from verl_ext.core.steps import DivideByMean, WeightedSum
from verl_ext.errors import Finding, listed, nearest, unknown
from verl_ext.names import is_verls, registered
from verl_ext.registry import ENTRY_POINTS, INSTALLED, TAKEN, changed, load, misspelt
from verl_ext.run_config import ACTOR, FILTER, FUNCTION, RunConfig, set_in
from verl_ext.settings import ACCURACY_BETWEEN, ANY_REWARD, RewardsSettings

Rule = Callable[[RunConfig], Iterator[Finding]]

SWITCHES = (
    (f"{ACTOR}.kl_loss_", f"{ACTOR}.use_kl_loss", False, "True"),
    ("algorithm.kl_", "algorithm.use_kl_in_reward", False, "True"),
    (f"{FILTER}.", f"{FILTER}.enable", False, "True"),
    ("algorithm.rollout_correction.rollout_is_", "algorithm.rollout_correction.rollout_is", None, "token"),
    (f"{FUNCTION}.", f"{FUNCTION}.path", None, "FILE"),
    ("reward.reward_model.model_path.", "reward.reward_model.enable", False, "True"),
    (f"{ACTOR}.clip_ratio.", f"{ACTOR}.clip_ratio_low", 0.2, f"0.1 {ACTOR}.clip_ratio_high=0.1"),
)
"""How a path begins that verl reads only if a setting is not at its default, the setting, this default, and a value."""
DAPO = ("max_resp_len", *(f"overlong_buffer_cfg.{name}" for name in ("enable", "len", "penalty_factor", "log")))
"""What verl's reward manager `dapo` reads of `reward.reward_kwargs`; verl's others read nothing of it."""
BARE = ("grpo", "grpo_vectorized", "rloo", "opo", "gpg", "optimal_token_baseline", "tir_optimal_token_baseline")
ALONE = dict.fromkeys(BARE, "the score has no baseline") | {
    "reinforce_plus_plus_baseline": "the only baseline is the batch's mean",
    "rloo_vectorized": "every advantage is 0",
    "grpo_passk": "verl raises after the first rollout",
}
"""What verl's estimators make of groups of one response."""


def meant_preset(run: RunConfig) -> Iterator[Finding]:
    """A preset under a misspelt name: `+verl_ex=gdpo` would train with verl's own estimator."""
    presets = ConfigStore.instance().list(PRESETS)
    for key in map(str, run.config):
        given: Any = run.select(key) if nearest(key, [PRESETS], cutoff=0.75) is not None else None
        named: Any = OmegaConf.to_container(given) if OmegaConf.is_list(given) else [given]
        if any(f"{name}.yaml" in presets for name in named):
            yield Finding(f"{key} is no setting: a preset is +{PRESETS}=NAME, or `{PRESETS}: NAME` in `defaults`")


def of_other_rooms(run: RunConfig, *, every: bool) -> Iterator[Finding]:
    """The rules of other rooms and plugins: those for `every` run, such as one on the CPU, or the others."""
    for target in (target for target, for_every in hooks.RULES.items() if for_every is every):
        yield from hooks.resolve(target)(run)


def unknown_estimator(run: RunConfig) -> Iterator[Finding]:
    """A name that an entry point cannot have, or that is not registered here; an error for ours with letters moved."""
    if run.name in TAKEN and run.name in ENTRY_POINTS:
        yield Finding(
            f"the entry point {run.name}={ENTRY_POINTS[run.name]} has the name of another estimator, which would "
            "compute instead: rename it, or uninstall its package",
            fatal=run.computes,
        )
    known, word = {*registered(), *INSTALLED}, run.name.casefold()
    if run.name not in known:
        same = (name for name in INSTALLED if sorted(name) == sorted(word))  # `gdpo2` is not a misspelt `gd2po`
        yield Finding(
            f"algorithm.adv_estimator: {unknown('estimator', run.name, known)}; register one of your own "
            "in the trainer's process, by VERL_USE_EXTERNAL_MODULES or an entry point",
            fatal=any(all(a == b or not a.isdigit() for a, b in zip(name, word, strict=True)) for name in same),
        )


def unread(run: RunConfig) -> Iterator[Finding]:
    """Settings that nothing reads: a misspelt one of ours, one at the top level, or one of verl without its switch."""
    from verl.trainer.config import AlgoConfig

    yield from misspelt(run.config.algorithm, known={item.name for item in dataclasses.fields(AlgoConfig)})
    for key in set_in(run.config):
        yield Finding(f"{key} is not read at the top of the configuration: write algorithm.{key}")
    found = written()
    for start, switch, default, value in SWITCHES:
        # One that is off in so many words is a habit, as in `use_kl_loss=False kl_loss_coef=0.001`.
        if switch not in found and run.select(switch) == default:
            lost = [path for path in found if f"{path}.".startswith(start) and found[path][0] not in (None, 0, default)]
            hint = f"while {switch}={default}: set {switch}={value}, or remove it"
            yield from (_warning(f"verl does not read {path} {hint}") for path in lost)
    name, source = (run.select(f"reward.reward_manager.{item}") for item in ("name", "source"))
    reads = DAPO if name == "dapo" else ()
    lost = [path for path in found if path.startswith("reward.reward_kwargs.") and path.split(".", 2)[2] not in reads]
    if lost and source == "register" and name in ("dapo", "gdpo", "naive", "rate_limited", "remote"):
        manager = f"reward.reward_manager.name={name} does not read {', '.join(lost)}"
        yield _warning(f"{manager}: remove it, or set name=dapo, which reads {', '.join(DAPO)}")


def filter_of_groups(run: RunConfig) -> Iterator[Finding]:
    """verl's filter of groups, by our metric or with an estimator that it does not fit."""
    metric, rewards = run.filter, run.settings.rewards
    where = f"{FILTER}.metric={metric}"
    if metric == ACCURACY_BETWEEN and rewards.accuracy_key is None:
        yield Finding(f"{where} needs the name of the accuracy: set algorithm.rewards.accuracy_key=...")
    if (metric == ACCURACY_BETWEEN) != (rewards.accuracy_between is not None):
        yield Finding(
            f"{FILTER}.metric={ACCURACY_BETWEEN} and its bounds belong together: set both, with {FILTER}.enable=True "
            f"and for example 'algorithm.rewards.{ACCURACY_BETWEEN}=[0.05,0.95]', or neither"
        )
    if metric in (ANY_REWARD, ACCURACY_BETWEEN) and run.select("trainer.use_v1") is False:
        yield Finding(f"{where} works on verl's default trainer only: remove trainer.use_v1=False, or the filter")
    if run.chain is not None and run.chain.per_reward and metric == "reward":
        yield _warning(
            f"{where} drops groups of equal scores, from which {run.name} learns unless their rewards cancel: set "
            f"{FILTER}.metric={ANY_REWARD}"
        )


def experimental(run: RunConfig) -> Iterator[Finding]:
    """verl's experimental trainers: their configurations alone have a section `rollout`, and they do not call us."""
    if run.select("rollout") is not None and (run.ours or run.settings.rewards != RewardsSettings()):
        yield Finding(
            f"{run.name} and algorithm.rewards do not work in verl's experimental trainers: start "
            "verl.trainer.main_ppo, with trainer.v1.trainer_mode=separate_async"
        )


def without_effect(run: RunConfig) -> Iterator[Finding]:
    """Settings that the estimator in force does not read."""
    for section in sorted(changed(run.settings).keys() - {*run.used}):
        yield _warning(
            f"algorithm.{section} is set, but algorithm.adv_estimator={run.name} does not use it: remove it, or set "
            f"algorithm.adv_estimator={section}"
        )
    rewards, defaults = run.settings.rewards, RewardsSettings()
    if not run.computes:
        settings = ("weights", "rejected", "conditions")
        for setting in (name for name in settings if getattr(rewards, name) != getattr(defaults, name)):
            yield Finding(
                f"algorithm.rewards.{setting} has no effect on verl's {run.name}, which uses the score: remove it, or "
                f"set algorithm.adv_estimator to one of {listed(INSTALLED)}",
                fatal=setting == "conditions",
            )
        if run.settings.verl_ext.dump_dir is not None and rewards.keys is None:
            yield _warning(
                f"algorithm.verl_ext.dump_dir has no effect on verl's {run.name} without "
                "'algorithm.rewards.keys=[...]': set the keys, or remove it"
            )


def single_response(run: RunConfig) -> Iterator[Finding]:
    """Groups of one response, verl's default: nothing would be learnt, or without a baseline."""
    steps = () if run.chain is None else run.chain.steps
    compared = any(step.centers or step.compares or isinstance(step, DivideByMean) for step in steps)
    n = "actor_rollout_ref.rollout.n"
    if run.select(n) != 1:
        return
    if compared:
        why = "a single response to a prompt has nothing to be compared with, so every advantage is 0"
        yield Finding(f"{n}=1: {why}: set {n}=8, for example")
    elif run.name in ALONE and is_verls(registered().get(run.name)) and not run.select("distillation.enabled"):
        yield _warning(f"{n}=1 with verl's {run.name}: {ALONE[run.name]}: set {n}=8, for example")


def unlike_meant(run: RunConfig) -> Iterator[Finding]:
    """Settings with which any run learns nothing."""
    if run.select("algorithm.use_pf_ppo") and (run.name != "gae" or run.select("trainer.use_v1")):
        mixes = "gives rows the returns of others on verl's default trainer"
        effect = mixes if run.name == "gae" else f"has no effect on {run.name}"
        yield _warning(f"algorithm.use_pf_ppo=True {effect}: set algorithm.use_pf_ppo=False")
    n, rollout = run.select("actor_rollout_ref.rollout.n"), "actor_rollout_ref.rollout"
    for name, greedy, usual in (("temperature", 0, 1), ("top_k", 1, -1)):
        if n != 1 and run.select(f"{rollout}.{name}") == greedy:
            same = f"the {n} answers to a prompt are the same, and so are their rewards"
            yield _warning(f"{rollout}.{name}={greedy}: {same}: set {rollout}.{name}={usual}")
    warmup, steps = run.select(f"{ACTOR}.optim.lr_warmup_steps"), run.select("trainer.total_training_steps")
    updates = run.select(f"trainer.v1.{run.select('trainer.v1.trainer_mode')}.parameter_sync_step") or 1
    if all(isinstance(number, int) for number in (warmup, steps, updates)) and warmup >= steps * updates:
        yield _warning(f"{ACTOR}.optim.lr_warmup_steps={warmup} is not over after {steps} steps of training: lower it")
    files = (run.select(f"data.{name}") for name in ("train_files", "val_files"))
    train, val = ({*given} if OmegaConf.is_list(given) else {given} for given in files)
    validates = run.select("trainer.test_freq") not in (None, 0, -1) or run.select("trainer.val_before_train")
    if validates and train & val:
        yield _warning(f"data.val_files has {listed(train & val)} of data.train_files: name other files to validate on")


def part_of_checkpoint(run: RunConfig) -> Iterator[Finding]:
    """Checkpoints without the model or the optimizer, or a resume that does not read one of them."""
    for part in ("save_contents", "load_contents"):
        contents = run.select(f"{ACTOR}.checkpoint.{part}")
        lost = [name for name in ("model", "optimizer") if OmegaConf.is_list(contents) and name not in contents]
        if lost:
            where = f"{ACTOR}.checkpoint.{part}={[*contents]}"
            yield _warning(f"{where} lacks {listed(lost)}: a resumed run begins anew with it; add it")


def short_micro_batch(run: RunConfig) -> Iterator[Finding]:
    """Micro-batches of FSDP that may be shorter than one sequence: the first such sequence ends the run."""
    limit = f"{ACTOR}.ppo_max_token_len_per_gpu"
    length = sum(run.select(f"data.max_{part}_length") or 0 for part in ("prompt", "response"))
    ranks = (run.select(f"{ACTOR}.{part}ulysses_sequence_parallel_size") or 1 for part in ("", "fsdp_config."))
    dynamic = run.select(f"{ACTOR}.use_dynamic_bsz") and f"{run.select(f'{ACTOR}.strategy')}".startswith("fsdp")
    if dynamic and (tokens := run.select(limit)) is not None and tokens * max(ranks) < length:
        yield _warning(
            f"{limit}={tokens}, but a sequence may have {length} tokens (data.max_prompt_length, max_response_length), "
            f"at which verl ends the run: set {limit}={length}"
        )


def _warning(text: str) -> Finding:
    return Finding(text, fatal=False)


def missing_keys(run: RunConfig) -> Iterator[Finding]:
    """An estimator that works on each reward needs their names."""
    if run.chain is not None and run.chain.per_reward and run.settings.rewards.keys is None:
        source = run.select(f"{FUNCTION}.path") or "your reward function"
        yield Finding(
            f"{run.name} normalizes each reward separately: set 'algorithm.rewards.keys=[...]' to the keys that "
            f"{source} returns beside `score`"
        )


def contradicted_by_verl(run: RunConfig) -> Iterator[Finding]:
    """Settings of verl's that the steps cannot follow: KL in the reward, no division by the std."""
    if run.chain is None:
        return
    why = None
    if run.chain.per_reward:
        why = "which works on each reward separately: KL is added to one combined reward"
    elif any(isinstance(step, DivideByMean) for step in run.chain.steps):
        why = "which needs rewards of at least 0: KL may make them negative"
    elif run.settings.rewards.per_turn:
        why = "which gets rewards by turn: KL is added to the reward of a response"
    elif not any(isinstance(step, WeightedSum) for step in run.chain.steps):
        why = "whose sum is not weighted_sum, which adds KL"
    if run.settings.kl_in_reward and why is not None:
        yield Finding(
            f"algorithm.use_kl_in_reward=True does not work with {run.name}, {why}; set use_kl_in_reward=False and, to "
            f"keep a KL term, {ACTOR}.use_kl_loss=True"
        )
    for step in run.chain.steps:
        if step.divides_by_std and not run.settings.norm_by_std:
            yield Finding(
                f"algorithm.norm_adv_by_std_in_grpo=False contradicts the step {step.name} of {run.name}, which "
                f"divides by a spread of rewards. Remove this setting, or {_without_division(run)}"
            )


def _without_division(run: RunConfig) -> str:
    """Say how an estimator is used without its division by a spread."""
    settings = {
        "gdpo": "set algorithm.gdpo.scale=none",
        "dgpo": "set algorithm.dgpo.dgae=False",
        "compose": "leave the step out of your list",
    }
    found = [text for name, text in settings.items() if name in run.used]
    return found[0] if found else "choose an estimator without a division, for example drgrpo"


def rule_of_estimator(run: RunConfig) -> Iterator[Finding]:
    """The rules that estimators have beside their formulas."""
    for name in run.used if run.chain is not None else ():
        yield from load(name).rule(run.settings, run.select)


MEANT: tuple[Rule, ...] = (unknown_estimator, meant_preset, partial(of_other_rooms, every=True))
"""The rules for every run, also one that uses nothing of this package."""
ALWAYS: tuple[Rule, ...] = (
    *(unread, other_preset, late_preset, replaced_preset, unlike_meant, part_of_checkpoint, short_micro_batch),
)
"""The rules for every run with this package, and for `check`."""
READ: tuple[Rule, ...] = (
    *(wrong_components, lost_penalty, wrong_accuracy, filter_of_groups, lists_of_rewards),
    *(negative_rewards, without_effect, experimental, missing_keys, single_response, contradicted_by_verl, trial),
    *(rule_of_estimator, loss_of_verl, partial(of_other_rooms, every=False)),
)
"""Those that need the settings."""
OF_TRAINING: tuple[Rule, ...] = (unlike_meant, short_micro_batch, single_response)
"""Those about rollouts and updates, by which a run that only validates is not judged."""
