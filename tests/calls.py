"""An estimator called as verl calls it."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from verl_ext.advantages.data_proto import read_table
from verl_ext.advantages.estimator import compute, computing
from verl_ext.advantages.table import Request, Table
from verl_ext.core.chain import State
from verl_ext.core.row_index import RowIndex
from verl_ext.registry import build
from verl_ext.run import Run
from verl_ext.settings import Settings


@dataclass
class Call:
    """What one call returned: the advantage of each row, both tensors, what a trainer would log, and the new state."""

    rows: np.ndarray
    tensor: torch.Tensor
    returns: torch.Tensor
    metrics: dict[str, float]
    state: State | None


def tensors(scores: Sequence[float], lengths: Sequence[int], dtype: torch.dtype = torch.float32):
    """Token-level rewards with the score on the last token that counts (the first, where none does), and the mask."""
    width = max([1, *lengths])
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
    dtype: torch.dtype = torch.float64,
    **given: Any,
) -> Call:
    """Call the registered function as a trainer does, with the score on the last token of each response."""
    rewards, mask = tensors(scores, [1] * len(scores) if lengths is None else lengths, dtype)
    return call_on_tensors(name, rewards, mask, uids, **given)


def call_on_tensors(
    name: str,
    rewards: torch.Tensor,
    mask: torch.Tensor,
    uids: Sequence[Hashable],
    *,
    config: Mapping[str, Any] | None = None,
    components: Mapping[str, Any] | None = None,
    batch: Mapping[str, torch.Tensor] | None = None,
    state: State | None = None,
    run: Run | None = None,
    rows: RowIndex | None = None,
    returned: Sequence[str] | None = None,
) -> Call:
    """Call it in a fresh run unless one is given; with `rows` the run knows of sessions.

    `returned` are the components that the reward function returned, by default `acc` and `score`.
    """
    if run is None:
        settings = Settings.parse(dict(config or {}))
        run = Run(name, settings, build(name, settings), state=state)
    components = components or {}
    returned = [name for name in components if name in ("acc", "score")] if returned is None else returned
    table = table_of(run, components, uids, mask, returned=returned, tensors=batch)
    if rows is not None:
        table = replace(table, row_index=rows)
    with computing(run, table):
        advantages, returns = compute(
            name, token_level_rewards=rewards, response_mask=mask, index=object_array(uids), config=None
        )
    per_row = advantages.gather(1, mask.long().argmax(dim=1, keepdim=True))[:, 0].tolist() if advantages.numel() else []
    return Call(np.array(per_row, dtype=float), advantages, returns, run.metrics, run.state)


def table_of(
    run: Run,
    fields: Mapping[str, Any],
    uids: Sequence[Hashable],
    mask: torch.Tensor,
    *,
    returned: Sequence[str] | None,
    tensors: Mapping[str, torch.Tensor] | None = None,
) -> Table:
    """The rewards of a batch of `RayPPOTrainer` with these fields."""
    data = SimpleNamespace(
        batch={"response_mask": mask, **(tensors or {})},
        non_tensor_batch={"uid": object_array(uids), **fields},
        meta_info={"reward_extra_keys": returned},
    )
    return read_table(data, Request.of(run))


def metrics_of(name: str, scores: Sequence[float], uids: Sequence[Hashable], **given: Any) -> dict[str, float]:
    """What a trainer would log for such a call."""
    return call(name, scores, uids, **given).metrics


def object_array(values: Sequence[Any]) -> np.ndarray:
    """A 1-D object array, as verl's `non_tensor_batch` holds them."""
    out = np.empty(len(values), dtype=object)
    out[:] = list(values)
    return out
