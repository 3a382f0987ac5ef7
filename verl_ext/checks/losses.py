"""Rules about verl's losses, which differ in their divisors: some do not follow the setting that an estimator needs."""

from collections.abc import Iterator, Mapping
from typing import Any

from verl_ext.core.post_sum import Balance
from verl_ext.errors import Finding
from verl_ext.methods.dgpo import balance_for
from verl_ext.methods.drgrpo import DrgrpoSettings
from verl_ext.run import Run
from verl_ext.run_config import ACTOR, is_verl_function

SELF_AGGREGATING: Mapping[str, frozenset[str]] = {
    "0.9.0": frozenset({"sapo", "geo_mean", "gspo"}),
    "0.9.1": frozenset({"sapo", "geo_mean"}),
}
"""The losses of each tested version of verl that average over sequences in their own way and ignore `loss_agg_mode`."""
LOSS, MODE = f"{ACTOR}.policy_loss.loss_mode", f"{ACTOR}.loss_agg_mode"


def balance_for_other_loss(run: Run) -> Iterator[Finding]:
    """Warn about a step `balance` that assumes another average than the one of the loss."""
    mode, loss = run.settings.loss_agg_mode, run.select(LOSS)
    for step in _balances(run):
        averages_over_sequences = aggregates_itself(loss)
        fitting = "sequence" if averages_over_sequences else balance_for(mode)
        if step.over == fitting:
            continue
        text = f"{MODE}={mode} does not average over {step.over}s"
        if averages_over_sequences:
            text = f"{LOSS}={loss} averages over sequences"
        yield Finding(
            "warning",
            f"{text}, but the step balance of {run.name} (over={step.over}) assumes an average over {step.over}s.",
            _fix_of_balance(run, fitting),
        )


def loss_against_drgrpo(run: Run) -> Iterator[Finding]:
    """Reject a loss that ignores the setting on which Dr. GRPO relies."""
    loss = run.select(LOSS)
    if _relies_on_loss_agg_mode(run) and aggregates_itself(loss):
        yield Finding(
            "error",
            f"{LOSS}={loss} ignores {MODE}, but Dr. GRPO needs {MODE}=seq-mean-token-sum-norm.",
            f"Set {LOSS}=vanilla, or ++algorithm.drgrpo.check_loss=False to keep your loss.",
        )


def unknown_loss(run: Run) -> Iterator[Finding]:
    """Warn about a loss of which it is not known whether it follows the setting on which the estimator relies."""
    loss = run.select(LOSS)
    if not _relies_on_loss_agg_mode(run) and not _balances(run):
        return
    if aggregates_itself(loss) is None:
        import verl

        yield Finding(
            "warning",
            f"{run.name} relies on {MODE}. verl_ext does not know whether {LOSS}={loss} follows it in verl "
            f"{verl.__version__} (known versions: {', '.join(SELF_AGGREGATING)}).",
            f"Set {LOSS}=vanilla, or use this loss only if its function in verl.trainer.ppo.core_algos passes "
            "loss_agg_mode on to agg_loss.",
        )


def _balances(run: Run) -> list[Balance]:
    return [step for step in run.chain.steps if isinstance(step, Balance)] if run.chain is not None else []


def _relies_on_loss_agg_mode(run: Run) -> bool:
    """Return whether the run uses Dr. GRPO, and its check of the loss is not switched off."""
    if run.chain is None or "drgrpo" not in run.methods:
        return False
    return run.settings.of("drgrpo", DrgrpoSettings).check_loss


def _fix_of_balance(run: Run, fitting: str) -> str:
    """Return the fix for a step `balance` that does not fit the loss; `fitting` is what the loss averages over."""
    if "dgpo" in run.methods:
        return f"Set ++algorithm.dgpo.balance={'sequence' if fitting == 'sequence' else 'auto'}."
    place = "algorithm.compose.steps" if "compose" in run.methods else run.name
    if fitting == "none":
        return f"Remove the step balance from {place}."
    return f"Use the step {{step: balance, over: {fitting}}} in {place}."


def aggregates_itself(loss: Any) -> bool | None:
    """Return whether a loss of verl averages token losses in its own way; None if that is unknown for this version.

    A custom loss is taken to follow `loss_agg_mode`, which verl passes to it.
    """
    import verl
    from verl.trainer.ppo import core_algos

    function = core_algos.POLICY_LOSS_REGISTRY.get(loss) if isinstance(loss, str) else None
    if not is_verl_function(function) or loss == "vanilla":
        return False
    known = SELF_AGGREGATING.get(verl.__version__)
    return None if known is None else loss in known
