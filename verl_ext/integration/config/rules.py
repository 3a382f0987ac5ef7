"""The rules of a run's configuration: what cannot work, and what is only doubtful."""

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
# Losses of verl which depend on the scale of the advantages.
SCALE_SENSITIVE = ("clip_cov", "kl_cov", "dro")


@dataclass(frozen=True)
class Given:
    """What the rules look at."""

    name: str
    settings: Settings
    chain: Chain | None
    config: Any

    @property
    def per_reward(self) -> bool:
        """Whether the estimator normalises each reward by itself."""
        return self.chain is not None and self.chain.per_reward

    @property
    def used(self) -> set[str]:
        """The estimators in force: hadw and its base, or the estimator alone."""
        return {self.name, self.settings.of(HadwSettings).base} if self.name == "hadw" else {self.name}

    def select(self, path: str) -> Any:
        """An entry of the configuration, None where there is none."""
        return select(self.config, path)


def _missing_keys(given: Given) -> Iterator[str]:
    if given.settings.rewards.keys is None and given.per_reward:
        path = given.select("reward.custom_reward_function.path")
        source = f"the reward function in {path}" if path else "your reward function (verl's own return `acc` at most)"
        yield (
            f"{given.name} normalises each reward by itself and needs their names: set algorithm.rewards.keys=[...] "
            f"(or algorithm.gdpo_reward_keys=[...]) to the keys that {source} returns beside `score`"
        )


def _no_weight(given: Given) -> Iterator[str]:
    weights = given.settings.rewards.weights
    if weights is not None and not any(weights):
        yield (
            f"algorithm.rewards.weights={list(weights)} are all 0, so every advantage would be 0: give at least one "
            "reward a weight, or remove algorithm.rewards.weights, which makes each 1"
        )


def _conditions(given: Given) -> Iterator[str]:
    keys = given.settings.rewards.keys
    if keys is None or not given.per_reward:
        return
    for step in given.chain.steps if given.chain is not None else ():
        for key, needed in getattr(step, "conditions", {}).items():
            for found in (key, needed.on):
                if found not in keys:
                    where = "compose.steps: condition" if given.name == "compose" else "gdpo.conditions"
                    yield f"algorithm.{where}: {unknown('reward', found, keys)} (algorithm.rewards.keys)"


def _composed(given: Given) -> Iterator[str]:
    if given.name == "compose" and given.chain is not None and not any((*_missing_keys(given), *_conditions(given))):
        complaint = try_out(given.chain, given.settings)
        if complaint:
            yield complaint


def _drgrpo_loss(given: Given) -> Iterator[str]:
    if "drgrpo" not in given.used or not given.settings.of(DrgrpoSettings).check_loss:
        return
    length = given.select("data.max_response_length") or "<data.max_response_length>"
    factor = given.select(f"{ACTOR}.loss_scale_factor")
    loss = given.select(f"{ACTOR}.policy_loss.loss_mode")
    wrong = []
    if given.settings.loss_agg_mode != "seq-mean-token-sum-norm":
        wrong.append(
            (f"{ACTOR}.loss_agg_mode={given.settings.loss_agg_mode}", f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm")
        )
    if factor is None:
        wrong.append(
            (
                f"{ACTOR}.loss_scale_factor=null, which divides each micro-batch by its own longest response",
                f"{ACTOR}.loss_scale_factor={length}",
            )
        )
    elif isinstance(factor, bool) or not (isinstance(factor, int | float) and factor > 0):
        wrong.append((f"{ACTOR}.loss_scale_factor={factor}", f"{ACTOR}.loss_scale_factor={length}"))
    if aggregates_itself(loss):
        wrong.append(
            (
                f"{ACTOR}.policy_loss.loss_mode={loss}, which aggregates in its own way",
                f"{ACTOR}.policy_loss.loss_mode=vanilla",
            )
        )
    if wrong:
        yield (
            "Dr. GRPO is also a loss: a response's token losses are summed and divided by a constant. Found "
            + "; ".join(found for found, _ in wrong)
            + ". Add "
            + " ".join(override for _, override in wrong)
            + " (or algorithm.drgrpo.check_loss=False to train with another loss on purpose)"
        )


def aggregates_itself(loss: Any) -> bool | None:
    """Whether one of verl's losses takes its mean in its own way, whatever `loss_agg_mode` says.

    None for a version of verl that this package does not know; verl's default, `vanilla`, never does.
    """
    import verl
    from verl.trainer.ppo import core_algos

    function = core_algos.POLICY_LOSS_REGISTRY.get(loss) if isinstance(loss, str) else None
    if function is None or function.__module__ != core_algos.__name__ or loss == "vanilla":
        return False
    known = SELF_AGGREGATING.get(verl.__version__)
    return None if known is None else loss in known


def _unknown_aggregation(given: Given) -> Iterator[str]:
    loss = given.select(f"{ACTOR}.policy_loss.loss_mode")
    used, dgpo = given.used, given.settings.of(DgpoSettings)
    balance = balance_for(given.settings.loss_agg_mode) if dgpo.balance == "auto" else dgpo.balance
    matters = ("drgrpo" in used and given.settings.of(DrgrpoSettings).check_loss) or (
        "dgpo" in used and balance == "token"
    )
    if matters and aggregates_itself(loss) is None:
        import verl

        yield (
            f"{ACTOR}.policy_loss.loss_mode={loss}: whether this loss takes its mean by {ACTOR}.loss_agg_mode="
            f"{given.settings.loss_agg_mode} is not known for verl {verl.__version__} (known for "
            f"{', '.join(SELF_AGGREGATING)}), and {given.name} relies on it: look into verl.trainer.ppo.core_algos, or "
            f"set {ACTOR}.policy_loss.loss_mode=vanilla"
        )


def _unused_settings(given: Given) -> Iterator[str]:
    # What stands at its default may come from a preset, and changes nothing.
    for section in sorted(given.settings.own.keys() - given.used):
        yield (
            f"algorithm.{section} is set, but algorithm.adv_estimator={given.name} does not use it: remove it, or "
            f"set algorithm.adv_estimator={section}"
        )
    if given.name not in ESTIMATORS and given.settings.verl_ext.dump_dir is not None:
        yield (
            f"algorithm.verl_ext.dump_dir has no effect on verl's {given.name}: only advantages of verl_ext's "
            f"estimators are dumped ({listed(ESTIMATORS)})"
        )
    if given.name not in ESTIMATORS and given.settings.rewards.weights is not None:
        yield (
            f"algorithm.rewards.weights has no effect on verl's {given.name}, which takes the score; the rewards are "
            f"only logged: remove it, or set algorithm.adv_estimator to one of {listed(ESTIMATORS)}"
        )


def _filtering(given: Given) -> str | None:
    """The metric by which groups are filtered."""
    rule = given.select("algorithm.filter_groups")
    if not isinstance(rule, Mapping | DictConfig):  # verl's own check says what is wrong with anything else
        return None
    return (
        str(given.select("algorithm.filter_groups.metric")) if given.select("algorithm.filter_groups.enable") else None
    )


def _filtered_groups(given: Given) -> Iterator[str]:
    metric = _filtering(given)
    if metric == "reward" and given.per_reward:
        yield (
            "algorithm.filter_groups.metric=reward drops groups whose total does not vary although single rewards do, "
            f"which {given.name} learns from: set algorithm.filter_groups.metric={ANY_REWARD}, which keeps them"
        )
    if metric == ANY_REWARD and not given.per_reward:
        yield (
            f"algorithm.filter_groups.metric={ANY_REWARD} keeps groups whose rewards vary although their total does "
            f"not: {given.name}, which takes the total, learns nothing from them; set "
            "algorithm.filter_groups.metric=reward"
        )


def filter_by_reward(given: Given) -> Iterator[str]:
    """A filter of this package, which stands under any estimator, where it cannot work."""
    metric = _filtering(given)
    if metric != ANY_REWARD:
        if metric is not None and nearest(metric, [ANY_REWARD], cutoff=0.75) is not None:
            yield f"algorithm.filter_groups.metric={metric} is unknown: set algorithm.filter_groups.metric={ANY_REWARD}"
        return
    where = f"algorithm.filter_groups.metric={ANY_REWARD}"
    if given.settings.rewards.keys is None:
        yield f"{where} needs the names of the rewards: set algorithm.rewards.keys=[...]"
    if given.select("trainer.use_v1") is False:
        yield f"{where} works on verl's default trainer: remove trainer.use_v1=False, or the filter"
    sampler = given.select("trainer.v1.sampler.custom_sampler.path")
    if sampler:
        yield (
            f"{where} takes its place in verl's own replay buffers, and trainer.v1.sampler.custom_sampler.path="
            f"{sampler} filters by itself: remove one of the two"
        )


def _balance(given: Given) -> Iterator[str]:
    if "dgpo" not in given.used:
        return
    fitting, chosen = balance_for(given.settings.loss_agg_mode), given.settings.of(DgpoSettings).balance
    if chosen not in ("auto", "none", fitting):
        yield (
            f"algorithm.dgpo.balance={chosen} does not fit {ACTOR}.loss_agg_mode={given.settings.loss_agg_mode}, whose "
            f"mean calls for {fitting}: set algorithm.dgpo.balance=auto"
        )
    loss = given.select(f"{ACTOR}.policy_loss.loss_mode")
    if (fitting if chosen == "auto" else chosen) == "token" and aggregates_itself(loss):
        yield (
            f"{ACTOR}.policy_loss.loss_mode={loss} takes its mean over sequences whatever loss_agg_mode says: set "
            "algorithm.dgpo.balance=sequence"
        )


def _composed_balance(given: Given) -> Iterator[str]:
    fitting = balance_for(given.settings.loss_agg_mode)
    for step in given.chain.steps if given.name == "compose" and given.chain is not None else ():
        if step.name == "balance" and (over := getattr(step, "over", fitting)) != fitting:
            remedy = "take it out" if fitting == "none" else f"write {{step: balance, over: {fitting}}}"
            yield (
                f"algorithm.compose.steps: balance over={over} does not fit {ACTOR}.loss_agg_mode="
                f"{given.settings.loss_agg_mode}, whose mean calls for {fitting}: {remedy}"
            )


def _minibatches(given: Given) -> Iterator[str]:
    if given.chain is None or all(step.name != "balance" for step in given.chain.steps):
        return
    batch = given.select("data.train_batch_size")
    mini = given.select(f"{ACTOR}.ppo_mini_batch_size")
    metric = "balance/z" if given.name == "compose" else "dgpo/balance_z"
    if isinstance(batch, int) and isinstance(mini, int) and batch > mini > 0:
        yield (
            f"the factor of the step balance is one of the whole batch, exact for one update a step; data."
            f"train_batch_size={batch} with {ACTOR}.ppo_mini_batch_size={mini} makes several (so it is in the authors' "
            f"code too): watch {metric}, or set {ACTOR}.ppo_mini_batch_size={batch}"
        )


def _scale_sensitive_loss(given: Given) -> Iterator[str]:
    loss = given.select(f"{ACTOR}.policy_loss.loss_mode")
    if given.name in ESTIMATORS and loss in SCALE_SENSITIVE:
        yield (
            f"{ACTOR}.policy_loss.loss_mode={loss} depends on the scale of the advantages, which {given.name} changes: "
            "its thresholds may need tuning, or set loss_mode=vanilla"
        )


def _drgrpo_kl(given: Given) -> Iterator[str]:
    if "drgrpo" in given.used and given.settings.of(DrgrpoSettings).check_loss and given.select(f"{ACTOR}.use_kl_loss"):
        yield (
            f"{ACTOR}.use_kl_loss=True: Dr. GRPO trains without a KL term; set {ACTOR}.use_kl_loss=False unless it is "
            "meant"
        )


def _std_of_verl(given: Given) -> Iterator[str]:
    settings = given.settings
    if (
        "gdpo" in given.used
        and settings.verl_keys
        and settings.of(GdpoSettings).scale == "std"
        and not settings.norm_by_std
    ):
        yield (
            "algorithm.norm_adv_by_std_in_grpo=False: rewards are not divided by their std in the group; verl's own "
            "gdpo ignores this setting and divides: set algorithm.norm_adv_by_std_in_grpo=True to keep verl's numbers"
        )


def _whitening(given: Given) -> Iterator[str]:
    if "gdpo" not in given.used or given.settings.of(GdpoSettings).whiten != "auto":
        return
    if whitening_of(given.settings) == "token":
        yield (
            "algorithm.gdpo.whiten is token (auto), as in verl's own gdpo, because the rewards are named by verl's "
            "algorithm.gdpo_reward_keys; the paper has algorithm.gdpo.whiten=sequence"
        )
    else:
        yield (
            "algorithm.gdpo.whiten is sequence (auto), as in the paper, because the rewards are named by "
            "algorithm.rewards.keys; verl's own gdpo has algorithm.gdpo.whiten=token"
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
"""What is logged at start-up for information."""
