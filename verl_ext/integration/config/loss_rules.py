"""The rules on verl's loss: what it must be for an estimator, and what its mean needs of the advantages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from verl_ext.estimators import ESTIMATORS
from verl_ext.estimators.dgpo import DgpoSettings, balance_for
from verl_ext.estimators.drgrpo import DrgrpoSettings
from verl_ext.integration.config.run_config import RunConfig

SELF_AGGREGATING = {"0.9.0": frozenset({"sapo", "geo_mean", "gspo"}), "0.9.1": frozenset({"sapo", "geo_mean"})}

ACTOR = "actor_rollout_ref.actor"
# verl's losses that depend on the scale of the advantages.
SCALE_SENSITIVE = ("clip_cov", "kl_cov", "dro")


def _drgrpo_loss(run: RunConfig) -> Iterator[str]:
    if "drgrpo" not in run.used or not run.settings.of(DrgrpoSettings).check_loss:
        return
    length = run.select("data.max_response_length") or "<data.max_response_length>"
    factor = run.select(f"{ACTOR}.loss_scale_factor")
    loss = run.select(f"{ACTOR}.policy_loss.loss_mode")
    found, add = [], []
    if run.settings.loss_agg_mode != "seq-mean-token-sum-norm":
        found.append(f"{ACTOR}.loss_agg_mode={run.settings.loss_agg_mode}")
        add.append(f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm")
    if isinstance(factor, bool) or not (isinstance(factor, int | float) and factor > 0):
        why = ", with which each micro-batch is divided by its own longest response" if factor is None else ""
        found.append(f"{ACTOR}.loss_scale_factor={'null' if factor is None else factor}{why}")
        add.append(f"{ACTOR}.loss_scale_factor={length}")
    if aggregates_itself(loss):
        found.append(f"{ACTOR}.policy_loss.loss_mode={loss}, which ignores loss_agg_mode")
        add.append(f"{ACTOR}.policy_loss.loss_mode=vanilla")
    if found:
        yield (
            "Dr. GRPO is also a loss: a response's token losses are summed and divided by a constant. Found "
            f"{'; '.join(found)}. Add {' '.join(add)} (or algorithm.drgrpo.check_loss=False to train with another loss "
            "on purpose)"
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


def _balance(run: RunConfig) -> Iterator[str]:
    if "dgpo" not in run.used:
        return
    matching, chosen = balance_for(run.settings.loss_agg_mode), run.settings.of(DgpoSettings).balance
    if chosen not in ("auto", "none", matching):
        yield (
            f"algorithm.dgpo.balance={chosen} does not fit {ACTOR}.loss_agg_mode={run.settings.loss_agg_mode}, whose "
            f"mean needs balance={matching}: set algorithm.dgpo.balance=auto"
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
                f"{run.settings.loss_agg_mode}, whose mean needs over: {matching}: {remedy}"
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


ERRORS = (_drgrpo_loss,)
WARNINGS = (_unknown_aggregation, _balance, _composed_balance, _minibatches, _scale_sensitive_loss, _drgrpo_kl)
