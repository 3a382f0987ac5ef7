"""Compute a prompt once for all its answers in the update: `actor_rollout_ref.model.external_lib=shared_update`.

verl's FSDP engine passes every answer with its prompt through the model, so a prompt of 290 tokens with 8 answers of 90
tokens costs 3,040 tokens. Packed into one sequence they cost 290 + 8 x 90 = 1,010:

    prompt | answer 1 | answer 2 | ...        an answer's token sees the prompt and its own answer
    0 .. P | P ..     | P ..     | ...        positions, as if each answer stood alone behind the prompt

Loss and gradient are those of verl's engine, to within rounding (`tests/integration/test_shared_update.py`). The model
must take its attention from transformers' table of functions, and `logits_to_keep`, as Llama does. The rows of a prompt
must be in one micro-batch: `use_dynamic_bsz=False`, `ppo_micro_batch_size_per_gpu=rollout.n`,
`trainer.balance_batch=False`.

Linear layers in fp32 are computed by oneDNN, in the update and in the rollout: torch's own way, MKL, uses no AVX-512 on
AMD's processors and takes twice as long there.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface
from verl.utils import tensordict_utils as tu
from verl.utils import torch_functional
from verl.workers.engine.fsdp import transformer_impl

ENGINE = transformer_impl.FSDPEngineWithLMHead
ATTENTION = "shared_update"
"""The name of `attend` among transformers' attention functions. It has no mask function, so no mask is made."""


Layout = list[tuple[slice, torch.Tensor, torch.Tensor]]
"""For each prompt: its places in the sequence, `[R, L]` those of its answers' tokens, and which of them exist."""


def pack(prompts: list[torch.Tensor], answers: list[torch.Tensor]) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the model's inputs, and for each answer token (row after row) the kept logits that predict it."""
    tokens: list[torch.Tensor] = []
    positions: list[torch.Tensor] = []
    size = 0

    def add(part: torch.Tensor, position: int) -> slice:
        nonlocal size
        tokens.append(part)
        positions.append(torch.arange(position, position + len(part)))
        size += len(part)
        return slice(size - len(part), size)

    groups: dict[tuple[int, ...], tuple[slice, list[slice]]] = {}
    parts = []
    for prompt, answer in zip(prompts, answers, strict=True):
        key = tuple(prompt.tolist())
        if key not in groups:
            groups[key] = (add(prompt, 0), [])
        place, rows = groups[key]
        rows.append(add(answer[:-1], len(prompt)))  # the last token predicts nothing
        parts.append((place.stop - 1, rows[-1]))
    # A prompt's last token predicts the first token of each of its answers.
    needed = sorted({last for last, _ in parts} | {at for _, row in parts for at in range(row.start, row.stop)})
    kept = {at: number for number, at in enumerate(needed)}
    wanted = [
        kept[at]
        for (last, row), answer in zip(parts, answers, strict=True)
        for at in [last, *range(row.start, row.stop)][: len(answer)]
    ]
    layout: Layout = []
    for place, rows in groups.values():
        starts, ends = (torch.tensor([getattr(row, name) for row in rows])[:, None] for name in ("start", "stop"))
        places = starts + torch.arange(int((ends - starts).max()))
        layout.append((place, places.clamp(max=size - 1), places < ends))
    inputs = {
        "input_ids": torch.cat(tokens)[None],
        "position_ids": torch.cat(positions)[None],
        "logits_to_keep": torch.tensor(needed),
        "layout": layout,
    }
    return inputs, torch.tensor(wanted)


def attend(
    _module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: Any,
    *,
    scaling: float,
    layout: Layout,
    **_other: Any,
) -> tuple[torch.Tensor, None]:
    """Replace the model's attention: a prompt's tokens see the prompt, an answer's the prompt and their own answer."""
    function = torch.nn.functional.scaled_dot_product_attention
    heads = query.shape[1] // key.shape[1]
    query, key, value = query[0], key[0].repeat_interleave(heads, dim=0), value[0].repeat_interleave(heads, dim=0)
    out = torch.zeros_like(query)  # [head, token, size]
    for prompt, places, real in layout:
        of_prompt = function(*(x[None, :, prompt] for x in (query, key, value)), is_causal=True, scale=scaling)[0]
        rows, longest = places.shape
        own = [x[:, places].transpose(0, 1) for x in (query, key, value)]  # [row, head, token, size]
        before = [x[None, :, prompt].expand(rows, -1, -1, -1) for x in (key, value)]
        keys, values = (torch.cat(pair, dim=2) for pair in zip(before, own[1:], strict=True))
        seen = torch.ones(longest, keys.shape[2], dtype=torch.bool).tril(keys.shape[2] - longest)
        of_answers = function(own[0], keys, values, attn_mask=seen, scale=scaling).transpose(0, 1)[:, real]
        out = out.index_copy(1, torch.arange(prompt.start, prompt.stop), of_prompt)
        out = out.index_copy(1, places[real], of_answers)
    return out.transpose(0, 1)[None], None


def prepare_model_inputs(engine: Any, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Replace the engine's method."""
    if tu.get_non_tensor_data(data=micro_batch, key="use_fused_kernels", default=False):
        raise NotImplementedError("shared_update has no fused kernels")
    engine.module.config._attn_implementation = ATTENTION
    answers = list(micro_batch["responses"].unbind())
    inputs, wanted = pack(list(micro_batch["prompts"].unbind()), answers)
    return inputs, {"wanted": wanted, "labels": torch.cat(answers)}


def prepare_model_outputs(
    _engine: Any,
    output: Any,
    output_args: dict[str, Any],
    micro_batch: Any,
    logits_processor_func: Any,  # noqa: ARG001
) -> dict[str, torch.Tensor]:
    """Replace the engine's method: log-probabilities and entropies of the answers' tokens, 0 for the prompts'."""
    offsets = micro_batch["input_ids"].offsets()
    logits = output.logits[0].float() / float(micro_batch["temperature"])
    ends, lengths = offsets[1:].tolist(), micro_batch["responses"].offsets().diff().tolist()
    # The token before an answer's first one predicts it.
    places = torch.cat([torch.arange(end - n - 1, end - 1) for end, n in zip(ends, lengths, strict=True)])

    def of_tokens(values: torch.Tensor) -> torch.Tensor:
        whole = values.new_zeros(int(offsets[-1])).index_put((places,), values)
        return torch.nested.nested_tensor_from_jagged(whole, offsets)

    wanted = output_args["wanted"]
    chosen = logits[wanted, output_args["labels"]]
    result = {"log_probs": of_tokens(chosen - logits.logsumexp(-1)[wanted])}
    if tu.get_non_tensor_data(data=micro_batch, key="calculate_entropy", default=False):
        result["entropy"] = of_tokens(torch_functional.entropy_from_logits(logits)[wanted])
    return result


class Linear(torch.autograd.Function):
    """`x @ weight.T` by oneDNN, with its gradients."""

    @staticmethod
    def multiply(x: torch.Tensor, weight: torch.Tensor) -> Any:
        return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")

    @staticmethod
    def forward(context: Any, x: torch.Tensor, weight: torch.Tensor) -> Any:
        context.save_for_backward(x, weight)
        return Linear.multiply(x, weight)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[Any, Any]:
        x, weight = context.saved_tensors
        of_weight = Linear.multiply(gradient.flatten(0, -2).T, x.flatten(0, -2).T)
        return Linear.multiply(gradient, weight.T), of_weight


def linear(layer: torch.nn.Linear, x: torch.Tensor) -> Any:
    """Replace `torch.nn.Linear.forward`."""
    if layer.bias is not None or x.dtype != torch.float32:
        return torch.nn.functional.linear(x, layer.weight, layer.bias)
    return Linear.apply(x, layer.weight)


AttentionInterface.register(ATTENTION, attend)
torch.nn.Linear.forward = linear
ENGINE.prepare_model_inputs = prepare_model_inputs
ENGINE.prepare_model_outputs = prepare_model_outputs
