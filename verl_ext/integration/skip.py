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
from verl_ext.integration.components import dense
from verl_ext.integration.run import Run

MARK = "verl_ext_skip"
"""The key in an update's data under which the trainer asks the workers: `CHECK` or `SKIP`."""
CHECK, SKIP = "check", "skip"
FIGURES = "verl_ext_figures"
"""The key in an update's data under which the split returns its METRICS."""
METRICS = ("rows_kept", "tokens_kept", "fallback")
RANDOM = re.compile("drop|jitter")
"""Names of a model's parts that have a rate of dropout, or of the noise of a MoE router."""
RANK = re.compile(r"actor/update/rank_(\d+)_of_(\d+)")


def update(run: Run | None, entries: dict[str, Any], call: Callable[[], Any], metrics_of: Callable[[Any], Any]) -> Any:
    """Call an update of the actor with the mark in the entries of its data, and name its figures.

    The first update only asks every rank for its figures: others would wait for ever for a rank without this package.
    """
    if run is None or not run.settings.verl_ext.skip_zero_advantage:
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
verl_ext where its worker runs (doctor says whether it holds there), or set it to False
    """
    answers = {name: match for name in list(metrics) if (match := RANK.fullmatch(name))}
    ranks = {int(match[1]) for match in answers.values()}
    missing = set(range(max((int(match[2]) for match in answers.values()), default=0))) - ranks
    if missing or not ranks:
        where = f"rank {', '.join(map(str, sorted(missing)))}" if missing else "any rank"
        raise IntegrationError(
            f"algorithm.verl_ext.skip_zero_advantage=True is not at work on {where}: install verl_ext where its worker "
            "runs (doctor says whether it holds there), or set it to False"
        )
    for name in answers:
        del metrics[name]
    for name in METRICS:
        metrics[f"update/{name}"] = metrics.pop(f"actor/update/{name}")


def install(transformer_impl: ModuleType) -> None:
    """Wrap the FSDP engine's update, after the import of `verl.workers.engine.fsdp.transformer_impl`."""
    hooks.wrap(transformer_impl, "prepare_micro_batches", wrap_split)
    engine = hooks.member(transformer_impl, "FSDPEngine")
    hooks.wrap(engine, "forward_backward_batch", wrap_forward_backward)


def wrap_forward_backward(original: Callable[..., Any], self: Any, data: Any, *args: Any, **options: Any) -> Any:
    """`forward_backward_batch(self, data, ...)`: judge the model at the first update, and return the figures."""
    mark = _entry(data, MARK)
    if mark == CHECK:
        require_exact(self.module)
    output = original(self, data, *args, **options)
    if mark is not None:
        rank = f"rank_{self.get_data_parallel_rank()}_of_{self.get_data_parallel_size()}"
        figures = {**_entry(data, FIGURES), rank: 1.0}
        output["metrics"] |= {f"update/{name}": [value] for name, value in figures.items()}
    return output


def wrap_split(original: Callable[..., Any], data: Any, dp_group: Any = None, **options: Any) -> Any:
    """`prepare_micro_batches(data, dp_group, ...)`: split the rows that are kept."""
    mark = _entry(data, MARK)
    if mark is None:
        return original(data=data, dp_group=dp_group, **options)
    from verl.utils import tensordict_utils as tu

    tokens = data["input_ids"].offsets().diff().cpu()
    kept = rows_to_keep(data, tokens, dp_group) if mark == SKIP else torch.ones(len(tokens), dtype=torch.bool)
    fallback = False
    try:
        rows = data if kept.all() else tu.index_select_tensor_dict(data, kept.nonzero()[:, 0].tolist())
        split = original(data=rows, dp_group=dp_group, **options)
    except ValueError:  # all ranks raise it together
        fallback = True
        kept[:] = True
        split = original(data=data, dp_group=dp_group, **options)
    figures = (kept.double().mean(), tokens[kept].sum() / tokens.sum(), fallback)
    tu.assign_non_tensor_data(data, FIGURES, dict(zip(METRICS, map(float, figures), strict=True)))
    return split


def rows_to_keep(data: Any, tokens: torch.Tensor, dp_group: Any) -> torch.Tensor:
    """Return `[B]` which rows of this rank take part; `tokens` has their lengths.

    They are the rows with an advantage that is not 0, and the shortest others if the ranks need more rows than that:
    first those with a token in the loss, because some losses of verl raise for a micro-batch without any.
    """
    from verl.utils.device import get_device_name

    live, counts = ((dense(data[name]) != 0).any(dim=-1).cpu() for name in ("advantages", "response_mask"))
    if _entry(data, "use_dynamic_bsz", True):
        # verl needs ceil(tokens / limit) micro-batches, or more, because it cannot cut a row, but never more than rows;
        # and at least one row of every rank for each: 0.9.0 stops otherwise, on that rank alone.
        size, limit = 1, _entry(data, "max_token_len_per_gpu") * _entry(data, "sp_size", 1)
        batches = min(int(live.sum()), 2 * -(-int(tokens[live].sum()) // limit))
    else:
        size = _entry(data, "micro_batch_size_per_gpu")
        batches = -(-int(live.sum()) // size)
    batches = max(1, batches)
    if dp_group is not None:
        most = torch.tensor([batches], device=get_device_name())
        torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX, group=dp_group)
        batches = int(most.item())
    missing = size * batches - int(live.sum())
    others = (~live).nonzero()[:, 0]
    order = tokens.where(counts, tokens + tokens.sum())[others].argsort()
    live[others[order][: max(0, missing)]] = True
    return live


def require_exact(model: torch.nn.Module) -> None:
    """Raise if a model draws random numbers in training: with fewer rows a row would draw others.

    The loss of a MoE router needs no rule: verl passes no labels, and without labels a model does not add it.
    """
    for name, part in model.named_modules():
        dropout = isinstance(part, torch.nn.modules.dropout._DropoutNd)
        for key, rate in vars(part).items():
            if isinstance(rate, float) and rate > 0 and (RANDOM.search(key) or (dropout and key == "p")):
                raise ConfigurationError(
                    f"skip_zero_advantage: the noise of {name}.{key}={rate:g} depends on the rows of a micro-batch: "
                    "set it to 0 in actor_rollout_ref.model.override_config, or skip_zero_advantage=False"
                )


def _entry(data: Any, name: str, default: Any = None) -> Any:
    from verl.utils import tensordict_utils as tu

    return tu.get_non_tensor_data(data=data, key=name, default=default)
