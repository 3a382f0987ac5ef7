"""Rules about verl's losses, which differ in their divisors: some do not follow the setting that an estimator needs."""

from collections.abc import Iterator, Mapping
from typing import Any

from verl_ext.core.post_sum import Balance
from verl_ext.errors import Finding
from verl_ext.methods.dgpo import balance_for
from verl_ext.methods.drgrpo import DrgrpoSettings
from verl_ext.names import is_verl_function
from verl_ext.run import Run
from verl_ext.run_config import ACTOR

SELF_AGGREGATING: Mapping[str, frozenset[str]] = {
    "0.9.0": frozenset({"sapo", "geo_mean", "gspo"}),
    "0.9.1": frozenset({"sapo", "geo_mean"}),
}
"""The losses of each tested version of verl that average over sequences in their own way and ignore `loss_agg_mode`."""
LOSS, MODE = f"{ACTOR}.policy_loss.loss_mode", f"{ACTOR}.loss_agg_mode"


def loss_of_verl(run: Run) -> Iterator[Finding]:
    """Report a loss whose average is not the one on which Dr. GRPO or a step `balance` relies."""
    if run.chain is None:
        return
    mode, loss = run.settings.loss_agg_mode, run.select(LOSS)
    where, alone = f"{LOSS}={loss}", aggregates_itself(loss)
    drgrpo = "drgrpo" in run.methods and run.settings.of("drgrpo", DrgrpoSettings).check_loss
    balances = [step for step in run.chain.steps if isinstance(step, Balance)]
    for step in balances:
        fitting = "sequence" if alone else balance_for(mode)
        if step.over != fitting:
            text = f"{where} averages over sequences" if alone else f"{MODE}={mode} does not average over {step.over}s"
            yield Finding(
                "warning",
                f"{text}, but the step balance of {run.name} (over={step.over}) assumes an average over {step.over}s.",
                _balanced(run, fitting),
            )
    if drgrpo and alone:
        yield Finding(
            "error",
            f"{where} ignores {MODE}, but Dr. GRPO needs {MODE}=seq-mean-token-sum-norm.",
            f"Set {LOSS}=vanilla, or ++algorithm.drgrpo.check_loss=False to keep your loss.",
        )
    if alone is None and (drgrpo or balances):
        import verl

        yield Finding(
            "warning",
            f"{run.name} relies on {MODE}. verl_ext does not know whether {where} follows it in verl "
            f"{verl.__version__} (known versions: {', '.join(SELF_AGGREGATING)}).",
            f"Set {LOSS}=vanilla, or use this loss only if its function in verl.trainer.ppo.core_algos passes "
            "loss_agg_mode on to agg_loss.",
        )


def _balanced(run: Run, fitting: str) -> str:
    """Return the fix for a step `balance` that does not fit the loss; `fitting` is what the loss averages over."""
    if "dgpo" in run.methods:
        return f"Set ++algorithm.dgpo.balance={'sequence' if fitting == 'sequence' else 'auto'}."
    place = "algorithm.compose.steps" if "compose" in run.methods else run.name
    if fitting == "none":
        return f"Remove the step balance from {place}."
    return f"Use the step {{step: balance, over: {fitting}}} in {place}."


def aggregates_itself(loss: Any) -> bool | None:
    """Return whether a loss of verl averages token losses in its own way; None if that is unknown for this version."""
    import verl
    from verl.trainer.ppo import core_algos

    function = core_algos.POLICY_LOSS_REGISTRY.get(loss) if isinstance(loss, str) else None
    if not is_verl_function(function) or loss == "vanilla":
        return False
    known = SELF_AGGREGATING.get(verl.__version__)
    return None if known is None else loss in known
