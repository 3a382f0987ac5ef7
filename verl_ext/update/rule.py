"""Rules about `skip_zero_advantage` and `share_prompts`: where they cannot work, and where they help."""

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec

import torch
from omegaconf import OmegaConf

from verl_ext.errors import Finding
from verl_ext.run_config import ACTOR, RunConfig, read_settings

SKIP = "algorithm.verl_ext.skip_zero_advantage"
SHARE = "algorithm.verl_ext.share_prompts"
BOTH = (SKIP, SHARE)
MODEL = "actor_rollout_ref.model"
ATTENTION = f"{MODEL}.override_config.attn_implementation"
FUSED = f"{MODEL}.use_fused_kernels=True {MODEL}.fused_kernel_options.impl_backend=torch"
PADDED = f"++{ATTENTION}=sdpa {MODEL}.use_remove_padding=False {FUSED}"
PACKED = f"++{ATTENTION}=sdpa {MODEL}.use_remove_padding=False ++{SHARE}=True {ACTOR}.use_dynamic_bsz=True"
"""Every pass of actor and reference is packed, with the attention and the log-probabilities of this package."""
ENGINES = tuple(f"actor_rollout_ref.{part}" for part in ("actor", "actor.fsdp_config", "ref", "ref.fsdp_config"))
LOSS = f"{ACTOR}.policy_loss.loss_mode"
EXACT = ("vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "cispo", "bypass_mode")
"""verl's losses to which a row without advantage adds nothing."""
NOT_EXACT = {
    "geo_mean": (BOTH, "is a mean over the rows of a micro-batch"),
    "clip_cov": (BOTH, "chooses tokens among those of a micro-batch"),
    "kl_cov": (BOTH, "chooses tokens among those of a micro-batch"),
    "dro": ((SKIP,), "has a gradient where the advantage is 0"),
}
NEEDS: tuple[tuple[tuple[str, ...], str, tuple[object, ...], str], ...] = (
    (BOTH, f"{ACTOR}.strategy", ("fsdp2", "fsdp"), "is an engine that splits in its own way"),
    (BOTH, "distillation.enabled", (False,), "has a gradient in every row, and reads whole rows"),
    ((SKIP,), f"{ACTOR}.use_kl_loss", (False,), "has a gradient in every row"),
    ((SKIP,), f"{ACTOR}.entropy_coeff", (0,), "has a gradient in every row"),
    ((SKIP,), f"{ACTOR}.calculate_entropy", (False,), "would miss the rows left out"),
    ((SHARE,), f"{ACTOR}.use_dynamic_bsz", (True,), "fixes the rows of a micro-batch"),
    ((SHARE,), "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz", (True,), "fixes the rows of a micro-batch"),
    ((SHARE,), "actor_rollout_ref.ref.log_prob_use_dynamic_bsz", (True,), "fixes the rows of a micro-batch"),
    *(((SHARE,), f"{engine}.ulysses_sequence_parallel_size", (1,), "divides a sequence") for engine in ENGINES),
    *(((SHARE,), f"{engine}.pad_to_length", (False,), "fixes the length of a sequence") for engine in ENGINES),
    *(((SHARE,), f"{engine}.full_determinism", (False,), "is not kept by flash attention") for engine in ENGINES),
    ((SHARE,), f"{MODEL}.use_fused_kernels", (False,), "hides the logits of the model"),
    ((SHARE,), f"{ACTOR}.shuffle", (False,), "separates the rows of a prompt"),
)
"""What must be so for which settings: an entry of verl's configuration, its valid values, and what others do."""


def rule(run: RunConfig) -> Iterator[Finding]:
    """What is wrong in the configuration of a run."""
    yield from shorter_update(run)
    yield from without_flash_attn(run)


def shorter_update(run: RunConfig) -> Iterator[Finding]:
    """What a row without advantage adds to the update, what depends on a micro-batch, and what cannot be packed."""
    settings = run.settings.verl_ext
    asked = {SKIP: settings.skip_zero_advantage, SHARE: settings.share_prompts}
    if not any(asked.values()):
        return
    loss, needs = run.select(LOSS), [*NEEDS]
    if loss in NOT_EXACT:
        needs.append((NOT_EXACT[loss][0], LOSS, ("vanilla",), NOT_EXACT[loss][1]))
    if run.settings.loss_agg_mode == "seq-mean-token-sum-norm" and run.select(f"{ACTOR}.loss_scale_factor") is None:
        yield Finding(
            f"{SKIP} and {SHARE} need {ACTOR}.loss_scale_factor, or the loss is divided by the width of a micro-batch: "
            f"set {ACTOR}.loss_scale_factor=LENGTH, or {SKIP}=False {SHARE}=False"
        )
    # verl's loss reads the second, which RayPPOTrainer fills from the first.
    for path in ("algorithm.rollout_correction", f"{ACTOR}.policy_loss.rollout_correction"):
        if run.select(f"{path}.loss_type") == "reinforce":
            whole = f"{path}.rollout_is_batch_normalize"
            needs.append((BOTH, whole, (False,), "divides by a mean over a micro-batch"))
    for names, path, valid, why in needs:
        wanted, value = [name for name in names if asked[name]], run.select(path)
        if wanted and value not in (None, *valid):
            remedy = f"set {path}={valid[0]}, or {'=False '.join(wanted)}=False"
            yield Finding(f"{'=True '.join(wanted)}=True, but {path}={value} {why}: {remedy}")
    if settings.skip_zero_advantage and loss not in EXACT and loss not in NOT_EXACT:
        yield Finding(
            f"{SKIP}=True: nobody has looked whether a row without advantage adds nothing to {LOSS}={loss}: set "
            f"{LOSS}=vanilla, or {SKIP}=False",
            fatal=False,
        )


def without_flash_attn(run: RunConfig) -> Iterator[Finding]:
    """On a GPU without flash-attn verl's defaults load no model, and compute log-probabilities in a loop."""
    if find_spec("flash_attn") or not torch.cuda.is_available():
        return
    default, settings, missing = "flash_attention_2", run.settings.verl_ext, "flash-attn is not installed here"
    if (run.select(ATTENTION) or default) == default and not find_spec("kernels"):
        entries = OmegaConf.from_dotlist(PACKED.replace("+", "").split())
        packed = OmegaConf.merge(OmegaConf.to_container(run.config), entries)
        trial = shorter_update(replace(run, config=packed, settings=read_settings(packed)))
        lines = PADDED if any(complaint.fatal for complaint in trial) else PACKED
        yield Finding(f"{missing}; {default} and a critic need it: install it, or set {lines}", fatal=False)
    elif not (settings.skip_zero_advantage or settings.share_prompts or run.select(f"{MODEL}.use_fused_kernels")):
        yield Finding(f"{missing}, so verl computes log-probabilities token by token: set {FUSED}", fatal=False)
