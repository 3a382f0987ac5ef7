"""Compute a prompt once for all its answers in the update: `actor_rollout_ref.model.external_lib=shared_update`.

verl's FSDP engine passes every answer with its prompt through the model, so a prompt of 290 tokens with 8 answers of 90
tokens costs 3,040 tokens. Packed into one sequence they cost 290 + 8 x 90 = 1,010:

    prompt | answer 1 | answer 2 | ...        an answer's token sees the prompt and its own answer
    0 .. P | P ..     | P ..     | ...        positions, as if each answer stood alone behind the prompt

Loss and gradient are those of verl's engine, to within rounding (`tests/integration/test_shared_update.py`). The model
must take a 4-D attention mask and `logits_to_keep`, as those of transformers with `attn_implementation=sdpa` do. The
rows of a prompt must be in one micro-batch: `use_dynamic_bsz=False`, `ppo_micro_batch_size_per_gpu=rollout.n`,
`trainer.balance_batch=False`.

Linear layers in fp32 are computed by oneDNN, in the update and in the rollout: torch's own way, MKL, uses no AVX-512 on
AMD's processors and takes twice as long there.
"""

from __future__ import annotations

from typing import Any

import torch
from verl.utils import tensordict_utils as tu
from verl.utils import torch_functional
from verl.workers.engine.fsdp import transformer_impl

ENGINE = transformer_impl.FSDPEngineWithLMHead


def pack(prompts: list[torch.Tensor], answers: list[torch.Tensor]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the model's inputs, and for each answer token (row after row) the kept logits that predict it."""
    tokens: list[torch.Tensor] = []
    positions, groups, rows = [], [], []
    known: dict[tuple[int, ...], int] = {}
    last: list[int] = []  # of each prompt, its last token's place in the sequence
    size = 0

    def add(part: torch.Tensor, start: int, group: int, row: int) -> None:
        nonlocal size
        tokens.append(part)
        positions.append(torch.arange(start, start + len(part)))
        groups.append(torch.full((len(part),), group))
        rows.append(torch.full((len(part),), row))
        size += len(part)

    group_of_row = []
    for prompt in prompts:
        key = tuple(prompt.tolist())
        if key not in known:
            known[key] = len(known)
            add(prompt, 0, known[key], -1)
            last.append(size - 1)
        group_of_row.append(known[key])
    needed = [torch.tensor(last)]
    wanted = []
    kept = len(last)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        size_of_row = max(0, len(answer) - 1)  # the last token predicts nothing
        wanted.append(torch.tensor([group_of_row[row], *range(kept, kept + size_of_row)])[: len(answer)])
        needed.append(torch.arange(size, size + size_of_row))
        kept += size_of_row
        add(answer[:-1], len(prompt), group_of_row[row], row)
    position, group, row_of = torch.cat(positions), torch.cat(groups), torch.cat(rows)
    seen = (group[:, None] == group) & (position[:, None] >= position)
    seen &= (row_of == -1) | (row_of[:, None] == row_of)
    inputs = {
        "input_ids": torch.cat(tokens)[None],
        "position_ids": position[None],
        "attention_mask": seen[None, None],
        "logits_to_keep": torch.cat(needed),
    }
    return inputs, torch.cat(wanted)


def prepare_model_inputs(_engine: Any, micro_batch: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Replace the engine's method."""
    if tu.get_non_tensor_data(data=micro_batch, key="use_fused_kernels", default=False):
        raise NotImplementedError("shared_update has no fused kernels")
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


torch.nn.Linear.forward = linear
ENGINE.prepare_model_inputs = prepare_model_inputs
ENGINE.prepare_model_outputs = prepare_model_outputs
