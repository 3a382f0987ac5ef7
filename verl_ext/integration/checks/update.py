"""The rule about `skip_zero_advantage` and `share_prompts`: where they would change the update, or cannot work."""

from __future__ import annotations

from collections.abc import Iterator

from verl_ext.core.steps import DropConflicts
from verl_ext.core.totals import Whiten
from verl_ext.errors import Complaint
from verl_ext.integration.checks.read import ACTOR, RunConfig

SKIP = "algorithm.verl_ext.skip_zero_advantage"
SHARE = "algorithm.verl_ext.share_prompts"
ENGINES = tuple(f"actor_rollout_ref.{part}" for part in ("actor", "actor.fsdp_config", "ref", "ref.fsdp_config"))
CORRECTIONS = ("algorithm.rollout_correction", f"{ACTOR}.policy_loss.rollout_correction")
"""verl's loss reads the second, which RayPPOTrainer fills from the first."""
EXACT = ("vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "cispo", "bypass_mode")
"""verl's losses to which a row without advantage adds nothing."""
NOT_EXACT = {
    "geo_mean": "is a mean over the rows of a micro-batch",
    "dro": "has a gradient where the advantage is 0",
    "clip_cov": "chooses tokens among those of a micro-batch",
    "kl_cov": "chooses tokens among those of a micro-batch",
}
ROWS = (
    (f"{ACTOR}.use_kl_loss", False, "has a gradient in every row"),
    (f"{ACTOR}.entropy_coeff", 0, "has a gradient in every row"),
    (f"{ACTOR}.calculate_entropy", False, "would miss the rows left out"),
    ("distillation.enabled", False, "has a gradient in every row"),
)
"""Settings of verl, the value with which rows can be left out, and what others do."""
PACKED = (
    (f"{ACTOR}.use_dynamic_bsz", True, "fixes the rows of a micro-batch"),
    ("actor_rollout_ref.rollout.log_prob_use_dynamic_bsz", True, "fixes the rows of a micro-batch"),
    ("actor_rollout_ref.ref.log_prob_use_dynamic_bsz", True, "fixes the rows of a micro-batch"),
    *((f"{engine}.ulysses_sequence_parallel_size", 1, "divides a sequence among ranks") for engine in ENGINES),
    *((f"{engine}.pad_to_length", False, "fixes the length of a sequence") for engine in ENGINES),
    ("actor_rollout_ref.model.use_fused_kernels", False, "hides the logits of the model"),
    (f"{ACTOR}.shuffle", False, "separates the rows of a prompt"),
    ("distillation.enabled", False, "reads the logits of whole rows"),
)
"""Those with which a prompt can be computed once."""


def shorter_update(run: RunConfig) -> Iterator[Complaint]:
    """What a row without advantage adds to the update, what depends on a micro-batch, and what cannot be packed."""
    own = run.settings.verl_ext
    asked = [name for name, on in ((SKIP, own.skip_zero_advantage), (SHARE, own.share_prompts)) if on]
    if not asked:
        return
    loss, norm = run.select(f"{ACTOR}.policy_loss.loss_mode"), run.settings.loss_agg_mode == "seq-mean-token-sum-norm"
    lines: list[tuple[str, str, object, str]] = [
        (setting, path, value, why)
        for setting, needs in ((SKIP, ROWS), (SHARE, PACKED))
        for path, value, why in needs
        if setting in asked and run.select(path) not in (None, value)
    ]
    if run.select(f"{ACTOR}.strategy") not in ("fsdp", "fsdp2"):
        lines.append((asked[0], f"{ACTOR}.strategy", "fsdp2", "is an engine that splits in its own way"))
    if loss in NOT_EXACT and (loss != "dro" or SKIP in asked):
        lines.append((asked[0], f"{ACTOR}.policy_loss.loss_mode", "vanilla", NOT_EXACT[loss]))
    if norm and run.select(f"{ACTOR}.loss_scale_factor") is None:
        lines.append((asked[0], f"{ACTOR}.loss_scale_factor", "LENGTH", "divides by the width of a micro-batch"))
    for path in CORRECTIONS:
        if run.select(f"{path}.loss_type") == "reinforce" and run.select(f"{path}.rollout_is_batch_normalize"):
            lines.append(
                (asked[0], f"{path}.rollout_is_batch_normalize", False, "divides by a mean over a micro-batch")
            )
    for setting, path, value, why in lines:
        yield Complaint(f"{setting}=True, but {path}={run.select(path)} {why}: set {path}={value}, or {setting}=False")
    if SKIP not in asked:
        return
    if loss not in EXACT and loss not in NOT_EXACT:
        yield Complaint(
            f"{SKIP}=True: nobody has looked whether a row without advantage adds nothing to "
            f"{ACTOR}.policy_loss.loss_mode={loss}: set {ACTOR}.policy_loss.loss_mode=vanilla, or {SKIP}=False",
            fatal=False,
        )
    steps = run.chain.steps if run.chain is not None else ()
    drops = any(isinstance(step, DropConflicts) for step in steps)  # and leaves those rows at 0
    if not drops and any(isinstance(step, Whiten) and step.over == "token" for step in steps):
        yield Complaint(
            f"{SKIP}=True leaves out few rows, because whitening over tokens moves dead groups away from 0: set "
            "algorithm.gdpo.whiten=sequence (in a list of steps, over: sequence)",
            fatal=False,
        )
