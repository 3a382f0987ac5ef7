"""The first pass of each engine: packing must change log-probabilities no more than verl's own micro-batches do."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from verl_ext.errors import IntegrationError
from verl_ext.integration.update import SHARE, SKIP
from verl_ext.integration.update.pack import answer_places, sharing
from verl_ext.integration.update.split import read, token_limit

FACTOR = 5
"""How much more packing may change than the size of verl's own micro-batches does."""
FLOOR = 1e-6
"""The least change that counts, of the largest log-probability: verl's own may change none at all."""


def require_equal(engine: Any, data: Any) -> None:
    """Raise on all ranks if a model computes other log-probabilities when a prompt is computed once.

    Rows that fit into a micro-batch run by verl's engine in one and in two, and packed; those of the prompts with the
    most rows are taken.
    """
    lengths, limit = read(data, share=True), token_limit(data)
    chosen = [row for group in sorted(lengths.by_prompt(), key=len, reverse=True) for row in group]
    sums = accumulate(lengths.apart([row]) for row in chosen)
    chosen = chosen[: max(1, sum(tokens <= limit for tokens in sums))]
    half = max(1, len(chosen) // 2)
    whole = log_probs(engine, data, chosen)
    in_two = torch.cat([log_probs(engine, data, part) for part in (chosen[:half], chosen[half:] or chosen)])
    with sharing(engine.module):
        packed = log_probs(engine, data, chosen, share=True)
    rounding = torch.finfo(getattr(engine, "_autocast_dtype", torch.bfloat16)).eps
    floor = max(FLOOR * float(whole.abs().max()), 8 * rounding)
    excess = (change(packed, whole) / change(in_two[: len(whole)], whole).clamp(min=floor)).max()
    torch.distributed.all_reduce(excess, op=torch.distributed.ReduceOp.MAX, group=engine.get_data_parallel_group())
    if not excess <= FACTOR:
        raise IntegrationError(
            f"{type(engine.module).__name__} computes other log-probabilities when a prompt is computed once: they "
            f"change {float(excess):.0f} times as much as with verl's own micro-batches, {FACTOR} times is rounding: "
            "set algorithm.verl_ext.share_prompts=False"
        )


def log_probs(engine: Any, data: Any, rows: Sequence[int], *, share: bool = False) -> torch.Tensor:
    """Return those of the answers' tokens of some rows."""
    from verl.utils import tensordict_utils as tu

    batch = tu.index_select_tensor_dict(data, list(rows))
    tu.assign_non_tensor(batch, **{SHARE: share, SKIP: False, "calculate_entropy": False})
    with torch.no_grad():
        _, output = engine.forward_step(batch, loss_function=None, forward_only=True)
    values: torch.Tensor = output["model_output"]["log_probs"].values()
    return values[answer_places(batch)[0] - 1].float()


def change(values: torch.Tensor, usual: torch.Tensor) -> torch.Tensor:
    """Return the mean difference, and the mean of the largest of each hundred."""
    difference = (values - usual).abs()
    return torch.stack([difference.mean(), difference.topk(-(-len(difference) // 100)).values.mean()])
