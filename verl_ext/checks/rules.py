"""Rules about the configuration of a run; those about rewards and losses are in `rewards` and `losses`.

A rule yields a `Finding` for each problem of a run. An estimator may have a rule of its own in the file of its formula.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from verl_ext import hooks
from verl_ext.checks.dry_run import dry_run
from verl_ext.checks.losses import loss_of_verl
from verl_ext.checks.presets import late_preset, other_estimator, other_preset, replaced_preset, written
from verl_ext.checks.rewards import (
    filter_by_accuracy,
    lists_of_rewards,
    lost_penalty,
    negative_rewards,
    wrong_accuracy,
    wrong_components,
)
from verl_ext.conf import PRESETS
from verl_ext.errors import Finding, listed, nearest
from verl_ext.methods.drgrpo import DrgrpoSettings
from verl_ext.names import is_verl_function, registered
from verl_ext.registry import (
    ADDED_ESTIMATORS,
    ENTRY_POINT_GROUP,
    ENTRY_POINTS,
    RESERVED_NAMES,
    changed_sections,
    load,
    misspelled_settings,
)
from verl_ext.run import Run
from verl_ext.run_config import ACTOR, FILTER, FUNCTION, sections_in_use
from verl_ext.settings import ACCURACY_BETWEEN, ANY_REWARD, RewardsSettings

Rule = Callable[[Run], Iterator[Finding]]

KL_IN_LOSS, KL_IN_REWARD = f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward"
SWITCHES = (
    (f"{ACTOR}.kl_loss_", KL_IN_LOSS, False, "True"),
    ("algorithm.kl_", KL_IN_REWARD, False, "True"),
    (f"{FILTER}.", f"{FILTER}.enable", False, "True"),
    ("algorithm.rollout_correction.rollout_is_", "algorithm.rollout_correction.rollout_is", None, "token"),
    (f"{FUNCTION}.", f"{FUNCTION}.path", None, "FILE"),
    ("reward.reward_model.model_path.", "reward.reward_model.enable", False, "True"),
    (f"{ACTOR}.clip_ratio.", f"{ACTOR}.clip_ratio_low", 0.2, f"{{found}} {ACTOR}.clip_ratio_high={{found}}"),
)
"""Settings that verl reads only if another setting, the switch, is not at its default.

Each entry has the beginning of the settings' paths, the switch, its default, and a value with which verl reads them.
In this value, `found` is the value of the setting.
"""
DAPO = ("max_resp_len", *(f"overlong_buffer_cfg.{name}" for name in ("enable", "len", "penalty_factor", "log")))
"""The entries of `reward.reward_kwargs` that verl's reward manager `dapo` reads; verl's other managers read none."""
BARE = ("grpo", "grpo_vectorized", "rloo", "opo", "gpg", "optimal_token_baseline", "tir_optimal_token_baseline")
ALONE = dict.fromkeys(BARE, "the advantage is the score without a baseline") | {
    "reinforce_plus_plus_baseline": "the only baseline is the mean of the batch",
    "rloo_vectorized": "every advantage is 0",
    "grpo_passk": "verl raises an error after the first rollout",
}
"""What happens with `rollout.n=1`, by the name of verl's estimator."""


def meant_preset(run: Run) -> Iterator[Finding]:
    """Reject a preset under a misspelled name: `+verl_ex=gdpo` would train with verl's default estimator."""
    presets = ConfigStore.instance().list(PRESETS)
    for key in map(str, run.config):
        given: Any = run.select(key) if nearest(key, [PRESETS], cutoff=0.75) is not None else None
        named: Any = OmegaConf.to_container(given) if OmegaConf.is_list(given) else [given]
        if any(f"{name}.yaml" in presets for name in named):
            value = f"[{','.join(map(str, named))}]" if OmegaConf.is_list(given) else f"{given}"
            yield Finding(
                "error",
                f"The setting {key}={value} does not select a preset. Presets belong to the group {PRESETS} of Hydra.",
                f"Remove {key}={value}. Add '+{PRESETS}={value}' to the command line, or `{PRESETS}: {value}` to "
                "`defaults` in the configuration file.",
            )


def of_other_rooms(run: Run, *, every: bool) -> Iterator[Finding]:
    """Apply the rules of other subpackages and plugins: those for `every` run, such as one on the CPU, or the rest."""
    for target in (target for target, for_every in hooks.RULES.items() if for_every is every):
        yield from hooks.resolve(target)(run)


def unknown_estimator(run: Run) -> Iterator[Finding]:
    """Report a name that is not registered here, or that an entry point cannot have.

    An unknown name is an error if it is an anagram of a verl_ext estimator. Otherwise it is a warning, because the
    estimator may be registered later.
    """
    severity: Literal["error", "warning"]
    if run.name in RESERVED_NAMES and run.name in ENTRY_POINTS:
        severity = "error" if run.computes_advantages else "warning"
        yield Finding(
            severity,
            f"The entry point {run.name}={ENTRY_POINTS[run.name].value} is ignored, because another estimator "
            f"already has the name {run.name}. That estimator would compute the advantages.",
            "Rename the entry point in its package, or uninstall the package.",
        )
    known, word = {str(name) for name in (*registered(), *ADDED_ESTIMATORS)}, run.name.casefold()
    if run.name not in known:
        same = [name for name in ADDED_ESTIMATORS if sorted(name) == sorted(word)]
        # `gdpo2` is not a misspelled `gd2po`: digits must stay at their places.
        anagram = any(all(a == b or not a.isdigit() for a, b in zip(name, word, strict=True)) for name in same)
        severity = "error" if anagram else "warning"
        near = nearest(run.name, known)
        valid = f"to one of {listed(known)}" if near is None else f"to {near!r}, or to another of {listed(known)}"
        yield Finding(
            severity,
            f"algorithm.adv_estimator={run.name!r} is not the name of an estimator that is registered here.",
            f"Set algorithm.adv_estimator {valid}. A custom estimator must be registered in the trainer's process, by "
            f"a module in VERL_USE_EXTERNAL_MODULES or by an entry point in the group {ENTRY_POINT_GROUP}.",
        )


def unread(run: Run) -> Iterator[Finding]:
    """Report settings that are not read: misspelled, at the top level, or without the switch that verl needs."""
    from verl.trainer.config import AlgoConfig

    yield from misspelled_settings(run.config.algorithm, known={item.name for item in dataclasses.fields(AlgoConfig)})
    for key in sections_in_use(run.config):
        yield Finding(
            "error",
            f"The section {key} is at the top level of the configuration, where neither verl nor verl_ext reads it.",
            f"Use algorithm.{key} instead of {key}.",
        )
    found = written()
    for start, switch, default, value in SWITCHES:
        # A switch that is explicitly off is a habit, as in `use_kl_loss=False kl_loss_coef=0.001`.
        if switch not in found and run.select(switch) == default:
            state = f"{switch} is not set" if default is None else f"{switch}={default}"
            for path, (given, _) in found.items():
                if f"{path}.".startswith(start) and given not in (None, 0, default):
                    line = f"{switch}={value.format(found=given)}"
                    yield Finding(
                        "warning",
                        f"verl does not read {path}={given} while {state}.",
                        _with_switch(run, path, switch, line),
                    )
    yield from unread_by_manager(run, [*found])


def _with_switch(run: Run, path: str, switch: str, line: str) -> str:
    """Return the fix for a setting that verl does not read: the line with the switch, if the run is accepted with it.

    Edge cases: an estimator may reject KL in the reward, or warn about KL in the loss.
    """
    if switch == KL_IN_REWARD and why_not_kl_in_reward(run) is not None:
        in_loss = _kl_in_loss(run)
        instead = f" To train with a KL term, set {in_loss} and its coefficient {ACTOR}.kl_loss_coef."
        return f"Remove {path}." + (instead if in_loss else "")
    if switch == KL_IN_LOSS:
        line = _kl_in_loss(run)
    return f"Set {line}, or remove {path}." if line else f"Remove {path}."


def _kl_in_loss(run: Run) -> str:
    """Return the lines that add a KL term to the loss; empty if the estimator trains without one."""
    if "drgrpo" in run.methods and run.settings.of("drgrpo", DrgrpoSettings).check_loss:
        return ""
    skips = run.settings.verl_ext.skip_zero_advantage  # which is rejected with a KL term in the loss
    return f"{KL_IN_LOSS}=True" + (" algorithm.verl_ext.skip_zero_advantage=False" if skips else "")


def unread_by_manager(run: Run, found: list[str]) -> Iterator[Finding]:
    """Warn about entries of `reward.reward_kwargs` that verl's reward manager does not read; `found`: the settings."""
    name, source = (run.select(f"reward.reward_manager.{item}") for item in ("name", "source"))
    if source != "register" or name not in ("dapo", "gdpo", "naive", "rate_limited", "remote"):
        return
    given = [path for path in found if path.startswith("reward.reward_kwargs.")]
    of_dapo = [path for path in given if path.split(".", 2)[2] in DAPO]
    lost = [path for path in given if name != "dapo" or path not in of_dapo]
    if not lost:
        return
    paths, reads = ", ".join(lost), f"which reads {', '.join(DAPO)}"
    text = f"verl's reward manager does not read {paths} while reward.reward_manager.name={name}."
    # The penalty is a part of the score, which `keys` replaces and maxrl must not subtract from.
    penalized = run.chain is not None and (run.settings.rewards.keys is not None or "maxrl" in run.methods)
    if name == "dapo":
        fix = f"Remove {paths}. Use only entries of reward.reward_kwargs that dapo reads: {', '.join(DAPO)}."
    elif penalized or {*lost} - {*of_dapo}:
        fix = f"Remove {paths}."
    else:
        fix = f"Set reward.reward_manager.name=dapo, {reads}. Otherwise, remove {paths}."
    yield Finding("warning", text, fix)


def filter_of_groups(run: Run) -> Iterator[Finding]:
    """Check verl's filter of groups: the metrics of verl_ext, and an estimator that the metric does not fit."""
    metric, rewards = run.filter_metric, run.settings.rewards
    where, default_trainer = f"{FILTER}.metric={metric}", run.select("trainer.use_v1") is not False
    key = "++algorithm.rewards.accuracy_key=NAME, where NAME is the reward that is the accuracy"
    bounds = f"algorithm.rewards.{ACCURACY_BETWEEN}"
    if metric == ACCURACY_BETWEEN and rewards.accuracy_key is None:
        yield Finding(
            "error",
            f"{where} needs the name of the accuracy, but algorithm.rewards.accuracy_key is not set.",
            f"Set {key}.",
        )
    if metric == ACCURACY_BETWEEN and rewards.accuracy_between is None:
        yield Finding("error", f"{where} needs bounds, but {bounds} is not set.", f"Set '++{bounds}=[0.05,0.95]'.")
    if metric != ACCURACY_BETWEEN and rewards.accuracy_between is not None:
        lines = [f"{FILTER}.enable=True", f"{FILTER}.metric={ACCURACY_BETWEEN}"]
        lines += [key] if rewards.accuracy_key is None else []
        yield Finding(
            "error",
            f"{bounds}={[*rewards.accuracy_between]} has no effect, because verl does not filter groups by "
            f"{ACCURACY_BETWEEN}.",
            f"Set {' '.join(lines)}. Otherwise, remove {bounds}." if default_trainer else f"Remove {bounds}.",
        )
    if metric in (ANY_REWARD, ACCURACY_BETWEEN) and not default_trainer:
        removed = f" and remove {bounds}" if rewards.accuracy_between is not None else ""
        yield Finding(
            "error",
            f"{where} works only on verl's default trainer, but trainer.use_v1=False selects another trainer.",
            f"Remove trainer.use_v1=False, or set {FILTER}.enable=False{removed}.",
        )
    if run.chain is not None and run.chain.per_reward and metric == "reward":
        if rewards.per_turn or rewards.rubrics or not default_trainer:
            fix = filter_by_accuracy(run)
        else:
            fix = f"Set {FILTER}.metric={ANY_REWARD}."
        yield Finding(
            "warning",
            f"{where} drops groups whose responses have equal scores. {run.name} learns from such a group, except "
            "where the rewards of the group cancel.",
            fix,
        )


def experimental(run: Run) -> Iterator[Finding]:
    """Reject verl's experimental trainers, which do not call verl_ext.

    Only their configurations have a section `rollout`.
    """
    if run.select("rollout") is not None and (run.uses_verl_ext or run.settings.rewards != RewardsSettings()):
        yield Finding(
            "error",
            "The section `rollout` belongs to verl's experimental trainers, which do not call verl_ext. "
            f"algorithm.adv_estimator={run.name} and algorithm.rewards cannot be used there.",
            "Start verl.trainer.main_ppo with trainer.v1.trainer_mode=separate_async instead.",
        )


def without_effect(run: Run) -> Iterator[Finding]:
    """Report settings that the estimator in force does not read."""
    for section in sorted(changed_sections(run.settings).keys() - {*run.methods}):
        yield Finding(
            "warning",
            f"algorithm.{section} is set, but algorithm.adv_estimator={run.name} does not use it.",
            f"Remove algorithm.{section}, or {other_estimator(run, section)}.",
        )
    rewards, defaults = run.settings.rewards, RewardsSettings()
    if not run.computes_advantages:
        settings = ("weights", "rejected", "conditions")
        for setting in (name for name in settings if getattr(rewards, name) != getattr(defaults, name)):
            severity: Literal["error", "warning"] = "error" if setting == "conditions" else "warning"
            yield Finding(
                severity,
                f"algorithm.rewards.{setting} has no effect on verl's {run.name}, which reads only the score.",
                f"Remove algorithm.rewards.{setting}, or select an estimator of verl_ext. For example, "
                f"{other_estimator(run, 'weighted_grpo')}.",
            )
        if run.settings.verl_ext.dump_dir is not None and rewards.keys is None:
            yield Finding(
                "warning",
                f"algorithm.verl_ext.dump_dir={run.settings.verl_ext.dump_dir} has no effect on verl's {run.name} "
                "while algorithm.rewards.keys is not set.",
                "Set '++algorithm.rewards.keys=[...]' to the names of the rewards, or remove "
                "algorithm.verl_ext.dump_dir.",
            )


def single_response(run: Run) -> Iterator[Finding]:
    """Report groups of one response, which is verl's default: there is no signal, or no baseline."""
    steps = () if run.chain is None else run.chain.steps
    compared = any(step.centers or step.compares or step.zero_without_variance for step in steps)
    n = "actor_rollout_ref.rollout.n"
    if run.select(n) != 1:
        return
    if compared:
        yield Finding(
            "error",
            f"{n}=1 gives one response per prompt, but {run.name} compares the responses to a prompt. Every advantage "
            "would be 0.",
            f"Set {n}=8, for example.",
        )
    elif run.name in ALONE and is_verl_function(registered().get(run.name)) and not run.select("distillation.enabled"):
        yield Finding("warning", f"With {n}=1 and verl's {run.name}, {ALONE[run.name]}.", f"Set {n}=8, for example.")


def unlike_meant(run: Run) -> Iterator[Finding]:
    """Warn about settings that prevent learning, or that do not do what their name says."""
    if run.select("algorithm.use_pf_ppo") and (run.name != "gae" or run.select("trainer.use_v1")):
        if run.name == "gae":
            effect = "assigns responses the returns of other responses on verl's default trainer (trainer.use_v1=True)"
        else:
            effect = f"has no effect on algorithm.adv_estimator={run.name}"
        yield Finding("warning", f"algorithm.use_pf_ppo=True {effect}.", "Set algorithm.use_pf_ppo=False.")
    n, rollout = run.select("actor_rollout_ref.rollout.n"), "actor_rollout_ref.rollout"
    for name, greedy, usual in (("temperature", 0, 1), ("top_k", 1, -1)):
        if n != 1 and run.select(f"{rollout}.{name}") == greedy:
            yield Finding(
                "warning",
                f"With {rollout}.{name}={greedy}, the {n} responses to a prompt are identical, and so are their "
                "rewards.",
                f"Set {rollout}.{name}={usual}.",
            )
    yield from endless_warmup(run)
    files = (run.select(f"data.{name}") for name in ("train_files", "val_files"))
    train, val = ({*given} if OmegaConf.is_list(given) else {given} for given in files)
    validates = run.select("trainer.test_freq") not in (None, 0, -1) or run.select("trainer.val_before_train")
    if validates and train & val:
        yield Finding(
            "warning",
            f"data.val_files and data.train_files both contain {listed(train & val)}. The model would be validated on "
            "its training data.",
            "Set data.val_files to other files.",
        )


def endless_warmup(run: Run) -> Iterator[Finding]:
    """Warn about a warm-up that lasts as long as the training, or longer."""
    setting = f"{ACTOR}.optim.lr_warmup_steps"
    warmup, steps = run.select(setting), run.select("trainer.total_training_steps")
    per_step = run.select(f"trainer.v1.{run.select('trainer.v1.trainer_mode')}.parameter_sync_step") or 1
    if not all(isinstance(number, int) for number in (warmup, steps, per_step)):
        return
    updates = steps * per_step
    if warmup >= updates:
        yield Finding(
            "warning",
            f"{setting}={warmup} does not end before the training, which has {updates} updates "
            f"(trainer.total_training_steps={steps}). The learning rate would not reach its configured value.",
            f"Set {setting}={updates // 10}, for example.",
        )


def part_of_checkpoint(run: Run) -> Iterator[Finding]:
    """Warn about checkpoints without the model or the optimizer, and about a resume that does not read one of them."""
    for part in ("save_contents", "load_contents"):
        setting = f"{ACTOR}.checkpoint.{part}"
        contents = run.select(setting)
        lost = [name for name in ("model", "optimizer") if OmegaConf.is_list(contents) and name not in contents]
        if lost:
            yield Finding(
                "warning",
                f"{setting}={[*contents]} does not contain {listed(lost)}. A resumed run would start over without the "
                f"saved {' and '.join(lost)}.",
                f"Set '{setting}=[{','.join([*map(str, contents), *lost])}]'.",
            )


def short_micro_batch(run: Run) -> Iterator[Finding]:
    """Warn about FSDP micro-batches that may be shorter than one sequence: verl stops at the first such sequence."""
    limit = f"{ACTOR}.ppo_max_token_len_per_gpu"
    length = sum(run.select(f"data.max_{part}_length") or 0 for part in ("prompt", "response"))
    ranks = max(run.select(f"{ACTOR}.{part}ulysses_sequence_parallel_size") or 1 for part in ("", "fsdp_config."))
    dynamic = run.select(f"{ACTOR}.use_dynamic_bsz") and f"{run.select(f'{ACTOR}.strategy')}".startswith("fsdp")
    if dynamic and (tokens := run.select(limit)) is not None and tokens * ranks < length:
        yield Finding(
            "warning",
            f"{limit}={tokens} allows micro-batches of {tokens * ranks} tokens, but one sequence may have {length} "
            "tokens (data.max_prompt_length plus data.max_response_length). verl would stop at the first sequence that "
            "is too long.",
            f"Set {limit}={length}.",
        )


def missing_keys(run: Run) -> Iterator[Finding]:
    """Report an estimator that works on each reward separately, if the rewards have no names."""
    if run.chain is not None and run.chain.per_reward and run.settings.rewards.keys is None:
        source = run.select(f"{FUNCTION}.path") or "the reward function"
        yield Finding(
            "error",
            f"{run.name} works on each reward separately, but algorithm.rewards.keys is not set.",
            f"Set '++algorithm.rewards.keys=[...]' to the names of the rewards that {source} returns in addition to "
            "`score`.",
        )


def why_not_kl_in_reward(run: Run) -> str | None:
    """Return why the steps cannot follow `use_kl_in_reward=True`, as a sentence; None if they can."""
    if run.chain is None:
        return None
    if run.chain.per_reward:
        return f"{run.name} works on each reward separately, but verl adds the KL term to one combined reward."
    if any(step.needs_nonnegative for step in run.chain.steps):
        return f"{run.name} needs rewards of at least 0, but the KL term can make them negative."
    if run.settings.rewards.per_turn:
        return "algorithm.rewards.per_turn gives each turn a reward, but verl adds the KL term to whole responses."
    if not any(step.adds_kl for step in run.chain.steps):
        return f"{run.name} sums the rewards without the step weighted_sum, which is the step that adds the KL term."
    return None


def contradicted_by_verl(run: Run) -> Iterator[Finding]:
    """Reject settings of verl that the steps cannot follow: KL in the reward, and no division by the std."""
    if run.chain is None:
        return
    why = why_not_kl_in_reward(run)
    if run.settings.kl_in_reward and why is not None:
        in_loss = _kl_in_loss(run)
        yield Finding(
            "error",
            f"{KL_IN_REWARD}=True does not work with {run.name}. {why}",
            f"Set {KL_IN_REWARD}=False." + (f" To keep a KL term, also set {in_loss}." if in_loss else ""),
        )
    for step in run.chain.steps:
        if step.divides_by_std and not run.settings.norm_by_std:
            yield Finding(
                "error",
                f"algorithm.norm_adv_by_std_in_grpo=False contradicts the step {step.name} of {run.name}, which "
                "divides by the scale of the rewards.",
                f"Remove algorithm.norm_adv_by_std_in_grpo=False, or {_without_division(run, step.name)}.",
            )


def _without_division(run: Run, step: str) -> str:
    """Say how an estimator is used without its division by the scale of the rewards."""
    settings = {
        "gdpo": "set ++algorithm.gdpo.scale=none",
        "dgpo": "set ++algorithm.dgpo.dgae=False",
        "compose": f"remove {step} from algorithm.compose.steps",
    }
    found = [text for name, text in settings.items() if name in run.methods]
    return found[0] if found else other_estimator(run, "weighted_grpo")


def rule_of_estimator(run: Run) -> Iterator[Finding]:
    """Apply the rules that the estimators in force declare."""
    for name in run.methods if run.chain is not None else ():
        yield from load(name).rule(run.settings, run.select)


MEANT: tuple[Rule, ...] = (unknown_estimator, meant_preset, partial(of_other_rooms, every=True))
"""The rules for every run, including one that does not use verl_ext."""
ALWAYS: tuple[Rule, ...] = (
    *(unread, other_preset, late_preset, replaced_preset, unlike_meant, part_of_checkpoint, short_micro_batch),
)
"""The rules for every run that uses verl_ext, and for `check`."""
READ: tuple[Rule, ...] = (
    *(wrong_components, lost_penalty, wrong_accuracy, filter_of_groups, lists_of_rewards),
    *(negative_rewards, without_effect, experimental, missing_keys, single_response, contradicted_by_verl, dry_run),
    *(rule_of_estimator, loss_of_verl, partial(of_other_rooms, every=False)),
)
"""The rules that need the settings."""
OF_TRAINING: tuple[Rule, ...] = (unlike_meant, short_micro_batch, single_response)
"""The rules about rollouts and updates, which do not apply to a run that only validates."""
