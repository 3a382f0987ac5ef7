"""Compute each prompt once for all its responses in a micro-batch.

Packed into one sequence, a prompt of P tokens with n responses of R tokens costs P + n R tokens instead of n (P + R):

    prompt | response 1 | response 2 | ...        a token of a response sees the prompt and its own response
    0 .. P | P ..       | P ..       | ...        positions as if each response alone followed the prompt

The activations of the prompt receive the sum of the gradients of its responses. Loss and gradient therefore equal those
of verl's engine up to floating-point error. The plan is an argument of the model's layers, because gradient
checkpointing calls them again.
"""

import logging
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.nn.functional import embedding, scaled_dot_product_attention
from transformers import AttentionInterface
from verl.utils import tensordict_utils as tu

from verl_ext.errors import IntegrationError, listed
from verl_ext.update import SHARE_MARK
from verl_ext.update.split import entry, row_lengths

logger = logging.getLogger("verl_ext")
ATTENTION = "verl_ext_share_prompts"
"""The name of `attend` among transformers' attention functions. It has no mask function, so no mask is made."""
ANSWERS = "verl_ext_answers"


class Plan(NamedTuple):
    """The attention of a micro-batch. A segment (prompt or response) sees the keys of its prompt and its own, causally.

    FSDP passes integer tensors to every layer unchanged, but copies lists.
    """

    keys: torch.Tensor  # places of each segment's keys
    query_ends: torch.Tensor  # 0, and where each segment ends among the queries
    key_ends: torch.Tensor
    most_queries: int  # of a segment
    most_keys: int


def pack(data: Any) -> tuple[torch.Tensor, torch.Tensor, Plan]:
    """Return the packed sequence by places in the rows, the places in it that predict the responses, and its plan.

    The last token of a response predicts nothing and is excluded.
    """
    lengths, starts = row_lengths(data, share=True), data["input_ids"].offsets().tolist()
    device, end = data["input_ids"].device, 0
    taken, keys, sizes = [], [], []
    predict: dict[int, list[tuple[int, int]]] = {}
    for group in lengths.by_prompt():
        first, length = starts[group[0]], lengths.prompt[group[0]]
        prompt, end = (end, end + length), end + length
        taken.append((first, first + length))
        keys.append(prompt)
        sizes.append((length, length))
        for row in group:
            begin, size = starts[row] + length, max(0, lengths.answer[row] - 1)
            answer, end = (end, end + size), end + size
            predict[row] = [(prompt[1] - 1, prompt[1]), answer][: lengths.answer[row]]
            if size:
                taken.append((begin, begin + size))
                keys += [prompt, answer]
                sizes.append((size, length + size))
    ends = torch.tensor([(0, 0), *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32).T.contiguous().to(device)
    plan = Plan(within(keys, device), *ends, *map(max, zip(*sizes, strict=True)))
    return within(taken, device), within([span for row in sorted(predict) for span in predict[row]], device), plan


def within(spans: Iterable[tuple[int, int]], device: torch.device) -> torch.Tensor:
    """Return the places within some spans, each a begin and an end."""
    return torch.cat([torch.arange(begin, end) for begin, end in spans]).to(device)


@cache
def flash(device: str, dtype: torch.dtype, size: int, of_values: int) -> bool:
    """Return whether torch's flash attention supports heads of this size; on a GPU, warn once if it does not."""
    fits = dtype in (torch.bfloat16, torch.float16) and size == of_values and size % 8 == 0 and size <= 256
    if device == "cuda" and not (fits and torch.version.hip is None and torch.cuda.get_device_capability() >= (8, 0)):
        logger.warning(
            "algorithm.verl_ext.share_prompts=True is slow here, because torch's flash attention does not support %s "
            "with a head size of %s on this GPU. Set algorithm.verl_ext.share_prompts=False if the update takes longer "
            "than without it.",
            dtype,
            size,
        )
        return False
    return fits and device in ("cuda", "meta")


def attend(
    _module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: Any,
    *,
    plan: Plan | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **other: Any,
) -> tuple[torch.Tensor, None]:
    """Replace a model's attention.

    The tokens of a prompt see the prompt. The tokens of a response see the prompt and their own response.
    """
    wrong = [name for name in ("sliding_window", "softcap", "s_aux", "position_bias") if other.get(name) is not None]
    if plan is None or wrong:
        why = f"uses {listed(wrong)}" if wrong else "does not receive the argument 'plan' of its layers"
        raise IntegrationError(
            f"algorithm.verl_ext.share_prompts=True does not support this model, because its attention {why}. Set "
            "algorithm.verl_ext.share_prompts=False."
        )
    if query.dtype == torch.float32 and torch.is_autocast_enabled(query.device.type):  # some norms return fp32
        query, key, value = (x.to(torch.get_autocast_dtype(x.device.type)) for x in (query, key, value))
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # each [token, head, size]
    k, v = (embedding(plan.keys, x.flatten(1)).view(-1, *x.shape[1:]) for x in (k, v))
    if flash(q.device.type, q.dtype, q.shape[-1], v.shape[-1]):
        out, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *plan[1:], dropout, True, False, scale=scaling)
        return out[None], None
    options: dict[str, Any] = {"dropout_p": dropout, "scale": scaling, "enable_gqa": True}
    of_queries, of_keys = (ends.diff().tolist() for ends in (plan.query_ends, plan.key_ends))
    sized = ((q, of_queries), (k, of_keys), (v, of_keys))
    parts = (torch.split(x.transpose(0, 1)[None], sizes, dim=2) for x, sizes in sized)
    segments = []
    for q, k, v in zip(*parts, strict=True):
        before = k.shape[2] - q.shape[2]
        seen = q.new_ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(before) if before else None
        segments.append(scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=not before, **options))
    return torch.cat(segments, dim=2).transpose(1, 2), None


AttentionInterface.register(ATTENTION, attend)


def answer_places(data: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the places of the response tokens in the rows, and where each response begins and ends among them."""
    ids, sizes = data["input_ids"], row_lengths(data, share=False).answer
    spans = ((end - size, end) for end, size in zip(ids.offsets()[1:].tolist(), sizes, strict=True))
    return within(spans, ids.device), torch.tensor([0, *sizes], device=ids.device).cumsum(0)


def wrap_inputs(original: Callable[..., Any], self: Any, micro_batch: Any) -> Any:
    """`prepare_model_inputs(self, micro_batch)`: the packed sequence, and logits for the response tokens only."""
    if not entry(micro_batch, SHARE_MARK, False):
        return original(self, micro_batch)
    names = ("input_ids", "position_ids")
    taken, predict, plan = pack(micro_batch)
    places, offsets = answer_places(micro_batch)
    # verl's arguments for a batch of only the responses fit their logits, except the labels.
    answers = micro_batch.copy()
    tu.assign_non_tensor(answers, use_remove_padding=True)
    for name in names:
        answers[name] = torch.nested.nested_tensor_from_jagged(micro_batch[name].values()[places], offsets)
    inputs, arguments = original(self, answers)
    if other := inputs.keys() - {*names, "attention_mask"}:
        raise IntegrationError(
            f"algorithm.verl_ext.share_prompts=True does not support this model, because its inputs {listed(other)} "
            "cannot be packed. Set algorithm.verl_ext.share_prompts=False."
        )
    arguments |= {"input_ids_rmpad_rolled": answers["input_ids"].values(), ANSWERS: (answers, places)}
    inputs |= {name: micro_batch[name].values()[taken][None] for name in names}
    return {**inputs, "logits_to_keep": predict, "plan": plan}, arguments


def wrap_outputs(
    original: Callable[..., Any],
    self: Any,
    output: Any,
    output_args: dict[str, Any],
    micro_batch: Any,
    logits_processor_func: Any,
) -> Any:
    """`prepare_model_outputs(self, ...)`: verl's outputs for the response tokens, at their places in the rows."""
    if ANSWERS not in output_args:
        return original(self, output, output_args, micro_batch, logits_processor_func)
    answers, places = output_args[ANSWERS]
    offsets, in_rows = micro_batch["input_ids"].offsets(), {}
    for name, values in original(self, output, output_args, answers, logits_processor_func).items():
        whole = values.values().new_zeros(int(offsets[-1]))
        whole = whole.index_put((places - 1,), values.values())  # the token before predicts
        in_rows[name] = torch.nested.nested_tensor_from_jagged(whole, offsets)
    return in_rows
