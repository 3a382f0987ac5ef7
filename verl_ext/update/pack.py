"""Compute each prompt once for all its responses in a micro-batch.

verl computes a prompt with n responses as n rows, each with the prompt. Here the prompt and its responses are one
sequence, the *packed* sequence, with the prompt once. Example: two prompts P and Q of 3 and 2 tokens. The responses a
and b belong to P, the response c to Q.

    rows                P P P a a a | P P P b b | Q Q c c       15 tokens in verl's rows
    number of a token   0 1 2 3 4 5   6 7 8 9 10  11 12 13 14

    packed sequence     P P P | a a | b | Q Q | c               9 tokens
    taken from          0 1 2   3 4   9   11 12  13             `taken`: numbers of tokens in the rows
    place               0 1 2   3 4   5   6 7   8
    position            0 1 2   3 4   3   0 1   2               as if each response alone followed its prompt

    segment (queries)   keys that it sees, causally at its end
    P    0-2            0-2
    a    3-4            0-2 and 3-4
    b    5              0-2 and 5
    Q    6-7            6-7
    c    8              6-7 and 8

    logits needed at    2 3 4 (for a a a), 2 5 (for b b), 7 8 (for c c)       `predicting`: places in the sequence

The last token of a response predicts nothing and is left out. The last token of a prompt predicts the first token of
each of its responses. The activations of a prompt receive the sum of the gradients of its responses. Loss and gradient
therefore equal those of verl's engine up to floating-point error.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.nn.functional import embedding, scaled_dot_product_attention
from transformers import AttentionInterface
from verl.utils import tensordict_utils as tu

from verl_ext.errors import IntegrationError, listed
from verl_ext.update import SHARE_MARK
from verl_ext.update.split import entry, read_lengths

logger = logging.getLogger("verl_ext")
ATTENTION = "verl_ext_share_prompts"
"""The name of `attend` among transformers' attention functions. It has no mask function, so no mask is made."""
RESPONSES = "verl_ext_responses"
"""The key under which `wrap_inputs` passes the responses of a micro-batch to `wrap_outputs`."""
FLASH_DTYPES = (torch.bfloat16, torch.float16)
FLASH_LARGEST_HEAD = 256
Span = tuple[int, int]
"""Consecutive places: the first, and the one after the last."""


class Plan(NamedTuple):
    """Which keys each segment (a prompt or a response) of the packed sequence sees.

    Each layer gets the plan as an argument, because gradient checkpointing calls the layers again. FSDP passes integer
    tensors to every layer unchanged, but copies lists.
    """

    keys: torch.Tensor
    """The places of the keys of the first segment, then those of the second, and so on."""
    query_ends: torch.Tensor
    """0, and where the queries of each segment end in the packed sequence."""
    key_ends: torch.Tensor
    """0, and where the keys of each segment end in `keys`."""
    most_queries: int
    """The largest number of queries of a segment."""
    most_keys: int


class _Layout:
    """The packed sequence, to which segments are added."""

    def __init__(self) -> None:
        self.length = 0
        self.taken: list[Span] = []
        """Where the tokens of each segment are in the rows."""
        self.keys: list[Span] = []
        self.query_counts: list[int] = []
        self.key_counts: list[int] = []

    def add(self, first_token: int, count: int, prompt: Sequence[Span] = ()) -> Span:
        """Add a segment that sees its prompt, if it has one, and itself. Return its span in the packed sequence."""
        segment = (self.length, self.length + count)
        self.length += count
        self.taken.append((first_token, first_token + count))
        key_spans = [*prompt, segment]
        self.keys += key_spans
        self.query_counts.append(count)
        self.key_counts.append(sum(end - begin for begin, end in key_spans))
        return segment

    def plan(self, device: torch.device) -> Plan:
        return Plan(
            places_in(self.keys, device),
            ends_of(self.query_counts).to(device),
            ends_of(self.key_counts).to(device),
            max(self.query_counts),
            max(self.key_counts),
        )


class Packed(NamedTuple):
    """A packed micro-batch."""

    taken: torch.Tensor
    """The number in the rows of each token of the packed sequence."""
    predicting: torch.Tensor
    """The place in the packed sequence that predicts each token of the responses, row by row."""
    plan: Plan


def pack(data: Any) -> Packed:
    """Pack the rows of a micro-batch."""
    lengths = read_lengths(data, share=True)
    row_starts = data["input_ids"].offsets().tolist()
    device = data["input_ids"].device
    layout = _Layout()
    predicting_spans: dict[int, list[Span]] = {}
    for rows_of_prompt in lengths.group_by_prompt(lengths.rows):
        first_row = rows_of_prompt[0]
        prompt_tokens = lengths.prompt_tokens[first_row]
        prompt = layout.add(row_starts[first_row], prompt_tokens)
        last_of_prompt = (prompt[1] - 1, prompt[1])
        for row in rows_of_prompt:
            response_tokens = lengths.response_tokens[row]
            predicting_spans[row] = []
            if response_tokens > 0:
                predicting_spans[row].append(last_of_prompt)
            if response_tokens > 1:
                response = layout.add(row_starts[row] + prompt_tokens, response_tokens - 1, [prompt])
                predicting_spans[row].append(response)
    in_order_of_rows = [span for row in lengths.rows for span in predicting_spans[row]]
    return Packed(places_in(layout.taken, device), places_in(in_order_of_rows, device), layout.plan(device))


def places_in(spans: Iterable[Span], device: torch.device) -> torch.Tensor:
    """Return all places in some spans, one after the other."""
    return torch.cat([torch.arange(begin, end) for begin, end in spans]).to(device)


def ends_of(counts: Sequence[int]) -> torch.Tensor:
    """Return 0, and where each of consecutive parts ends, as flash attention expects it."""
    return torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)


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
    """Compute a model's attention by the plan: `[1, head, token, size]` to `[1, token, head, size]`.

    The tokens of a prompt see the prompt. The tokens of a response see the prompt and their own response.
    """
    plan = require_supported(plan, other)
    device_type = query.device.type
    if query.dtype == torch.float32 and torch.is_autocast_enabled(device_type):  # some norms return fp32
        dtype = torch.get_autocast_dtype(device_type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    queries, keys, values = (x[0].transpose(0, 1) for x in (query, key, value))  # each [token, head, size]
    # Each segment gets a copy of the keys and values that it sees. The gradient of `embedding` adds the copies up.
    keys = embedding(plan.keys, keys.flatten(1)).view(-1, *keys.shape[1:])
    values = embedding(plan.keys, values.flatten(1)).view(-1, *values.shape[1:])
    if flash_supports(device_type, queries.dtype, queries.shape[-1], values.shape[-1]):
        ends, most = (plan.query_ends, plan.key_ends), (plan.most_queries, plan.most_keys)
        # Causal, aligned at the end of each segment; without a mask for debugging.
        output, *_ = torch.ops.aten._flash_attention_forward(
            queries, keys, values, *ends, *most, dropout, True, False, scale=scaling
        )
        return output[None], None
    return attend_by_segment(queries, keys, values, plan, scaling, dropout), None


def require_supported(plan: Plan | None, other: dict[str, Any]) -> Plan:
    """Return the plan. Raise if the model passes no plan on, or an argument that changes its attention."""
    names = ("sliding_window", "softcap", "s_aux", "position_bias")
    unsupported = [name for name in names if other.get(name) is not None]
    if plan is not None and not unsupported:
        return plan
    reason = f"uses {listed(unsupported)}" if unsupported else "does not receive the argument 'plan' of its layers"
    raise IntegrationError(
        f"algorithm.verl_ext.share_prompts=True does not support this model, because its attention {reason}. Set "
        "algorithm.verl_ext.share_prompts=False."
    )


@cache
def flash_supports(device: str, dtype: torch.dtype, head_size: int, value_size: int) -> bool:
    """Return whether torch's flash attention supports heads of this size; on a GPU, warn once if it does not."""
    size_fits = head_size == value_size and head_size % 8 == 0 and head_size <= FLASH_LARGEST_HEAD
    supported = size_fits and dtype in FLASH_DTYPES
    if device == "cuda":
        is_nvidia = torch.version.hip is None
        supported = supported and is_nvidia and torch.cuda.get_device_capability() >= (8, 0)
        if not supported:
            logger.warning(
                "algorithm.verl_ext.share_prompts=True is slow here, because torch's flash attention does not support "
                "%s with a head size of %s on this GPU. Set algorithm.verl_ext.share_prompts=False if the update takes "
                "longer than without it.",
                dtype,
                head_size,
            )
        return supported
    return supported and device == "meta"  # the device of tests that check shapes without a GPU


def attend_by_segment(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: Plan,
    scaling: float | None,
    dropout: float,
) -> torch.Tensor:
    """Compute the attention of each segment by a call of its own. Return `[1, token, head, size]`."""
    query_counts = plan.query_ends.diff().tolist()
    key_counts = plan.key_ends.diff().tolist()
    segments = zip(
        split_tokens(queries, query_counts),
        split_tokens(keys, key_counts),
        split_tokens(values, key_counts),
        strict=True,
    )
    outputs = []
    for query, key, value in segments:
        query_count, key_count = query.shape[2], key.shape[2]
        prompt_tokens = key_count - query_count
        visible = None  # a prompt is causal, for which torch needs no mask
        if prompt_tokens:
            visible = query.new_ones(query_count, key_count, dtype=torch.bool).tril(prompt_tokens)
        output = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=visible,
            is_causal=visible is None,
            dropout_p=dropout,
            scale=scaling,
            enable_gqa=True,
        )
        outputs.append(output)
    return torch.cat(outputs, dim=2).transpose(1, 2)


def split_tokens(vectors: torch.Tensor, counts: list[int]) -> tuple[torch.Tensor, ...]:
    """Split `[token, head, size]` into one `[1, head, token, size]` for each segment."""
    return torch.split(vectors.transpose(0, 1)[None], counts, dim=2)


AttentionInterface.register(ATTENTION, attend)


def response_tokens_of(data: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers in the rows of all response tokens, and 0 and where each response ends among them."""
    input_ids = data["input_ids"]
    response_tokens = read_lengths(data, share=False).response_tokens
    row_ends = input_ids.offsets()[1:].tolist()
    spans = [(end - count, end) for end, count in zip(row_ends, response_tokens, strict=True)]
    ends = torch.tensor([0, *response_tokens], device=input_ids.device).cumsum(0)
    return places_in(spans, input_ids.device), ends


def wrap_inputs(original: Callable[..., Any], self: Any, micro_batch: Any) -> Any:
    """Wrap `prepare_model_inputs(self, micro_batch)`: the packed sequence, and logits for the response tokens only."""
    if not entry(micro_batch, SHARE_MARK, False):
        return original(self, micro_batch)
    if micro_batch["position_ids"].values().dim() != 1:
        raise IntegrationError(
            "algorithm.verl_ext.share_prompts=True does not support this model, because its positions have several "
            "dimensions. Set algorithm.verl_ext.share_prompts=False."
        )
    packed = pack(micro_batch)
    response_numbers, ends = response_tokens_of(micro_batch)
    # The logits are those of the response tokens. verl's arguments for them are those of a batch with only the
    # responses, except the labels: verl would take the next token of such a batch.
    responses = micro_batch.copy()
    tu.assign_non_tensor(responses, use_remove_padding=True)
    for name in ("input_ids", "position_ids"):
        response_values = micro_batch[name].values()[response_numbers]
        responses[name] = torch.nested.nested_tensor_from_jagged(response_values, ends)
    inputs, arguments = original(self, responses)
    arguments["input_ids_rmpad_rolled"] = responses["input_ids"].values()
    arguments[RESPONSES] = (responses, response_numbers)
    unsupported = inputs.keys() - {"input_ids", "position_ids", "attention_mask"}
    if unsupported:
        raise IntegrationError(
            f"algorithm.verl_ext.share_prompts=True does not support this model, because its inputs "
            f"{listed(unsupported)} cannot be packed. Set algorithm.verl_ext.share_prompts=False."
        )
    for name in ("input_ids", "position_ids"):
        inputs[name] = micro_batch[name].values()[packed.taken][None]
    inputs["logits_to_keep"] = packed.predicting
    inputs["plan"] = packed.plan
    return inputs, arguments


def wrap_outputs(
    original: Callable[..., Any],
    self: Any,
    output: Any,
    output_args: dict[str, Any],
    micro_batch: Any,
    logits_processor_func: Any,
) -> Any:
    """Wrap `prepare_model_outputs(self, ...)`: put the outputs for the response tokens at their places in the rows."""
    if RESPONSES not in output_args:
        return original(self, output, output_args, micro_batch, logits_processor_func)
    responses, response_numbers = output_args[RESPONSES]
    row_ends = micro_batch["input_ids"].offsets()
    predicting_numbers = response_numbers - 1  # verl keeps an output at the token before the one that it is about
    outputs = {}
    for name, response_outputs in original(self, output, output_args, responses, logits_processor_func).items():
        response_values = response_outputs.values()
        row_values = response_values.new_zeros(int(row_ends[-1]))
        row_values = row_values.index_put((predicting_numbers,), response_values)
        outputs[name] = torch.nested.nested_tensor_from_jagged(row_values, row_ends)
    return outputs
