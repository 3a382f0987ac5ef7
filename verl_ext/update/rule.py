"""Rules about `skip_zero_advantage` and `share_prompts`: which settings they do not support, and where they help."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec

import torch
from omegaconf import OmegaConf

from verl_ext.errors import Finding
from verl_ext.run import Run
from verl_ext.run_config import ACTOR, read_settings

SKIP = "algorithm.verl_ext.skip_zero_advantage"
SHARE = "algorithm.verl_ext.share_prompts"
BOTH = (SKIP, SHARE)
MODEL = "actor_rollout_ref.model"
ATTENTION = f"{MODEL}.override_config.attn_implementation"
FUSED = f"{MODEL}.use_fused_kernels=True {MODEL}.fused_kernel_options.impl_backend=torch"
PADDED = f"++{ATTENTION}=sdpa {MODEL}.use_remove_padding=False {FUSED}"
PACKED = f"++{ATTENTION}=sdpa {MODEL}.use_remove_padding=False ++{SHARE}=True {ACTOR}.use_dynamic_bsz=True"
"""With these lines, every pass of actor and reference is packed, with verl_ext's attention and log-probabilities."""
ENGINES = tuple(f"actor_rollout_ref.{part}" for part in ("actor", "actor.fsdp_config", "ref", "ref.fsdp_config"))
LOSS, STRATEGY = f"{ACTOR}.policy_loss.loss_mode", f"{ACTOR}.strategy"
EXACT = ("vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "cispo", "bypass_mode")
"""The losses of verl to which a zero-advantage row adds nothing."""
NOT_EXACT = {
    "geo_mean": (BOTH, "averages over the rows of a micro-batch"),
    "clip_cov": (BOTH, "selects tokens among those of a micro-batch"),
    "kl_cov": (BOTH, "selects tokens among those of a micro-batch"),
    "dro": ((SKIP,), "has a gradient where the advantage is 0"),
}
NEEDS: tuple[tuple[tuple[str, ...], str, tuple[object, ...], str], ...] = (
    (BOTH, STRATEGY, ("fsdp2", "fsdp"), "selects an engine that splits batches in its own way"),
    (BOTH, "distillation.enabled", (False,), "adds a gradient to every row and reads whole rows"),
    ((SKIP,), f"{ACTOR}.use_kl_loss", (False,), "adds a gradient to every row"),
    ((SKIP,), f"{ACTOR}.entropy_coeff", (0,), "adds a gradient to every row"),
    ((SKIP,), f"{ACTOR}.calculate_entropy", (False,), "would not include the skipped rows"),
    ((SHARE,), f"{ACTOR}.use_dynamic_bsz", (True,), "fixes the rows of each micro-batch"),
    ((SHARE,), "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz", (True,), "fixes the rows of each micro-batch"),
    ((SHARE,), "actor_rollout_ref.ref.log_prob_use_dynamic_bsz", (True,), "fixes the rows of each micro-batch"),
    *(((SHARE,), f"{engine}.ulysses_sequence_parallel_size", (1,), "divides sequences") for engine in ENGINES),
    *(((SHARE,), f"{engine}.pad_to_length", (False,), "fixes the length of sequences") for engine in ENGINES),
    *(((SHARE,), f"{engine}.full_determinism", (False,), "cannot hold with flash attention") for engine in ENGINES),
    ((SHARE,), f"{MODEL}.use_fused_kernels", (False,), "hides the logits of the model"),
    ((SHARE,), f"{ACTOR}.shuffle", (False,), "separates the rows of a prompt"),
)
"""Requirements of the settings: an entry of verl's configuration, its valid values, and what other values do."""


def shorter_update(run: Run) -> Iterator[Finding]:
    """Reject what needs zero-advantage rows, depends on the rows of a micro-batch, or cannot be packed."""
    settings = run.settings.verl_ext
    asked = {SKIP: settings.skip_zero_advantage, SHARE: settings.share_prompts}
    if not any(asked.values()):
        return
    loss, needs = run.select(LOSS), [*NEEDS]
    if loss in NOT_EXACT:
        needs.append((NOT_EXACT[loss][0], LOSS, ("vanilla",), NOT_EXACT[loss][1]))
    scale = f"{ACTOR}.loss_scale_factor"
    if run.settings.loss_agg_mode == "seq-mean-token-sum-norm" and run.select(scale) is None:
        on = [name for name in BOTH if asked[name]]
        yield Finding(
            "error",
            f"{_all(on, True)} does not work with {ACTOR}.loss_agg_mode=seq-mean-token-sum-norm while {scale} is not "
            "set. verl would divide the loss by the width of a micro-batch, which would change.",
            f"Set {scale}={run.select('data.max_response_length')}, or {_all(on, False)}.",
        )
    # verl's loss reads the second entry, which RayPPOTrainer fills from the first.
    for path in ("algorithm.rollout_correction", f"{ACTOR}.policy_loss.rollout_correction"):
        if run.select(f"{path}.loss_type") == "reinforce":
            whole = f"{path}.rollout_is_batch_normalize"
            needs.append((BOTH, whole, (False,), "divides by a mean over a micro-batch"))
    for names, path, valid, why in needs:
        wanted, value = [name for name in names if asked[name]], run.select(path)
        if wanted and value not in (None, *valid):
            line = f"{path}={valid[0]}"
            if path == STRATEGY:
                line = f"model_engine=dp {line} and remove the settings of the other engine"
            yield Finding(
                "error",
                f"{_all(wanted, True)} does not work with {path}={value}, which {why}.",
                f"Set {line}, or {_all(wanted, False)}.",
            )
    if settings.skip_zero_advantage and loss not in EXACT and loss not in NOT_EXACT:
        yield Finding(
            "warning",
            f"{SKIP}=True has not been verified with {LOSS}={loss}, which may depend on zero-advantage responses.",
            f"Set {LOSS}=vanilla, or {SKIP}=False.",
        )


def _all(names: Sequence[str], value: object) -> str:
    """Return the lines that set all these settings to one value."""
    return " ".join(f"{name}={value}" for name in names)


def without_flash_attn(run: Run) -> Iterator[Finding]:
    """Warn about a GPU without flash-attn: verl's defaults load no model, and log-probabilities take a loop."""
    if find_spec("flash_attn") or not torch.cuda.is_available():
        return
    default, settings = "flash_attention_2", run.settings.verl_ext
    if (run.select(ATTENTION) or default) == default and not find_spec("kernels"):
        entries = OmegaConf.from_dotlist(PACKED.replace("+", "").split())
        packed = OmegaConf.merge(OmegaConf.to_container(run.config), entries)
        trial = shorter_update(replace(run, config=packed, settings=read_settings(packed)))
        lines = PADDED if any(finding.severity == "error" for finding in trial) else PACKED
        yield Finding(
            "warning",
            f"flash-attn is not installed, but verl's default {ATTENTION}={default} needs flash-attn. The critic has "
            "the same default.",
            f"Set {lines}, or install flash-attn.",
        )
    elif not (settings.skip_zero_advantage or settings.share_prompts or run.select(f"{MODEL}.use_fused_kernels")):
        yield Finding(
            "warning",
            "flash-attn is not installed, so verl computes log-probabilities in a loop over tokens.",
            f"Set {FUSED}, or install flash-attn.",
        )
