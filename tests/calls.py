"""An estimator called as verl calls it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

from verl_ext.core.rows import Rows
from verl_ext.core.state import RunState
from verl_ext.estimators import build
from verl_ext.integration.advantage import estimator_function
from verl_ext.integration.checks.read import read_settings
from verl_ext.integration.components import of_batch
from verl_ext.integration.run import Run


@dataclass
class Call:
    """What one call returned: the advantage of each row, both tensors, and what a trainer would log."""

    rows: np.ndarray
    tensor: torch.Tensor
    returns: torch.Tensor
    metrics: dict[str, float]


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
    run: Run | None = None,
    rows: Rows | None = None,
) -> Call:
    """Call the registered function as a trainer does, in a fresh run unless one is given.

    With `rows` the call is as inside a trainer that knows of padding and sessions.
    """
    lengths = [1] * len(scores) if lengths is None else lengths
    rewards, mask = tensors(scores, lengths, dtype)
    if run is None:
        settings = read_settings(OmegaConf.create(dict(config or {})))
        run = Run(name, settings, build(name, settings), RunState() if state is None else state)

    rewards_by_name = of_batch(components, batch, list(uids), mask, run.needs)
    if rows is not None:
        fields = {name: [column[row] for row in rows.scored] for name, column in rewards_by_name.fields.items()}
        rewards_by_name = replace(rewards_by_name, rows=rows, labels=rows.labels(uids), groups=None, fields=fields)
    with run.computing(rewards_by_name):
        advantages, returns = estimator_function(name)(
            token_level_rewards=rewards,
            response_mask=mask,
            index=object_array(uids),
        )
    per_row = np.array([advantages[row, 0].item() if length else 0.0 for row, length in enumerate(lengths)])
    return Call(per_row, advantages, returns, run.metrics)


def metrics_of(name: str, scores: Sequence[float], uids: Sequence[Hashable], **given: Any) -> dict[str, float]:
    """What a trainer would log for such a call."""
    return call(name, scores, uids, **given).metrics


def object_array(values: Sequence[Any]) -> np.ndarray:
    """A 1-D object array, as verl's `non_tensor_batch` holds them."""
    out = np.empty(len(values), dtype=object)
    out[:] = list(values)
    return out
