"""Call an estimator as verl calls it."""

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
    """The result of one call: the advantage of each row, both tensors, the metrics of a trainer, and the new state."""

    rows: np.ndarray
    tensor: torch.Tensor
    returns: torch.Tensor
    metrics: dict[str, float]
    state: State | None


def tensors(
    scores: Sequence[float], lengths: Sequence[int], dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token-level rewards with the score on the last token of the response, and the response mask.

    The score of a response without tokens is on the first token, which is outside the mask.
    """
    width = max([1, *lengths])
    mask = torch.zeros(len(lengths), width, dtype=torch.int64)
    rewards = torch.zeros(len(lengths), width, dtype=dtype)
    for row, length in enumerate(lengths):
        mask[row, :length] = 1
        last_token = max(length - 1, 0)
        rewards[row, last_token] = scores[row]
    return rewards, mask


def call(
    name: str,
    scores: Sequence[float],
    uids: Sequence[Hashable],
    lengths: Sequence[int] | None = None,
    *,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Call:
    """Call the estimator as a trainer does, with the score on the last token of each response."""
    if lengths is None:
        lengths = [1] * len(scores)
    rewards, mask = tensors(scores, lengths, dtype)
    return call_on_tensors(name, rewards, mask, uids, **options)


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
    """Call the estimator as a trainer does, in a new run unless `run` is set. `rows` are the rows of sessions.

    `returned` are the components that the reward function returned, by default `acc` and `score`.
    """
    if run is None:
        settings = Settings.parse(dict(config or {}))
        run = Run(name, settings, build(name, settings), state=state)
    components = components or {}
    if returned is None:
        returned = [component for component in components if component in ("acc", "score")]
    table = table_of(run, components, uids, mask, returned=returned, tensors=batch)
    if rows is not None:
        table = replace(table, row_index=rows)
    with computing(run, table):
        advantages, returns = compute(
            name, token_level_rewards=rewards, response_mask=mask, index=object_array(uids), config=None
        )
    return Call(advantage_of_row(advantages, mask), advantages, returns, run.metrics, run.state)


def advantage_of_row(advantages: torch.Tensor, mask: torch.Tensor) -> np.ndarray:
    """Return the advantage at the first token of each response."""
    if not advantages.numel():
        return np.array([], dtype=float)
    first_token = mask.long().argmax(dim=1, keepdim=True)
    at_first_token = advantages.gather(1, first_token)[:, 0]
    return np.array(at_first_token.tolist(), dtype=float)


def table_of(
    run: Run,
    fields: Mapping[str, Any],
    uids: Sequence[Hashable],
    mask: torch.Tensor,
    *,
    returned: Sequence[str] | None,
    tensors: Mapping[str, torch.Tensor] | None = None,
) -> Table:
    """Return the rewards of a batch of `RayPPOTrainer` with these fields."""
    data = SimpleNamespace(
        batch={"response_mask": mask, **(tensors or {})},
        non_tensor_batch={"uid": object_array(uids), **fields},
        meta_info={"reward_extra_keys": returned},
    )
    return read_table(data, Request.of(run))


def metrics_of(name: str, scores: Sequence[float], uids: Sequence[Hashable], **options: Any) -> dict[str, float]:
    """Return the metrics that a trainer would log for the call."""
    return call(name, scores, uids, **options).metrics


def object_array(values: Sequence[Any]) -> np.ndarray:
    """Return a 1-D object array, as in verl's `non_tensor_batch`."""
    array = np.empty(len(values), dtype=object)
    array[:] = list(values)
    return array
