"""Change verl's FSDP engine according to the marks of a pass, and verify the result at the first pass.

Packing must not change log-probabilities more than verl's own micro-batches do.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import accumulate
from typing import Any, cast

import torch
from verl.utils import tensordict_utils as tu
from verl.workers.engine.fsdp import transformer_impl

from verl_ext import hooks
from verl_ext.errors import IntegrationError
from verl_ext.update import SHARE_MARK, SKIP_MARK, pack, split
from verl_ext.update.log_probs import log_probs
from verl_ext.update.split import FIGURES, entry

CHECKED = "_verl_ext_checked"
"""The attribute of an engine whose first pass was checked."""
FACTOR = 5
"""How many times as much packing may change log-probabilities as the size of verl's own micro-batches does."""
FLOOR = 1e-6
"""The smallest change that counts, as a fraction of the largest absolute log-probability.

verl's own micro-batches may change nothing at all.
"""
ROUNDING = (1.0, 8.0)
"""The smallest change that counts, in units of the format's rounding: of the mean, and of the mean of the top 1%."""


def install() -> None:
    """Wrap the functions of verl's FSDP engine that the marks of a pass change, once per process."""
    hooks.require_parameters(transformer_impl, "logprobs_from_logits", ("logits", "labels", "inplace_backward"))
    hooks.wrap(transformer_impl, "prepare_micro_batches", split.wrap_prepare)
    hooks.wrap(hooks.member(transformer_impl, "FSDPEngine"), "forward_backward_batch", wrap_forward_backward)
    engine = hooks.member(transformer_impl, "FSDPEngineWithLMHead")
    hooks.wrap(engine, "prepare_model_inputs", pack.wrap_inputs)
    hooks.wrap(engine, "prepare_model_outputs", pack.wrap_outputs)


def wrap_forward_backward(
    original: Callable[..., Any], self: Any, data: Any, loss_function: Any, forward_only: bool = False
) -> Any:
    """`forward_backward_batch(self, data, ...)`: check the engine once, and return the metrics of an update."""
    share, skip = entry(data, SHARE_MARK, False), entry(data, SKIP_MARK, False)
    if not (share or skip):
        return original(self, data, loss_function, forward_only)
    if share and not hasattr(self, CHECKED):
        require_equal(self, data)
        setattr(self, CHECKED, True)
    # This must last until the backward pass is done, because gradient checkpointing computes the layers again.
    with computing(self, share=share):
        output = original(self, data, loss_function, forward_only)
    if not forward_only:
        output["metrics"] |= {f"actor/{name}": [value] for name, value in entry(data, FIGURES).items()}
    return output


@contextmanager
def computing(engine: Any, *, share: bool) -> Iterator[None]:
    """Let an engine compute attention with `pack.attend`, and log-probabilities with `log_probs` without flash-attn."""
    config, module = engine.module.config, cast("Any", transformer_impl)
    usual = config._attn_implementation, module.logprobs_from_logits
    if share:
        config._attn_implementation = pack.ATTENTION
    if not (find_spec("flash_attn") or find_spec("torch_npu")):
        module.logprobs_from_logits = log_probs
    try:
        yield
    finally:
        config._attn_implementation, module.logprobs_from_logits = usual


def require_equal(engine: Any, data: Any) -> None:
    """Raise on all ranks if packing changes log-probabilities more than rounding does.

    As many rows of the batch as fit into one micro-batch are computed three times: by verl's engine in one micro-batch,
    by verl's engine in two micro-batches, and packed. The first two give the size of rounding. The rows are those of
    the prompts with the most rows.
    """
    lengths, limit = split.row_lengths(data, share=True), split.token_limit(data)
    chosen = [row for group in sorted(lengths.by_prompt(), key=len, reverse=True) for row in group]
    sums = accumulate(lengths.apart([row]) for row in chosen)
    chosen = chosen[: max(1, sum(tokens <= limit for tokens in sums))]
    half = max(1, len(chosen) // 2)
    whole = answer_log_probs(engine, data, chosen)
    in_two = torch.cat([answer_log_probs(engine, data, part) for part in (chosen[:half], chosen[half:] or chosen)])
    with computing(engine, share=True):
        packed = answer_log_probs(engine, data, chosen, share=True)
    rounding = torch.finfo(getattr(engine, "_autocast_dtype", torch.bfloat16)).eps
    excess = excess_of(packed, in_two[: len(whole)], whole, rounding)
    torch.distributed.all_reduce(excess, op=torch.distributed.ReduceOp.MAX, group=engine.get_data_parallel_group())
    if not excess <= FACTOR:
        raise IntegrationError(
            f"algorithm.verl_ext.share_prompts=True changes the log-probabilities of {type(engine.module).__name__} "
            f"{float(excess):.0f} times as much as other sizes of verl's micro-batches do. Rounding explains a factor "
            f"of at most {FACTOR}. Set algorithm.verl_ext.share_prompts=False."
        )


def answer_log_probs(engine: Any, data: Any, rows: Sequence[int], *, share: bool = False) -> torch.Tensor:
    """Return the log-probabilities of the responses in some rows, `[tokens]`; with `share` the rows are packed."""
    batch = tu.index_select_tensor_dict(data, list(rows))
    tu.assign_non_tensor(batch, **{SHARE_MARK: share, SKIP_MARK: False, "calculate_entropy": False})
    with torch.no_grad():
        _, output = engine.forward_step(batch, loss_function=None, forward_only=True)
    values: torch.Tensor = output["model_output"]["log_probs"].values()
    return values[pack.answer_places(batch)[0] - 1].float()


def excess_of(packed: torch.Tensor, in_two: torch.Tensor, whole: torch.Tensor, rounding: float) -> torch.Tensor:
    """Return how many times as much packing changes log-probabilities as the size of micro-batches does."""
    floor = (rounding * whole.new_tensor(ROUNDING)).clamp(min=FLOOR * float(whole.abs().max()))
    return (change(packed, whole) / change(in_two, whole).maximum(floor)).max()


def change(values: torch.Tensor, usual: torch.Tensor) -> torch.Tensor:
    """Return the mean absolute difference, and the mean of its top 1%."""
    difference = (values - usual).abs()
    return torch.stack([difference.mean(), difference.topk(-(-len(difference) // 100)).values.mean()])
