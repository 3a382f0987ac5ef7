"""Which number formats this processor multiplies fast."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

CALLS = dict.fromkeys(("bf16", "bfloat16"), "_is_mkldnn_bf16_supported")
CALLS |= dict.fromkeys(("fp16", "float16"), "_is_mkldnn_fp16_supported")
"""What torch itself asks, by FSDP's and torch's names of a type. It has no public call."""
PARAM = "mixed_precision.param_dtype"
FAST = {
    "actor_rollout_ref.rollout.dtype": "float32",
    f"actor_rollout_ref.actor.fsdp_config.{PARAM}": "fp32",
    f"actor_rollout_ref.ref.fsdp_config.{PARAM}": "fp32",
    f"critic.fsdp.{PARAM}": "fp32",
}
"""The settings of a run that name a type, each with fp32 in its own words."""


def is_fast(dtype: str) -> bool:
    """Whether torch multiplies matrices of this type with the processor's own instructions.

    Without them (bf16 needs AVX-512 on x86) a product in bf16 took 68 to 92 times as long as in fp32. A torch without
    the call counts as fast.
    """
    supported = getattr(torch.ops.mkldnn, CALLS[dtype], None) if dtype in CALLS else None
    return supported is None or bool(supported())


def slow(config: Any) -> Iterator[str]:
    """Name each type in a run's configuration that this processor multiplies slowly."""
    from omegaconf import OmegaConf

    for key, fast in FAST.items():
        dtype = OmegaConf.select(config, key)
        if not is_fast(str(dtype)):
            yield (
                f"{key}={dtype}: this processor has no instructions for it, and torch multiplies it tens of times "
                f"slower than fp32; set {key}={fast}"
            )
