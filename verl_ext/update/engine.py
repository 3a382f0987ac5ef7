"""Change verl's FSDP engine according to the marks of a pass, and verify the result at the first pass.

Packing must not change log-probabilities more than the size of verl's own micro-batches does.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, cast

import torch
from verl.utils import tensordict_utils as tu
from verl.workers.engine.fsdp import transformer_impl

from verl_ext import hooks
from verl_ext.errors import IntegrationError
from verl_ext.update import SHARE_MARK, SKIP_MARK, pack, split
from verl_ext.update.split import METRICS_KEY, entry

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
    """Wrap `forward_backward_batch(self, data, ...)`: check the engine once, and return the metrics of an update."""
    share = entry(data, SHARE_MARK, False)
    skip = entry(data, SKIP_MARK, False)
    if not (share or skip):
        return original(self, data, loss_function, forward_only)
    if share and not hasattr(self, CHECKED):
        check_first_pass(self, data)
        setattr(self, CHECKED, True)
    # This must last until the backward pass is done, because gradient checkpointing computes the layers again.
    with computing(self, share=share):
        output = original(self, data, loss_function, forward_only)
    if not forward_only:
        for name, value in entry(data, METRICS_KEY).items():
            output["metrics"][f"actor/{name}"] = [value]
    return output


@contextmanager
def computing(engine: Any, *, share: bool) -> Iterator[None]:
    """Let an engine compute attention with `pack.attend`, and log-probabilities with `log_probs` without flash-attn."""
    config = engine.module.config
    module = cast("Any", transformer_impl)
    usual_attention = config._attn_implementation
    usual_log_probs = module.logprobs_from_logits
    if share:
        config._attn_implementation = pack.ATTENTION
    has_fast_log_probs = find_spec("flash_attn") or find_spec("torch_npu")
    if not has_fast_log_probs:
        module.logprobs_from_logits = log_probs
    try:
        yield
    finally:
        config._attn_implementation = usual_attention
        module.logprobs_from_logits = usual_log_probs


def check_first_pass(engine: Any, data: Any) -> None:
    """Raise on all ranks if packing changes log-probabilities more than rounding explains.

    Some rows of the batch are computed three times: by verl's engine in one micro-batch, by verl's engine in two
    micro-batches, and packed. The first two show the size of rounding.
    """
    rows = rows_to_check(data)
    half = max(1, len(rows) // 2)
    first_half = rows[:half]
    # If there is only one row, it is computed again without need: FSDP's ranks must make equally many passes.
    second_half = rows[half:] or rows
    in_one = response_log_probs(engine, data, rows)
    halves = [response_log_probs(engine, data, first_half), response_log_probs(engine, data, second_half)]
    in_two = torch.cat(halves)[: len(in_one)]
    with computing(engine, share=True):
        packed = response_log_probs(engine, data, rows, share=True)
    dtype = getattr(engine, "_autocast_dtype", torch.bfloat16)
    excess = excess_over_rounding(packed, in_two, in_one, torch.finfo(dtype).eps)
    torch.distributed.all_reduce(excess, op=torch.distributed.ReduceOp.MAX, group=engine.get_data_parallel_group())
    if not excess <= FACTOR:  # also for NaN
        raise IntegrationError(
            f"algorithm.verl_ext.share_prompts=True changes the log-probabilities of {type(engine.module).__name__} "
            f"{float(excess):.0f} times as much as other sizes of verl's micro-batches do. Rounding explains a factor "
            f"of at most {FACTOR}. Set algorithm.verl_ext.share_prompts=False."
        )


def rows_to_check(data: Any) -> list[int]:
    """Return as many rows as fit into one micro-batch of verl, at least one. Prompts with the most rows come first."""
    lengths = split.read_lengths(data, share=True)
    limit = split.token_limit(data)
    rows: list[int] = []
    for rows_of_prompt in sorted(lengths.group_by_prompt(lengths.rows), key=len, reverse=True):
        for row in rows_of_prompt:
            if rows and lengths.tokens_unshared([*rows, row]) > limit:
                return rows
            rows.append(row)
    return rows


def response_log_probs(engine: Any, data: Any, rows: Sequence[int], *, share: bool = False) -> torch.Tensor:
    """Return the log-probabilities of the responses in some rows, `[tokens]`; with `share` the rows are packed."""
    batch = tu.index_select_tensor_dict(data, list(rows))
    tu.assign_non_tensor(batch, **{SHARE_MARK: share, SKIP_MARK: False, "calculate_entropy": False})
    with torch.no_grad():
        _, output = engine.forward_step(batch, loss_function=None, forward_only=True)
    values: torch.Tensor = output["model_output"]["log_probs"].values()
    numbers, _ = pack.response_tokens_of(batch)
    return values[numbers - 1].float()  # verl keeps a log-probability at the token before the one that it is about


def excess_over_rounding(
    packed: torch.Tensor, in_two: torch.Tensor, in_one: torch.Tensor, rounding: float
) -> torch.Tensor:
    """Return `max(change by packing / max(change by micro-batches, smallest change that counts))`.

    The changes are the mean and the mean of the top 1%. In bf16 the smallest changes that count are about 0.008 and
    0.06, so that packing may always change the mean by 0.04.
    """
    smallest = FLOOR * float(in_one.abs().max())
    floor = (rounding * in_one.new_tensor(ROUNDING)).clamp(min=smallest)
    allowed = change(in_two, in_one).maximum(floor)
    return (change(packed, in_one) / allowed).max()


def change(values: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return the mean absolute difference, and the mean of its top 1%."""
    difference = (values - reference).abs()
    one_percent = -(-len(difference) // 100)  # rounded up
    return torch.stack([difference.mean(), difference.topk(one_percent).values.mean()])


CHUNK = 512
"""How many tokens have their logits in fp32 at a time, which bounds the memory."""


def log_probs(logits: torch.Tensor, labels: torch.Tensor, inplace_backward: bool = True) -> Any:
    """Return `log_softmax` of `[token, vocabulary]` at the labels, in fp32.

    On request the gradient overwrites the logits.
    """
    return _LogProbs.apply(logits, labels, inplace_backward)  # type: ignore[no-untyped-call]


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, inplace: bool) -> torch.Tensor:
        chunks = torch.split(logits, CHUNK)
        normalizers = torch.cat([chunk.float().logsumexp(dim=-1) for chunk in chunks])
        ctx.save_for_backward(logits, labels, normalizers)
        ctx.inplace = inplace
        chosen_logits = logits.gather(-1, labels[:, None])[:, 0]
        return chosen_logits.float() - normalizers

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Return `grad * (one_hot(label) - softmax(logits))`, in the type of the logits."""
        logits, labels, normalizers = ctx.saved_tensors
        logits = logits.detach()  # of one version with the saved ones, so that autograd raises if they are used again
        result = logits if ctx.inplace else torch.empty_like(logits)
        columns = (normalizers[:, None], grad[:, None], labels[:, None])
        chunks = (torch.split(tensor, CHUNK) for tensor in (logits, result, *columns))
        for chunk, result_chunk, normalizer, slope, label in zip(*chunks, strict=True):
            probabilities = (chunk.float() - normalizer).exp_()
            gradient = probabilities.mul_(-slope).scatter_add_(-1, label, slope)
            result_chunk.copy_(gradient)
        return result, None, None
