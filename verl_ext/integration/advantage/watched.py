"""Log and dump the named rewards of a run with an estimator of verl's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from verl_ext.core.batch import Batch
from verl_ext.core.groups import Array, divide
from verl_ext.core.metrics import Metrics, reward_metrics
from verl_ext.core.rows import Rows, float_mask, scores, token_counts
from verl_ext.core.state import RunState
from verl_ext.integration.advantage import dump
from verl_ext.integration.advantage.components import Components
from verl_ext.integration.advantage.context import Run

Tensors = Callable[[], Mapping[str, torch.Tensor]]
"""Gets `advantages`, `response_mask` and `token_level_scores`, each `[B, L]`."""


def watch(
    run: Run, rows: Rows, components: Components, tensors: Tensors | None, *, trainer: Any, state: RunState
) -> Metrics:
    """Metrics of the named rewards; with `dump_dir`, dump the rewards with verl's advantages.

    Call it after the estimator. `tensors` is called only for a dump. It is None if verl has drawn other rows for the
    update.
    """
    keys = run.settings.rewards.keys or ()
    if not len(rows.scored):
        return {}
    columns = np.stack([components.column(key, "algorithm.rewards.keys") for key in keys], axis=1)
    if run.settings.verl_ext.dump_dir is None or tensors is None:
        batch = Batch.of(columns, components.labels, keys=keys)
        return reward_metrics(batch, batch.rewards)
    found = tensors()
    mask = float_mask(found["response_mask"], torch.float32)
    tokens = token_counts(mask)
    batch = Batch.of(columns, components.labels, keys=keys, lengths=rows.total(tokens))
    dump.write(
        run.settings,
        run.name,
        batch,
        components.labels,
        rows.take(_mean(found["advantages"], mask, tokens)),
        trainer=trainer,
        run=state,
        total=rows.take(scores(found["token_level_scores"], mask)),
    )
    return reward_metrics(batch, batch.rewards)


def _mean(advantages: torch.Tensor, mask: torch.Tensor, tokens: Array) -> Array:
    """`[B]` the mean over the tokens: a critic's advantages differ from token to token."""
    sums = (advantages.float() * mask).sum(dim=-1).double().cpu().numpy()
    return divide(sums, tokens)
