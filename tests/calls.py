"""An estimator called as verl calls it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

from verl_ext.core.state import RunState
from verl_ext.integration.advantage.context import StepContext, activate
from verl_ext.integration.advantage.registry import estimator_function
from verl_ext.run import use_run_state


@dataclass
class Call:
    """What one call returned: the advantage of each row, and both tensors."""

    rows: np.ndarray
    tensor: torch.Tensor
    returns: torch.Tensor


def tensors(scores: Sequence[float], lengths: Sequence[int], dtype: torch.dtype = torch.float32, width: int = 0):
    """Token-level rewards with the score on the last token that counts (the first, where none does), and the mask."""
    width = max([1, width, *lengths])
    mask = torch.zeros(len(lengths), width, dtype=torch.int64)
    rewards = torch.zeros(len(lengths), width, dtype=dtype)
    for row, length in enumerate(lengths):
        mask[row, :length] = 1
        rewards[row, max(length - 1, 0)] = scores[row]
    return rewards, mask


def call(
    name: str,
    scores: Sequence[float],
    uids: Sequence[Hashable],
    lengths: Sequence[int] | None = None,
    *,
    config: Mapping[str, Any] | None = None,
    components: Mapping[str, Any] | None = None,
    batch: Mapping[str, torch.Tensor] | None = None,
    dtype: torch.dtype = torch.float64,
    state: RunState | None = None,
    context: StepContext | None = None,
) -> Call:
    """Call the registered function directly, in a fresh run unless one is given.

    With a `context` the call is as inside a trainer, which knows of sessions and collects metrics.
    """
    lengths = [1] * len(scores) if lengths is None else lengths
    rewards, mask = tensors(scores, lengths, dtype)
    with use_run_state(RunState() if state is None else state), activate(context) if context else nullcontext():
        advantages, returns = estimator_function(name)(
            token_level_rewards=rewards,
            response_mask=mask,
            index=object_array(uids),
            config=OmegaConf.create(dict(config or {})),
            non_tensor_batch=components,
            batch=batch,
        )
    per_row = np.array([advantages[row, 0].item() if length else 0.0 for row, length in enumerate(lengths)])
    return Call(per_row, advantages, returns)


def metrics_of(name: str, scores: Sequence[float], uids: Sequence[Hashable], **given: Any) -> dict[str, float]:
    """What a trainer would log for such a call."""
    context = StepContext(fields=given.pop("components", None), tensors=given.pop("batch", None))
    call(name, scores, uids, context=context, **given)
    return context.metrics


def object_array(values: Sequence[Any]) -> np.ndarray:
    """A 1-D object array, as verl's `non_tensor_batch` holds them."""
    out = np.empty(len(values), dtype=object)
    out[:] = list(values)
    return out
