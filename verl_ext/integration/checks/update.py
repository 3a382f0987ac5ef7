"""The rule about `algorithm.verl_ext.skip_zero_advantage`: where rows without advantage change the update."""

from __future__ import annotations

from collections.abc import Iterator

from verl_ext.core.steps import DropConflicts
from verl_ext.core.totals import Whiten
from verl_ext.errors import Complaint
from verl_ext.integration.checks.read import ACTOR, RunConfig

SETTING = "algorithm.verl_ext.skip_zero_advantage"
CORRECTIONS = ("algorithm.rollout_correction", f"{ACTOR}.policy_loss.rollout_correction")
"""verl's loss reads the second, which RayPPOTrainer fills from the first."""
EXACT = ("vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "cispo", "bypass_mode")
"""verl's losses to which a row without advantage adds nothing."""
NOT_EXACT = {
    "geo_mean": "is a mean over the rows of a micro-batch",
    "dro": "has a gradient where the advantage is 0",
    "clip_cov": "chooses tokens among those of all rows",
    "kl_cov": "chooses tokens among those of all rows",
}


def skipped_rows(run: RunConfig) -> Iterator[Complaint]:
    """What a row without advantage adds to the update, so that it cannot be left out."""
    if not run.settings.verl_ext.skip_zero_advantage:
        return
    strategy, loss = run.select(f"{ACTOR}.strategy"), run.select(f"{ACTOR}.policy_loss.loss_mode")
    norm = run.settings.loss_agg_mode == "seq-mean-token-sum-norm" and run.select(f"{ACTOR}.loss_scale_factor") is None
    refused = (
        (strategy not in ("fsdp", "fsdp2"), "strategy", "is an engine that splits in its own way", "fsdp2"),
        (loss in NOT_EXACT, "policy_loss.loss_mode", NOT_EXACT.get(loss, ""), "vanilla"),
        (norm, "loss_scale_factor", "divides by the width of a micro-batch", "LENGTH"),
        (run.select(f"{ACTOR}.use_kl_loss"), "use_kl_loss", "has a gradient in every row", "False"),
        (run.select(f"{ACTOR}.entropy_coeff"), "entropy_coeff", "has a gradient in every row", "0"),
        (run.select(f"{ACTOR}.calculate_entropy"), "calculate_entropy", "would miss the rows left out", "False"),
    )
    lines = [(f"{ACTOR}.{name}", why, value) for applies, name, why, value in refused if applies]
    if run.select("distillation.enabled"):
        lines.append(("distillation.enabled", "has a gradient in every row", "False"))
    for path in CORRECTIONS:
        if run.select(f"{path}.loss_type") == "reinforce" and run.select(f"{path}.rollout_is_batch_normalize"):
            lines.append((f"{path}.rollout_is_batch_normalize", "divides by a mean over a micro-batch", "False"))
    for path, why, value in lines:
        yield Complaint(f"{SETTING}=True, but {path}={run.select(path)} {why}: set {path}={value}, or {SETTING}=False")
    if loss not in EXACT and loss not in NOT_EXACT:
        yield Complaint(
            f"{SETTING}=True: nobody has looked whether a row without advantage adds nothing to "
            f"{ACTOR}.policy_loss.loss_mode={loss}: set {ACTOR}.policy_loss.loss_mode=vanilla, or {SETTING}=False",
            fatal=False,
        )
    steps = run.chain.steps if run.chain is not None else ()
    drops = any(isinstance(step, DropConflicts) for step in steps)  # and leaves those rows at 0
    if not drops and any(isinstance(step, Whiten) and step.over == "token" for step in steps):
        yield Complaint(
            f"{SETTING}=True leaves out few rows, because whitening over tokens moves dead groups away from 0: set "
            "algorithm.gdpo.whiten=sequence (in a list of steps, over: sequence)",
            fatal=False,
        )
