"""Rules about `skip_zero_advantage` and `share_prompts`: which settings they do not support, and where they help."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import NamedTuple

import torch
from omegaconf import OmegaConf

from verl_ext.errors import Finding
from verl_ext.run import Run
from verl_ext.run_config import ACTOR, read_settings

SKIP = "algorithm.verl_ext.skip_zero_advantage"
SHARE = "algorithm.verl_ext.share_prompts"
BOTH = (SKIP, SHARE)
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
REF = "actor_rollout_ref.ref"
ENGINES = (ACTOR, f"{ACTOR}.fsdp_config", REF, f"{REF}.fsdp_config")
LOSS = f"{ACTOR}.policy_loss.loss_mode"
LOSS_SCALE = f"{ACTOR}.loss_scale_factor"
STRATEGY = f"{ACTOR}.strategy"
EXACT = ("vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "cispo", "bypass_mode")
"""The losses of verl to which a zero-advantage row adds nothing."""

DEFAULT_ATTENTION = "flash_attention_2"
ATTENTION = f"{MODEL}.override_config.attn_implementation"
FUSED = f"{MODEL}.use_fused_kernels=True {MODEL}.fused_kernel_options.impl_backend=torch"
PADDED = f"++{ATTENTION}=sdpa {MODEL}.use_remove_padding=False {FUSED}"
PACKED = f"++{ATTENTION}=sdpa {MODEL}.use_remove_padding=False ++{SHARE}=True {ACTOR}.use_dynamic_bsz=True"
"""With these lines, every pass of actor and reference is packed, with verl_ext's attention and log-probabilities."""


class Requirement(NamedTuple):
    """What settings of verl_ext require from a setting of verl."""

    settings: tuple[str, ...]
    """The settings of verl_ext."""
    path: str
    """The setting of verl."""
    valid: tuple[object, ...]
    """Its valid values; the first is proposed."""
    reason: str
    """What any other value does, as the end of a sentence "which ..."."""


def _of_each_engine(setting: str, valid: object, reason: str) -> list[Requirement]:
    """Return a requirement of `share_prompts` for each section that configures an engine of actor or reference."""
    return [Requirement((SHARE,), f"{engine}.{setting}", (valid,), reason) for engine in ENGINES]


NOT_EXACT = {
    "geo_mean": Requirement(BOTH, LOSS, ("vanilla",), "averages over the rows of a micro-batch"),
    "clip_cov": Requirement(BOTH, LOSS, ("vanilla",), "selects tokens among those of a micro-batch"),
    "kl_cov": Requirement(BOTH, LOSS, ("vanilla",), "selects tokens among those of a micro-batch"),
    "dro": Requirement((SKIP,), LOSS, ("vanilla",), "has a gradient where the advantage is 0"),
}
"""The losses of verl that do not work with the settings."""
REQUIREMENTS = (
    Requirement(BOTH, STRATEGY, ("fsdp2", "fsdp"), "selects an engine that splits batches in its own way"),
    Requirement(BOTH, "distillation.enabled", (False,), "adds a gradient to every row and reads whole rows"),
    Requirement((SKIP,), f"{ACTOR}.use_kl_loss", (False,), "adds a gradient to every row"),
    Requirement((SKIP,), f"{ACTOR}.entropy_coeff", (0,), "adds a gradient to every row"),
    Requirement((SKIP,), f"{ACTOR}.calculate_entropy", (False,), "would not include the skipped rows"),
    Requirement((SHARE,), f"{ACTOR}.use_dynamic_bsz", (True,), "fixes the rows of each micro-batch"),
    Requirement((SHARE,), f"{ROLLOUT}.log_prob_use_dynamic_bsz", (True,), "fixes the rows of each micro-batch"),
    Requirement((SHARE,), f"{REF}.log_prob_use_dynamic_bsz", (True,), "fixes the rows of each micro-batch"),
    *_of_each_engine("ulysses_sequence_parallel_size", 1, "divides sequences"),
    *_of_each_engine("pad_to_length", False, "fixes the length of sequences"),
    *_of_each_engine("full_determinism", False, "cannot hold with flash attention"),
    Requirement((SHARE,), f"{MODEL}.use_fused_kernels", (False,), "hides the logits of the model"),
    Requirement((SHARE,), f"{ACTOR}.shuffle", (False,), "separates the rows of a prompt"),
)


def faster_update(run: Run) -> Iterator[Finding]:
    """Reject what needs zero-advantage rows, depends on the rows of a micro-batch, or cannot be packed."""
    enabled = _enabled_settings(run)
    if not enabled:
        return
    yield from _missing_loss_scale(run, enabled)
    for requirement in _requirements_of(run):
        settings = [name for name in requirement.settings if name in enabled]
        value = run.select(requirement.path)
        if not settings or value in (None, *requirement.valid):
            continue
        line = f"{requirement.path}={requirement.valid[0]}"
        if requirement.path == STRATEGY:
            line = f"model_engine=dp {line} and remove the settings of the other engine"
        yield Finding(
            "error",
            f"{_set_all(settings, True)} does not work with {requirement.path}={value}, which {requirement.reason}.",
            f"Set {line}, or {_set_all(settings, False)}.",
        )
    loss = run.select(LOSS)
    if SKIP in enabled and loss not in EXACT and loss not in NOT_EXACT:
        yield Finding(
            "warning",
            f"{SKIP}=True has not been verified with {LOSS}={loss}, which may depend on zero-advantage responses.",
            f"Set {LOSS}=vanilla, or {SKIP}=False.",
        )


def _enabled_settings(run: Run) -> list[str]:
    """Return which of the two settings are True."""
    settings = run.settings.verl_ext
    values = {SKIP: settings.skip_zero_advantage, SHARE: settings.share_prompts}
    return [name for name in BOTH if values[name]]


def _missing_loss_scale(run: Run, enabled: Sequence[str]) -> Iterator[Finding]:
    """Reject a loss whose divisor is the width of a micro-batch."""
    if run.settings.loss_agg_mode == "seq-mean-token-sum-norm" and run.select(LOSS_SCALE) is None:
        yield Finding(
            "error",
            f"{_set_all(enabled, True)} does not work with {ACTOR}.loss_agg_mode=seq-mean-token-sum-norm while "
            f"{LOSS_SCALE} is not set. verl would divide the loss by the width of a micro-batch, which would change.",
            f"Set {LOSS_SCALE}={run.select('data.max_response_length')}, or {_set_all(enabled, False)}.",
        )


def _requirements_of(run: Run) -> list[Requirement]:
    """Return the requirements that hold for every run, and those of the loss and the rollout correction of this run."""
    requirements = [*REQUIREMENTS]
    loss = run.select(LOSS)
    if loss in NOT_EXACT:
        requirements.append(NOT_EXACT[loss])
    # verl's loss reads the second section, which RayPPOTrainer fills from the first.
    for section in ("algorithm.rollout_correction", f"{ACTOR}.policy_loss.rollout_correction"):
        if run.select(f"{section}.loss_type") == "reinforce":
            path = f"{section}.rollout_is_batch_normalize"
            requirements.append(Requirement(BOTH, path, (False,), "divides by a mean over a micro-batch"))
    return requirements


def _set_all(names: Sequence[str], value: object) -> str:
    """Return the lines that set all these settings to one value."""
    return " ".join(f"{name}={value}" for name in names)


def without_flash_attn(run: Run) -> Iterator[Finding]:
    """Warn about a GPU without flash-attn: verl's defaults load no model, and log-probabilities take a loop."""
    if find_spec("flash_attn") or not torch.cuda.is_available():
        return
    attention = run.select(ATTENTION) or DEFAULT_ATTENTION
    # The package `kernels` downloads flash attention from the Hugging Face Hub.
    if attention == DEFAULT_ATTENTION and not find_spec("kernels"):
        lines = PACKED if _can_be_packed(run) else PADDED
        yield Finding(
            "warning",
            f"flash-attn is not installed, but verl's default {ATTENTION}={DEFAULT_ATTENTION} needs flash-attn. The "
            "critic has the same default.",
            f"Set {lines}, or install flash-attn.",
        )
    elif not _enabled_settings(run) and not run.select(f"{MODEL}.use_fused_kernels"):
        yield Finding(
            "warning",
            "flash-attn is not installed, so verl computes log-probabilities in a loop over tokens.",
            f"Set {FUSED}, or install flash-attn.",
        )


def _can_be_packed(run: Run) -> bool:
    """Return whether a run has no error of this file after the lines of `PACKED` are added."""
    entries = OmegaConf.from_dotlist(PACKED.replace("+", "").split())
    config = OmegaConf.merge(OmegaConf.to_container(run.config), entries)
    findings = faster_update(replace(run, config=config, settings=read_settings(config)))
    return not any(finding.severity == "error" for finding in findings)
