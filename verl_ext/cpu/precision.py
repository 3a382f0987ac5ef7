"""Which number formats this processor multiplies fast."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

CALLS = dict.fromkeys(("bf16", "bfloat16"), "_is_mkldnn_bf16_supported")
CALLS |= dict.fromkeys(("fp16", "float16", "16"), "_is_mkldnn_fp16_supported")
"""What torch itself asks, by FSDP's and torch's names of a type. It has no public call."""
PARAM = "mixed_precision.param_dtype"
SETTINGS = {
    "actor_rollout_ref.actor": f"actor_rollout_ref.actor.fsdp_config.{PARAM}",
    "actor_rollout_ref.ref": f"actor_rollout_ref.ref.fsdp_config.{PARAM}",
    "critic": f"critic.fsdp.{PARAM}",
}
"""Where the type of each model in training stands."""


def is_fast(dtype: str) -> bool:
    """Whether torch multiplies matrices of this type with the processor's own instructions.

    Without them (bf16 needs AVX-512 on x86) a product in bf16 took 68 to 92 times as long as in fp32. A torch without
    the call counts as fast.
    """
    supported = getattr(torch.ops.mkldnn, CALLS[dtype], None) if dtype in CALLS else None
    return supported is None or bool(supported())


def slow(config: Any, models: Iterable[str]) -> Iterator[str]:
    """Name each type that this processor multiplies slowly, of the rollout and of the models in training."""
    from omegaconf import OmegaConf

    keys = {SETTINGS[name]: "fp32" for name in models} | {"actor_rollout_ref.rollout.dtype": "float32"}
    for key, fast in keys.items():
        dtype = OmegaConf.select(config, key) or "bf16"  # verl's default, in FSDP and in the rollout
        if not is_fast(str(dtype)):
            yield (
                f"{key}={dtype}: this processor has no instructions for it, and torch multiplies it tens of times "
                f"slower than fp32; set {key}={fast}"
            )
