"""Compute a prompt once for all its answers in a micro-batch.

Packed into one sequence a prompt of P tokens with n answers of R costs P + n R tokens, not n (P + R):

    prompt | answer 1 | answer 2 | ...        an answer's token sees the prompt and its own answer
    0 .. P | P ..     | P ..     | ...        positions as if each answer stood alone behind the prompt

The prompt's activations get the sum of its answers' gradients, so loss and gradient are those of verl's engine, to
rounding. The layout is an argument of the model's layers, because gradient checkpointing calls them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from verl_ext.errors import IntegrationError, listed
from verl_ext.integration.update import SHARE, entry
from verl_ext.integration.update.split import read

ATTENTION = "verl_ext_share_prompts"
"""The name of `attend` among transformers' attention functions. It has no mask function, so no mask is made."""
ANSWERS = "verl_ext_answers"
Layout = list[list[int]]
"""For each prompt its tokens, and those of each answer except the last, which predicts nothing."""


def pack(data: Any) -> tuple[list[int], list[int], Layout]:
    """Return the packed sequence by places in the rows, the places in it that predict the answers, and its layout."""
    lengths, starts = read(data, share=True), data["input_ids"].offsets().tolist()
    taken: list[int] = []
    predict: dict[int, list[int]] = {}
    layout: Layout = []
    for group in lengths.by_prompt():
        first, length = starts[group[0]], lengths.prompt[group[0]]
        taken += range(first, first + length)
        layout.append([length])
        last = len(taken) - 1
        for row in group:
            begin, count = starts[row] + length, max(0, lengths.answer[row] - 1)
            predict[row] = [last, *range(len(taken), len(taken) + count)][: lengths.answer[row]]
            taken += range(begin, begin + count)
            layout[-1].append(count)
    return taken, [place for row in sorted(predict) for place in predict[row]], layout


def attend(
    _module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: Any,
    *,
    layout: Layout | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **other: Any,
) -> tuple[torch.Tensor, None]:
    """Replace a model's attention: a prompt's tokens see the prompt, an answer's the prompt and their own answer."""
    wrong = [name for name in ("sliding_window", "softcap", "s_aux", "position_bias") if other.get(name) is not None]
    if layout is None or wrong:
        raise IntegrationError(
            f"this model's attention needs {listed(wrong) if wrong else 'arguments'} that a packed prompt cannot give: "
            "set algorithm.verl_ext.share_prompts=False"
        )
    sizes = [size for group in layout for size in group]
    parts = [torch.split(x[0].transpose(0, 1), sizes) for x in (query, key, value)]  # each [token, head, size]
    options: dict[str, Any] = {"scale": scaling, "dropout_p": dropout, "enable_gqa": True}
    out: list[torch.Tensor] = []
    for _, *answers in layout:
        first, longest = len(out), max(answers)
        q, k, v = (part[first][None].transpose(1, 2) for part in parts)
        of_prompt = scaled_dot_product_attention(q, k, v, is_causal=True, **options)
        queries, *others = (_stacked(part[first + 1 : first + 1 + len(answers)], longest) for part in parts)
        shared = (x.expand(len(answers), -1, -1, -1) for x in (k, v))
        k, v = (torch.cat(pair, dim=2) for pair in zip(shared, others, strict=True))
        seen = torch.ones(longest, k.shape[2], dtype=torch.bool, device=k.device).tril(k.shape[2] - longest)
        of_answers = scaled_dot_product_attention(queries, k, v, attn_mask=seen, **options)
        out.append(of_prompt[0].transpose(0, 1))
        out += [row[:size] for row, size in zip(of_answers.transpose(1, 2).unbind(), answers, strict=True)]
    return torch.cat(out)[None], None


def _stacked(rows: Sequence[torch.Tensor], longest: int) -> torch.Tensor:
    return torch.stack([pad(row, (0, 0, 0, 0, 0, longest - len(row))) for row in rows]).transpose(1, 2)


AttentionInterface.register(ATTENTION, attend)


@contextmanager
def sharing(model: Any) -> Iterator[None]:
    """Let a model compute with `attend`."""
    usual = model.config._attn_implementation
    model.config._attn_implementation = ATTENTION
    try:
        yield
    finally:
        model.config._attn_implementation = usual


def answer_places(data: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the places of the answers' tokens in the rows, and where each answer begins and ends among them."""
    ids, sizes = data["input_ids"], read(data, share=False).answer
    ends = ids.offsets()[1:].tolist()
    places = [place for end, size in zip(ends, sizes, strict=True) for place in range(end - size, end)]
    return torch.tensor(places, device=ids.device), torch.tensor([0, *sizes], device=ids.device).cumsum(0)


def wrap_inputs(original: Callable[..., Any], self: Any, micro_batch: Any) -> Any:
    """`prepare_model_inputs(self, micro_batch)`: the packed sequence, and logits for the answers' tokens only."""
    if not entry(micro_batch, SHARE, False):
        return original(self, micro_batch)
    from verl.utils import tensordict_utils as tu

    names = ("input_ids", "position_ids")
    taken, predict, layout = pack(micro_batch)
    places, offsets = answer_places(micro_batch)
    # What verl prepares for a batch of the answers alone fits their logits, except the labels.
    answers = micro_batch.copy()
    tu.assign_non_tensor(answers, use_remove_padding=True)
    for name in names:
        answers[name] = torch.nested.nested_tensor_from_jagged(micro_batch[name].values()[places], offsets)
    inputs, arguments = original(self, answers)
    if other := inputs.keys() - {*names, "attention_mask"}:
        raise IntegrationError(
            f"this model's inputs {listed(other)} cannot be packed: set algorithm.verl_ext.share_prompts=False"
        )
    arguments |= {"input_ids_rmpad_rolled": answers["input_ids"].values(), ANSWERS: (answers, places)}
    inputs |= {name: micro_batch[name].values()[taken][None] for name in names}
    return {**inputs, "logits_to_keep": torch.tensor(predict, device=places.device), "layout": layout}, arguments


def wrap_outputs(
    original: Callable[..., Any],
    self: Any,
    output: Any,
    output_args: dict[str, Any],
    micro_batch: Any,
    logits_processor_func: Any,
) -> Any:
    """`prepare_model_outputs(self, ...)`: verl's, for the answers' tokens, put into the rows."""
    if ANSWERS not in output_args:
        return original(self, output, output_args, micro_batch, logits_processor_func)
    answers, places = output_args[ANSWERS]
    offsets, in_rows = micro_batch["input_ids"].offsets(), {}
    for name, values in original(self, output, output_args, answers, logits_processor_func).items():
        whole = values.values().new_zeros(int(offsets[-1]))
        whole = whole.index_put((places - 1,), values.values())  # the token before predicts
        in_rows[name] = torch.nested.nested_tensor_from_jagged(whole, offsets)
    return in_rows
