"""The rules for a run's configuration: errors, warnings and notes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from verl_ext.core.chain import Chain
from verl_ext.errors import listed, nearest, unknown
from verl_ext.estimators import ESTIMATORS
from verl_ext.estimators.compose import try_out
from verl_ext.estimators.dgpo import DgpoSettings, balance_for
from verl_ext.estimators.drgrpo import DrgrpoSettings
from verl_ext.estimators.gdpo import GdpoSettings, whitening_of
from verl_ext.estimators.hadw import HadwSettings
from verl_ext.integration.compat.versions import SELF_AGGREGATING
from verl_ext.integration.config.idle import idle_accuracy, idle_groups, idle_history, idle_settings
from verl_ext.integration.config.read import select
from verl_ext.settings import ANY_REWARD, Settings

ACTOR = "actor_rollout_ref.actor"
# verl's losses that depend on the scale of the advantages.
SCALE_SENSITIVE = ("clip_cov", "kl_cov", "dro")


@dataclass(frozen=True)
class RunConfig:
    """A run's configuration, as the rules need it."""

    name: str
    settings: Settings
    chain: Chain | None
    config: Any

    @property
    def per_reward(self) -> bool:
        """Whether the estimator normalises each reward separately."""
        return self.chain is not None and self.chain.per_reward

    @property
    def used(self) -> set[str]:
        """The estimators whose settings apply: hadw and its base, or the estimator alone."""
        return {self.name, self.settings.of(HadwSettings).base} if self.name == "hadw" else {self.name}

    def select(self, path: str) -> Any:
        """An entry of the configuration, or None."""
        return select(self.config, path)


def _missing_keys(run: RunConfig) -> Iterator[str]:
    if run.settings.rewards.keys is None and run.per_reward:
        path = run.select("reward.custom_reward_function.path")
        source = f"the reward function in {path}" if path else "your reward function (verl's own return `acc` at most)"
        yield (
            f"{run.name} normalises each reward separately and needs their names: set algorithm.rewards.keys=[...] "
            f"(or algorithm.gdpo_reward_keys=[...]) to the keys that {source} returns beside `score`"
        )


def _no_weight(run: RunConfig) -> Iterator[str]:
    weights = run.settings.rewards.weights
    if weights is not None and not any(weights):
        yield (
            f"algorithm.rewards.weights={list(weights)} are all 0, so every advantage would be 0: give at least one "
            "reward a weight, or remove algorithm.rewards.weights, which makes each 1"
        )


def _conditions(run: RunConfig) -> Iterator[str]:
    keys = run.settings.rewards.keys
    if keys is None or not run.per_reward:
        return
    for step in run.chain.steps if run.chain is not None else ():
        for key, needed in getattr(step, "conditions", {}).items():
            for name in (key, needed.on):
                if name not in keys:
                    where = "compose.steps: condition" if run.name == "compose" else "gdpo.conditions"
                    yield f"algorithm.{where}: {unknown('reward', name, keys)} (algorithm.rewards.keys)"


def _composed(run: RunConfig) -> Iterator[str]:
    if run.name == "compose" and run.chain is not None and not any((*_missing_keys(run), *_conditions(run))):
        complaint = try_out(run.chain, run.settings)
        if complaint:
            yield complaint


def _drgrpo_loss(run: RunConfig) -> Iterator[str]:
    if "drgrpo" not in run.used or not run.settings.of(DrgrpoSettings).check_loss:
        return
    length = run.select("data.max_response_length") or "<data.max_response_length>"
    factor = run.select(f"{ACTOR}.loss_scale_factor")
    loss = run.select(f"{ACTOR}.policy_loss.loss_mode")
    wrong = []
    if run.settings.loss_agg_mode != "seq-mean-token-sum-norm":
        wrong.append(
            (f"{ACTOR}.loss_agg_mode={run.settings.loss_agg_mode}", f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm")
        )
    if factor is None:
        wrong.append(
            (
                f"{ACTOR}.loss_scale_factor=null, with which each micro-batch is divided by its own longest response",
                f"{ACTOR}.loss_scale_factor={length}",
            )
        )
    elif isinstance(factor, bool) or not (isinstance(factor, int | float) and factor > 0):
        wrong.append((f"{ACTOR}.loss_scale_factor={factor}", f"{ACTOR}.loss_scale_factor={length}"))
    if aggregates_itself(loss):
        wrong.append(
            (
                f"{ACTOR}.policy_loss.loss_mode={loss}, which ignores loss_agg_mode",
                f"{ACTOR}.policy_loss.loss_mode=vanilla",
            )
        )
    if wrong:
        yield (
            "Dr. GRPO is also a loss: a response's token losses are summed and divided by a constant. Found "
            + "; ".join(value for value, _ in wrong)
            + ". Add "
            + " ".join(override for _, override in wrong)
            + " (or algorithm.drgrpo.check_loss=False to train with another loss on purpose)"
        )


def aggregates_itself(loss: Any) -> bool | None:
    """Whether one of verl's losses averages token losses in its own way and ignores `loss_agg_mode`.

    None if that is unknown for this version of verl; always False for verl's default loss, `vanilla`.
    """
    import verl
    from verl.trainer.ppo import core_algos

    function = core_algos.POLICY_LOSS_REGISTRY.get(loss) if isinstance(loss, str) else None
    if function is None or function.__module__ != core_algos.__name__ or loss == "vanilla":
        return False
    known = SELF_AGGREGATING.get(verl.__version__)
    return None if known is None else loss in known


def _unknown_aggregation(run: RunConfig) -> Iterator[str]:
    loss = run.select(f"{ACTOR}.policy_loss.loss_mode")
    used, dgpo = run.used, run.settings.of(DgpoSettings)
    balance = balance_for(run.settings.loss_agg_mode) if dgpo.balance == "auto" else dgpo.balance
    matters = ("drgrpo" in used and run.settings.of(DrgrpoSettings).check_loss) or (
        "dgpo" in used and balance == "token"
    )
    if matters and aggregates_itself(loss) is None:
        import verl

        yield (
            f"{ACTOR}.policy_loss.loss_mode={loss}: whether this loss averages by {ACTOR}.loss_agg_mode="
            f"{run.settings.loss_agg_mode} is unknown for verl {verl.__version__} (known for "
            f"{', '.join(SELF_AGGREGATING)}), and {run.name} relies on it: look it up in verl.trainer.ppo.core_algos, "
            f"or set {ACTOR}.policy_loss.loss_mode=vanilla"
        )


def _unused_settings(run: RunConfig) -> Iterator[str]:
    # A setting at its default may come from a preset and changes nothing.
    for section in sorted(run.settings.own.keys() - run.used):
        yield (
            f"algorithm.{section} is set, but algorithm.adv_estimator={run.name} does not use it: remove it, or "
            f"set algorithm.adv_estimator={section}"
        )
    if run.name not in ESTIMATORS and run.settings.verl_ext.dump_dir is not None:
        yield (
            f"algorithm.verl_ext.dump_dir has no effect on verl's {run.name}: only advantages of verl_ext's "
            f"estimators are dumped ({listed(ESTIMATORS)})"
        )
    if run.name not in ESTIMATORS and run.settings.rewards.weights is not None:
        yield (
            f"algorithm.rewards.weights has no effect on verl's {run.name}, which uses the score and only logs the "
            f"rewards: remove it, or set algorithm.adv_estimator to one of {listed(ESTIMATORS)}"
        )


def _filtering(run: RunConfig) -> str | None:
    """The metric by which groups are filtered, or None."""
    rule = run.select("algorithm.filter_groups")
    if not isinstance(rule, Mapping | DictConfig):  # verl's own check reports anything else
        return None
    return str(run.select("algorithm.filter_groups.metric")) if run.select("algorithm.filter_groups.enable") else None


def _filtered_groups(run: RunConfig) -> Iterator[str]:
    metric = _filtering(run)
    if metric == "reward" and run.per_reward:
        yield (
            "algorithm.filter_groups.metric=reward drops groups whose total does not vary although single rewards do, "
            f"which {run.name} learns from: set algorithm.filter_groups.metric={ANY_REWARD}, which keeps them"
        )
    if metric == ANY_REWARD and not run.per_reward:
        yield (
            f"algorithm.filter_groups.metric={ANY_REWARD} keeps groups whose rewards vary although their total does "
            f"not: {run.name}, which uses the total, learns nothing from them; set "
            "algorithm.filter_groups.metric=reward"
        )


def filter_by_reward(run: RunConfig) -> Iterator[str]:
    """Errors in the use of our filter of groups, which works with any estimator."""
    metric = _filtering(run)
    if metric != ANY_REWARD:
        if metric is not None and nearest(metric, [ANY_REWARD], cutoff=0.8) is not None:
            yield f"algorithm.filter_groups.metric={metric} is unknown: set algorithm.filter_groups.metric={ANY_REWARD}"
        return
    where = f"algorithm.filter_groups.metric={ANY_REWARD}"
    if run.settings.rewards.keys is None:
        yield f"{where} needs the names of the rewards: set algorithm.rewards.keys=[...]"
    if run.select("trainer.use_v1") is False:
        yield f"{where} works on verl's default trainer: remove trainer.use_v1=False, or the filter"
    sampler = run.select("trainer.v1.sampler.custom_sampler.path")
    if sampler:
        yield (
            f"{where} is installed in verl's own replay buffers, and trainer.v1.sampler.custom_sampler.path={sampler} "
            "replaces them: remove one of the two"
        )


def _balance(run: RunConfig) -> Iterator[str]:
    if "dgpo" not in run.used:
        return
    matching, chosen = balance_for(run.settings.loss_agg_mode), run.settings.of(DgpoSettings).balance
    if chosen not in ("auto", "none", matching):
        yield (
            f"algorithm.dgpo.balance={chosen} does not fit {ACTOR}.loss_agg_mode={run.settings.loss_agg_mode}, whose "
            f"mean needs {matching}: set algorithm.dgpo.balance=auto"
        )
    loss = run.select(f"{ACTOR}.policy_loss.loss_mode")
    if (matching if chosen == "auto" else chosen) == "token" and aggregates_itself(loss):
        yield (
            f"{ACTOR}.policy_loss.loss_mode={loss} averages over sequences and ignores loss_agg_mode: set "
            "algorithm.dgpo.balance=sequence"
        )


def _composed_balance(run: RunConfig) -> Iterator[str]:
    matching = balance_for(run.settings.loss_agg_mode)
    for step in run.chain.steps if run.name == "compose" and run.chain is not None else ():
        if step.name == "balance" and (over := getattr(step, "over", matching)) != matching:
            remedy = "remove the step" if matching == "none" else f"write {{step: balance, over: {matching}}}"
            yield (
                f"algorithm.compose.steps: balance over={over} does not fit {ACTOR}.loss_agg_mode="
                f"{run.settings.loss_agg_mode}, whose mean needs {matching}: {remedy}"
            )


def _minibatches(run: RunConfig) -> Iterator[str]:
    if run.chain is None or all(step.name != "balance" for step in run.chain.steps):
        return
    batch = run.select("data.train_batch_size")
    mini = run.select(f"{ACTOR}.ppo_mini_batch_size")
    metric = "balance/z" if run.name == "compose" else "dgpo/balance_z"
    if isinstance(batch, int) and isinstance(mini, int) and batch > mini > 0:
        yield (
            f"the step balance computes one factor for the whole batch, which is exact for one update per step; data."
            f"train_batch_size={batch} with {ACTOR}.ppo_mini_batch_size={mini} makes several (as the authors' code "
            f"does): watch {metric}, or set {ACTOR}.ppo_mini_batch_size={batch}"
        )


def _scale_sensitive_loss(run: RunConfig) -> Iterator[str]:
    loss = run.select(f"{ACTOR}.policy_loss.loss_mode")
    if run.name in ESTIMATORS and loss in SCALE_SENSITIVE:
        yield (
            f"{ACTOR}.policy_loss.loss_mode={loss} depends on the scale of the advantages, which {run.name} changes: "
            "its thresholds may need tuning, or set loss_mode=vanilla"
        )


def _drgrpo_kl(run: RunConfig) -> Iterator[str]:
    if "drgrpo" in run.used and run.settings.of(DrgrpoSettings).check_loss and run.select(f"{ACTOR}.use_kl_loss"):
        yield (
            f"{ACTOR}.use_kl_loss=True: Dr. GRPO trains without a KL term; set {ACTOR}.use_kl_loss=False unless you "
            "want one"
        )


def _std_of_verl(run: RunConfig) -> Iterator[str]:
    settings = run.settings
    if (
        "gdpo" in run.used
        and settings.verl_keys
        and settings.of(GdpoSettings).scale == "std"
        and not settings.norm_by_std
    ):
        yield (
            "algorithm.norm_adv_by_std_in_grpo=False: rewards are not divided by their std per group; verl's own gdpo "
            "ignores this setting and divides: set algorithm.norm_adv_by_std_in_grpo=True to keep verl's numbers"
        )


def _whitening(run: RunConfig) -> Iterator[str]:
    if "gdpo" not in run.used or run.settings.of(GdpoSettings).whiten != "auto":
        return
    if whitening_of(run.settings) == "token":
        yield (
            "algorithm.gdpo.whiten is token (auto), as in verl's own gdpo, because the rewards are named by verl's "
            "algorithm.gdpo_reward_keys; the paper uses algorithm.gdpo.whiten=sequence"
        )
    else:
        yield (
            "algorithm.gdpo.whiten is sequence (auto), as in the paper, because the rewards are named by "
            "algorithm.rewards.keys; verl's own gdpo uses algorithm.gdpo.whiten=token"
        )


ERRORS = (_missing_keys, _no_weight, _conditions, _composed, _drgrpo_loss)
WARNINGS = (
    _unknown_aggregation,
    _unused_settings,
    idle_settings,
    idle_accuracy,
    idle_groups,
    idle_history,
    _std_of_verl,
    _filtered_groups,
    _balance,
    _composed_balance,
    _minibatches,
    _scale_sensitive_loss,
    _drgrpo_kl,
)
NOTES = (_whitening,)
"""These are logged at start-up for information."""
