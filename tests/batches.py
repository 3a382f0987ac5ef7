"""Batches for tests: the worked example, a call in verl's convention, hypothesis strategies."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from omegaconf import OmegaConf

from verl_ext.core.state import RunState
from verl_ext.integration.context import StepContext, activate
from verl_ext.integration.registry import estimator_function
from verl_ext.run import use_run_state

# The worked example of the specification: groups A, B, C of four responses.
UIDS = list("AAAABBBBCCCC")
ACC = [1.0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0]
FMT = [1.0, 1, 0, 0, 1, 0, 1, 1, 0, 1, 0, 0]
LENGTHS = [4, 2, 3, 1, 2, 2, 5, 3, 3, 3, 3, 1]


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


@dataclass(frozen=True)
class Rollout:
    """Random trajectories, as plain lists."""

    uids: list[Hashable]
    columns: dict[str, list[float]]
    lengths: list[int]
    accuracy: list[float]

    @property
    def rewards(self) -> list[list[float]]:
        return [list(row) for row in zip(*self.columns.values(), strict=True)]

    def reordered(self, order: Sequence[int]) -> Rollout:
        return Rollout(
            [self.uids[i] for i in order],
            {key: [column[i] for i in order] for key, column in self.columns.items()},
            [self.lengths[i] for i in order],
            [self.accuracy[i] for i in order],
        )


UID_KINDS = (
    str,
    int,
    lambda n: (n, "x"),
    lambda n: str(n).encode(),
    lambda n: n + 0.5,
    lambda n: str(n) if n % 2 else n,
)


@st.composite
def rollouts(
    draw: st.DrawFn,
    *,
    keys: Sequence[str] = ("a", "b"),
    nan: bool = True,
    lengths: int = 0,
    smallest: int = 1,
    few: bool = False,
) -> Rollout:
    """Up to five uneven groups in any order, singletons and constant groups among them.

    Without `nan` all is scored; `lengths` and `smallest` are the least length and size of a group; `few` draws rewards
    from 0, 1, -1 and 0.5 only.

    Hypothesis chooses the groups' sizes and a seed; numpy the numbers, because that is ten times faster.
    """
    sizes = draw(st.lists(st.integers(smallest, 6), min_size=1, max_size=5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    label = UID_KINDS[rng.integers(len(UID_KINDS))]
    ids = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    missing = rng.choice([0.0, 0.0, 0.1, 0.5, 1.0]) if nan else 0.0

    def column(values: np.ndarray) -> list[float]:
        chosen = values if rng.random() < 0.7 else values[ids]  # the latter constant within groups
        return np.where(rng.random(len(ids)) < missing, math.nan, chosen).tolist()

    def number() -> np.ndarray:
        # Multiples of 1/64: a group has no variance at all or plenty of it, and sums are exact.
        usual = rng.choice([0.0, 1.0, -1.0, 0.5], size=len(ids))
        return usual if few or rng.random() < 0.5 else rng.integers(-640, 641, size=len(ids)) / 64

    return Rollout(
        uids=[label(int(group)) for group in ids],
        columns={key: column(number()) for key in keys},
        lengths=rng.integers(lengths, 10, size=len(ids)).tolist(),
        accuracy=column(rng.integers(0, 5, size=len(ids)) / 4),
    )
