"""`algorithm.verl_ext.skip_zero_advantage`: leave rows without advantage out of the actor's update.

With PPO's losses a row whose advantages are all 0 has loss 0 and gradient 0. verl fixes the divisors of the loss
(tokens and rows of the mini-batch, number of ranks) before it splits the mini-batch into micro-batches. Rows that are
left out between the two change no divisor, so the gradient is that of the whole mini-batch.

The trainer marks the data of the actor's update, and the engine's split in the workers reads the mark. All ranks agree
on what they run: one all-reduce fixes how many rows each of them keeps at least, so that verl finds the same number of
micro-batches on every rank. Where verl cannot split the rows that are left, all ranks take all rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from verl_ext.errors import ConfigurationError, IntegrationError
from verl_ext.integration import hooks
from verl_ext.integration.run import run_of

MARK = "verl_ext_skip"
"""The entry of an update's data by which the trainer asks for it: `CHECK` or `SKIP`."""
CHECK, SKIP = "check", "skip"
FIGURES = "verl_ext_figures"
"""The entry in which the split leaves its figures."""
METRICS = ("rows_kept", "tokens_kept", "fallback")
RANK = re.compile(r"actor/update/rank_(\d+)_of_(\d+)")


def update(trainer: Any, entries: dict[str, Any], call: Callable[[], Any], metrics_of: Callable[[Any], Any]) -> Any:
    """Call an update of the actor with the mark in the entries of its data, and name its figures.

    The first update only asks every rank for its figures: others would wait for ever for a rank without this package.
    """
    run = run_of(trainer)
    if run is None or not run.settings.verl_ext.skip_zero_advantage or MARK in entries:  # a subclass calls `super`
        return call()
    entries[MARK] = SKIP if run.ranks_checked else CHECK
    try:
        output = call()
    finally:
        del entries[MARK]
    take_figures(metrics_of(output))
    run.ranks_checked = True
    return output


def take_figures(metrics: dict[str, Any]) -> None:
    """Name the figures of an update in place; raise if a rank has none.

    verl puts `actor/` before the names that a worker returns.

    >>> take_figures({"actor/update/rank_1_of_2": 1.0})
    Traceback (most recent call last):
    verl_ext.errors.IntegrationError: algorithm.verl_ext.skip_zero_advantage=True is not at work on rank 0: install \
verl_ext where its worker runs, or set it to False
    """
    answers = {name: match for name in list(metrics) if (match := RANK.fullmatch(name))}
    ranks = {int(match[1]) for match in answers.values()}
    missing = set(range(max((int(match[2]) for match in answers.values()), default=0))) - ranks
    if missing or not ranks:
        where = f"rank {', '.join(map(str, sorted(missing)))}" if missing else "any rank"
        raise IntegrationError(
            f"algorithm.verl_ext.skip_zero_advantage=True is not at work on {where}: install verl_ext where its worker "
            "runs, or set it to False"
        )
    for name in answers:
        del metrics[name]
    for name in METRICS:
        metrics[f"update/{name}"] = metrics.pop(f"actor/update/{name}")


def install(transformer_impl: ModuleType) -> None:
    """Wrap the FSDP engine's update, after the import of `verl.workers.engine.fsdp.transformer_impl`."""
    hooks.wrap(transformer_impl, "prepare_micro_batches", wrap_split, takes=("data", "dp_group"))
    engine = hooks.member(transformer_impl, "FSDPEngine")
    takes = ("self", "data", "loss_function", "forward_only")
    hooks.wrap(engine, "forward_backward_batch", wrap_forward_backward, takes=takes)


def wrap_forward_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    """`forward_backward_batch(self, data, loss_function, forward_only)`: judge the model, return the figures."""

    def forward_backward_batch(self: Any, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        if _entry(data, MARK) is None:
            return original(self, data, loss_function, forward_only)
        if forward_only or _entry(data, "return_model_output"):
            raise IntegrationError("skip_zero_advantage is for updates, and for those that return no model output")
        require_exact(self.module)
        output = original(self, data, loss_function, forward_only)
        rank = f"rank_{self.get_data_parallel_rank()}_of_{self.get_data_parallel_size()}"
        figures = {**dict(zip(METRICS, _entry(data, FIGURES), strict=True)), rank: 1.0}
        output["metrics"] |= {f"update/{name}": [value] for name, value in figures.items()}
        return output

    return forward_backward_batch


def wrap_split(original: Callable[..., Any]) -> Callable[..., Any]:
    """`prepare_micro_batches(data, dp_group, ...)`: split the rows that are kept."""

    def prepare_micro_batches(data: Any, dp_group: Any = None, **options: Any) -> Any:
        mark = _entry(data, MARK)
        if mark is None:
            return original(data=data, dp_group=dp_group, **options)
        from verl.utils import tensordict_utils as tu

        tokens = data["input_ids"].offsets().diff().cpu()
        every = list(range(len(tokens)))
        rows, fallback = every if mark == CHECK else rows_to_keep(data, tokens, dp_group), 0.0
        try:
            kept = data if rows == every else tu.index_select_tensor_dict(data, rows)
            split = original(data=kept, dp_group=dp_group, **options)
        except ValueError:  # all ranks raise it together
            rows, fallback = every, 1.0
            split = original(data=data, dp_group=dp_group, **options)
        figures = (len(rows) / len(tokens), float(tokens[rows].sum() / tokens.sum()), fallback)
        tu.assign_non_tensor_data(data, FIGURES, figures)
        return split

    return prepare_micro_batches


def rows_to_keep(data: Any, tokens: torch.Tensor, dp_group: Any) -> list[int]:
    """Return the rows of this rank that take part in the update; `tokens` has the length of each row."""
    live = live_rows(data["advantages"]).cpu()
    if _entry(data, "force_group_size", 1) > 1:  # verl needs whole groups
        return list(range(len(tokens)))
    if _entry(data, "use_dynamic_bsz", True):
        # verl needs ceil(tokens / limit) micro-batches, or more, because it cannot cut a row, and at least one row of
        # every rank for each: 0.9.0 stops otherwise, on that rank alone.
        limit = _entry(data, "max_token_len_per_gpu") * _entry(data, "sp_size", 1)
        least = _largest(min(len(tokens), max(1, 2 * -(-int(tokens[live].sum()) // limit))), dp_group)
    else:
        size = _entry(data, "micro_batch_size_per_gpu")
        least = size * _largest(max(1, -(-int(live.sum()) // size)), dp_group)
    return chosen(live, tokens, least)


def live_rows(advantages: torch.Tensor) -> torch.Tensor:
    """`[B]` whether a row has an advantage that is not 0.

    >>> live_rows(torch.tensor([[0.0, 0.0], [0.0, -1.0]])).tolist()
    [False, True]
    """
    if advantages.is_nested:
        advantages = advantages.to_padded_tensor(0.0)
    return (advantages != 0).any(dim=-1)


def chosen(live: torch.Tensor, tokens: torch.Tensor, least: int) -> list[int]:
    """Return the live rows, and the shortest others if there are fewer than `least`, in their order.

    >>> chosen(torch.tensor([False, True, False]), torch.tensor([9, 9, 3]), 2)
    [1, 2]
    """
    spare = sorted((~live).nonzero()[:, 0].tolist(), key=lambda row: int(tokens[row]))
    return sorted([*live.nonzero()[:, 0].tolist(), *spare[: max(0, least - int(live.sum()))]])


def _largest(number: int, dp_group: Any) -> int:
    """Return the largest number of all ranks."""
    if dp_group is None:
        return number
    from verl.utils.device import get_device_name

    largest = torch.tensor([number], device=get_device_name())
    torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=dp_group)
    return int(largest.item())


def require_exact(model: torch.nn.Module) -> None:
    """Raise if a row without advantage changes the gradient: by random dropout, or by the loss of a MoE router."""
    for name, part in model.named_modules():
        dropout = isinstance(part, torch.nn.modules.dropout._DropoutNd)
        for key, rate in vars(part).items():
            if isinstance(rate, float) and rate > 0 and ("drop" in key or (dropout and key == "p")):
                raise ConfigurationError(
                    f"skip_zero_advantage: the dropout {name}.{key}={rate:g} depends on the rows of a micro-batch: set "
                    "it to 0 in actor_rollout_ref.model.override_config, or skip_zero_advantage=False"
                )
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        raise ConfigurationError(
            "skip_zero_advantage: the model's routers have a loss of their own, which counts every row: set "
            "+actor_rollout_ref.model.override_config.output_router_logits=False, or "
            "algorithm.verl_ext.skip_zero_advantage=False"
        )


def _entry(data: Any, name: str, default: Any = None) -> Any:
    from verl.utils import tensordict_utils as tu

    return tu.get_non_tensor_data(data=data, key=name, default=default)
