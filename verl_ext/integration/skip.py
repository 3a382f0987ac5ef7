"""`algorithm.verl_ext.skip_zero_advantage`: leave rows without advantage out of the actor's update.

With PPO's losses a row whose advantages are all 0 has loss 0 and gradient 0. verl fixes the divisors of the loss (tokens
and rows of the mini-batch, number of ranks) before it splits the mini-batch into micro-batches. Rows that are left out
between the two change no divisor, so the gradient is that of the whole mini-batch.

The trainer marks the data of the actor's update; this file's other half runs in the workers, where the mark is read. All
ranks agree on what they run: one all-reduce fixes how many rows each of them keeps at least, so that verl finds the same
number of micro-batches on every rank. Where verl cannot split the rows that are left, all ranks take all rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from verl_ext.errors import ConfigurationError, IntegrationError
from verl_ext.integration import hooks

MARK = "verl_ext_skip"
"""The entry of an update's data by which the trainer asks for it."""
MEASURED = "verl_ext_measured"
"""The entry in which the split leaves its figures."""
RANK = re.compile(r"actor/update/rank_(\d+)")
METRICS = ("rows_kept", "tokens_kept", "fallback")


@contextmanager
def marked(entries: Any) -> Iterator[None]:
    """Mark the data of an update while the trainer sends it to the workers."""
    entries[MARK] = True
    try:
        yield
    finally:
        del entries[MARK]


def take_metrics(metrics: dict[str, Any], who: str) -> None:
    """Rename the figures of the update in place; raise if a rank did not measure: it trained on all rows, or on others.

    verl puts `actor/` before the names that a worker returns.
    """
    ranks = {int(match[1]) for name in metrics if (match := RANK.fullmatch(name))}
    expected = set(range(int(metrics.pop("actor/update/ranks", 0)))) or {0}
    if missing := sorted(expected - ranks):
        raise IntegrationError(
            f"{who}: algorithm.verl_ext.skip_zero_advantage=True is not at work on rank {', '.join(map(str, missing))}: "
            "install verl_ext on its node, or set skip_zero_advantage=False"
        )
    for rank in ranks:
        del metrics[f"actor/update/rank_{rank}"]
    for name in METRICS:
        metrics[f"update/{name}"] = metrics.pop(f"actor/update/{name}")


def install(transformer_impl: ModuleType) -> None:
    """Wrap the FSDP engine's update, after the import of `verl.workers.engine.fsdp.transformer_impl`."""
    hooks.wrap(transformer_impl, "prepare_micro_batches", wrap_split, takes=("data", "dp_group"))
    engine = hooks.member(transformer_impl, "FSDPEngine")
    takes = ("self", "data", "loss_function", "forward_only")
    hooks.wrap(engine, "forward_backward_batch", wrap_update, takes=takes)


def wrap_update(original: Callable[..., Any]) -> Callable[..., Any]:
    """`forward_backward_batch(self, data, loss_function, forward_only)`: check the model, return the figures."""

    def forward_backward_batch(self: Any, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        if not _entry(data, MARK):
            return original(self, data, loss_function, forward_only)
        if forward_only or _entry(data, "return_model_output"):
            raise IntegrationError("skip_zero_advantage is for updates that return no output of the model")
        require_exact(self.module)
        output = original(self, data, loss_function, forward_only)
        figures = dict(zip(METRICS, _entry(data, MEASURED), strict=True))
        figures |= {f"rank_{self.get_data_parallel_rank()}": 1.0, "ranks": float(self.get_data_parallel_size())}
        output["metrics"] |= {f"update/{name}": [value] for name, value in figures.items()}
        return output

    return forward_backward_batch


def wrap_split(original: Callable[..., Any]) -> Callable[..., Any]:
    """`prepare_micro_batches(data, dp_group, ...)`: split the rows that are left."""

    def prepare_micro_batches(data: Any, dp_group: Any = None, **options: Any) -> Any:
        if not _entry(data, MARK):
            return original(data=data, dp_group=dp_group, **options)
        from verl.utils import tensordict_utils as tu

        tokens = data["input_ids"].offsets().diff().cpu()
        rows = kept(live_rows(data["advantages"]).cpu(), tokens, _least(data, tokens, dp_group))
        fallback = 0.0
        try:
            split = original(data=tu.index_select_tensor_dict(data, rows), dp_group=dp_group, **options)
        except ValueError:  # verl raises it on all ranks together
            rows, fallback = list(range(len(tokens))), 1.0
            split = original(data=data, dp_group=dp_group, **options)
        shares = (len(rows) / len(tokens), float(tokens[rows].sum() / tokens.sum()), fallback)
        tu.assign_non_tensor_data(data, MEASURED, shares)
        return split

    return prepare_micro_batches


def live_rows(advantages: torch.Tensor) -> torch.Tensor:
    """`[B]` whether a row has an advantage that is not 0.

    >>> live_rows(torch.tensor([[0.0, 0.0], [0.0, -1.0]])).tolist()
    [False, True]
    """
    if advantages.is_nested:
        advantages = advantages.to_padded_tensor(0.0)
    return (advantages != 0).any(dim=-1)


def kept(live: torch.Tensor, tokens: torch.Tensor, least: int) -> list[int]:
    """Return the live rows in their order, and the shortest others if there are fewer than `least`.

    >>> kept(torch.tensor([False, True, False]), torch.tensor([9, 9, 3]), 2)
    [1, 2]
    """
    spare = sorted((~live).nonzero()[:, 0].tolist(), key=lambda row: int(tokens[row]))
    missing = max(0, least - int(live.sum()))
    return sorted(live.nonzero()[:, 0].tolist() + spare[:missing])


def _least(data: Any, tokens: torch.Tensor, dp_group: Any) -> int:
    """Return the rows that every rank keeps at least, so that all have the same number of micro-batches."""
    size, live = len(tokens), live_rows(data["advantages"]).cpu()
    if _entry(data, "force_group_size", 1) > 1:  # whole groups are needed
        return size
    if _entry(data, "use_dynamic_bsz", True):
        limit = _entry(data, "max_token_len_per_gpu") * _entry(data, "sp_size", 1)
        # verl needs at least ceil(tokens / limit) micro-batches; rows cannot be cut, so that it may need up to twice as
        # many. Every rank needs a row for each.
        wanted = 2 * -(-int(tokens[live].sum()) // limit)
        rows = _largest(min(size, max(1, wanted)), dp_group)
    else:
        micro = _entry(data, "micro_batch_size_per_gpu")
        rows = micro * _largest(max(1, -(-int(live.sum()) // micro)), dp_group)
    return min(size, rows)


def _largest(number: int, dp_group: Any) -> int:
    """Return the largest number of all ranks."""
    if not torch.distributed.is_initialized():
        return number
    from verl.utils.device import get_device_id

    largest = torch.tensor([number], device=get_device_id())
    torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=dp_group)
    return int(largest.item())


def require_exact(model: torch.nn.Module) -> None:
    """Raise if a row without advantage changes the gradient: random dropout, or a router's own loss."""
    dropout = [name for name, part in model.named_modules() if isinstance(part, torch.nn.Dropout) and part.p > 0]
    config: Any = getattr(model, "config", None)
    rates = {name: rate for name, rate in vars(config or object).items() if "dropout" in name and _positive(rate)}
    if dropout or rates:
        raise ConfigurationError(
            f"skip_zero_advantage: the model has dropout ({', '.join([*dropout[:3], *rates])}), which depends on the rows "
            "of a micro-batch: set its rates to 0 in actor_rollout_ref.model.override_config, or skip_zero_advantage=False"
        )
    if getattr(config, "output_router_logits", False) or _positive(getattr(config, "router_aux_loss_coef", 0)):
        raise ConfigurationError(
            "skip_zero_advantage: the model's routers have a loss of their own, which counts every row: set "
            "skip_zero_advantage=False"
        )


def _positive(rate: object) -> bool:
    return isinstance(rate, int | float) and not isinstance(rate, bool) and rate > 0


def _entry(data: Mapping[str, Any], name: str, default: Any = None) -> Any:
    from verl.utils import tensordict_utils as tu

    return tu.get_non_tensor_data(data=data, key=name, default=default)
