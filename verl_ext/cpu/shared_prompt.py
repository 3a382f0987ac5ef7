"""Keys and values of a batch in which many answers continue the same prompt.

A prompt's keys and values are stored once, and those of an answer's own tokens per row. One decoding step attends to
both parts: the rows of a prompt lie side by side in a grid, so that one matrix product reads the prompt's keys for all
of them. All rows are at the same step, so the answers' part needs no padding.

    grid    [prompt, place] -> row
    prompt  keys, values [prompt, head, token, size], padded on the left
    answer  keys, values [row, head, token, size]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import AttentionInterface, Cache, DynamicCache

from verl_ext.errors import IntegrationError, listed

ATTENTION = "verl_ext_shared_prompt"
"""The name of `attend` among transformers' attention functions. It has no mask function, so no mask is made."""
BLOCK = 64
"""The answers' part grows by this many tokens at a time."""


class SharedPromptCache(Cache):
    """What `attend` reads, and where a model stores a step's keys and values."""

    def __init__(
        self, caches: Sequence[DynamicCache], masks: Sequence[torch.Tensor], prompt_of_row: torch.Tensor
    ) -> None:
        super().__init__(layers=[])
        width = max(mask.shape[1] for mask in masks)

        def joined(parts: list[torch.Tensor]) -> torch.Tensor:  # padded with 0 on the left
            return torch.cat([pad(part, (0, 0, width - part.shape[-2], 0)) for part in parts])

        layers = list(zip(*(cache.layers for cache in caches), strict=True))
        self.prompts = [(joined([p.keys for p in parts]), joined([p.values for p in parts])) for parts in layers]
        real = joined([mask[:, :, None].float() for mask in masks])[:, None, None, :, 0]
        self.padding = torch.zeros(real.shape).masked_fill_(real == 0, -torch.inf)
        self.answers: list[list[torch.Tensor]] = []
        self.length = 0  # of the answers so far, without the running step
        self.layer = 0
        self._place(prompt_of_row)

    def _place(self, prompt_of_row: torch.Tensor) -> None:
        """Rows of a prompt must be neighbours; `place` counts within them."""
        self.prompt_of_row = prompt_of_row
        rows = torch.arange(len(prompt_of_row))
        counts = torch.bincount(prompt_of_row)
        self.place = rows - (counts.cumsum(0) - counts)[prompt_of_row]
        self.grid = torch.zeros(len(self.padding), int(counts.max()), dtype=torch.long)  # a hole reads row 0, unused
        self.grid[prompt_of_row, self.place] = rows

    def keep(self, rows: torch.Tensor) -> None:
        """Drop all other rows, and the prompts that have none left."""
        self.answers = [[part[rows] for part in layer] for layer in self.answers]
        prompt_of_row = self.prompt_of_row[rows]
        left = torch.bincount(prompt_of_row, minlength=len(self.padding)) > 0
        if not bool(left.all()):
            prompts = left.nonzero()[:, 0]
            prompt_of_row = (left.cumsum(0) - 1)[prompt_of_row]
            self.prompts = [(keys[prompts], values[prompts]) for keys, values in self.prompts]
            self.padding = self.padding[prompts]
        self._place(prompt_of_row)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store one token's keys and values [row, head, 1, size]; the answers' keys and values so far."""
        self.layer = layer_idx
        if layer_idx == len(self.answers):
            self.answers.append([key_states.new_empty(0), value_states.new_empty(0)])
        end = self.length + 1
        so_far = []
        for number, new in enumerate((key_states, value_states)):
            part = self.answers[layer_idx][number]
            if part.ndim == 1 or part.shape[2] < end:
                rows, heads, _, size = new.shape
                larger = new.new_empty(rows, heads, self.length + BLOCK, size)
                if part.ndim > 1:
                    larger[:, :, : self.length] = part[:, :, : self.length]
                self.answers[layer_idx][number] = part = larger
            part[:, :, end - 1 : end] = new
            so_far.append(part[:, :, :end])
        return so_far[0], so_far[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The prompts' width and the answers' length."""
        return self.padding.shape[-1] + self.length


def attend(
    module: torch.nn.Module,  # noqa: ARG001
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001
    *,
    scaling: float,
    shared: SharedPromptCache | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one new token a row: softmax over the prompt's and the answer's tokens together."""
    if shared is None:
        raise IntegrationError("this model's layers do not hand their keyword arguments to the attention function")
    if names := [name for name in ("softcap", "s_aux", "position_bias") if others.get(name) is not None]:
        raise IntegrationError(f"this model's attention needs {listed(names)}")
    rows, heads, _, size = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads  # query heads that share one key head
    query = query.reshape(rows, kv_heads, group, size)
    prompt_keys, prompt_values = shared.prompts[shared.layer]
    prompts, places = shared.grid.shape

    def to_grid(x: torch.Tensor) -> torch.Tensor:  # [row, head, group, n] -> [prompt, head, place * group, n]
        return x[shared.grid].transpose(1, 2).reshape(prompts, kv_heads, places * group, -1)

    def to_rows(x: torch.Tensor) -> torch.Tensor:
        x = x.view(prompts, kv_heads, places, group, -1).transpose(1, 2)
        return x[shared.prompt_of_row, shared.place]

    to_prompt = torch.matmul(to_grid(query), prompt_keys.transpose(-1, -2)) * scaling + shared.padding
    to_answer = torch.matmul(query, key.transpose(-1, -2)) * scaling
    width = prompt_keys.shape[2]
    weights = torch.cat([to_rows(to_prompt), to_answer], dim=-1).softmax(dim=-1, dtype=torch.float32).to(value.dtype)
    out = to_rows(torch.matmul(to_grid(weights[..., :width]), prompt_values))
    out += torch.matmul(weights[..., width:], value)
    return out.reshape(rows, 1, heads, size), None


AttentionInterface.register(ATTENTION, attend)
