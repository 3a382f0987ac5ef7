"""Rules about verl's losses: each divides by something else, and some do not do what an estimator relies on."""

from collections.abc import Iterator, Mapping
from typing import Any

from verl_ext.core.totals import Balance
from verl_ext.errors import Finding
from verl_ext.estimators.dgpo import balance_for
from verl_ext.estimators.drgrpo import DrgrpoSettings
from verl_ext.names import is_verls
from verl_ext.run_config import ACTOR, RunConfig

SELF_AGGREGATING: Mapping[str, frozenset[str]] = {
    "0.9.0": frozenset({"sapo", "geo_mean", "gspo"}),
    "0.9.1": frozenset({"sapo", "geo_mean"}),
}
"""The losses of each tested version of verl that average token losses in their own way and ignore `loss_agg_mode`."""


def loss_of_verl(run: RunConfig) -> Iterator[Finding]:
    """A loss that averages otherwise than Dr. GRPO or a balancing step, of dgpo or of a list, relies on."""
    if run.chain is None:
        return
    mode, loss = run.settings.loss_agg_mode, run.select(f"{ACTOR}.policy_loss.loss_mode")
    where, alone = f"{ACTOR}.policy_loss.loss_mode={loss}", aggregates_itself(loss)
    drgrpo = "drgrpo" in run.used and run.settings.of("drgrpo", DrgrpoSettings).check_loss
    balances = [step for step in run.chain.steps if isinstance(step, Balance)]
    for step in balances:
        if step.over != balance_for(mode):
            yield Finding(
                f"balance={step.over} does not fit {ACTOR}.loss_agg_mode={mode}, which needs {balance_for(mode)}: set "
                "algorithm.dgpo.balance=auto, or in a list of steps over, or leave the step out",
                fatal=False,
            )
        if step.over == "token" and alone:
            yield Finding(
                f"{where} averages over sequences and ignores loss_agg_mode: set algorithm.dgpo.balance=sequence (in a "
                "list of steps, over: sequence)",
                fatal=False,
            )
    if drgrpo and alone:
        yield Finding(
            f"{where} ignores loss_agg_mode, which Dr. GRPO needs: set {ACTOR}.policy_loss.loss_mode=vanilla, or "
            "algorithm.drgrpo.check_loss=False"
        )
    if alone is None and (drgrpo or balances):
        yield Finding(
            f"{where}: {run.name} relies on {ACTOR}.loss_agg_mode, which this loss may ignore in your version of verl "
            f"(known: {', '.join(SELF_AGGREGATING)}): look at verl.trainer.ppo.core_algos",
            fatal=False,
        )


def aggregates_itself(loss: Any) -> bool | None:
    """Return whether a loss of verl averages token losses in its own way; None if that is unknown for this version."""
    import verl
    from verl.trainer.ppo import core_algos

    function = core_algos.POLICY_LOSS_REGISTRY.get(loss) if isinstance(loss, str) else None
    if not is_verls(function) or loss == "vanilla":
        return False
    known = SELF_AGGREGATING.get(verl.__version__)
    return None if known is None else loss in known
