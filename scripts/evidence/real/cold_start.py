"""A short supervised fine-tuning that teaches the format of the answers, in plain torch, and samples after it."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from real.model import END
from verl_ext.cpu.generation import Request, Sampling, generate

BATCH, MICRO_BATCH, WARM_UP = 8, 4, 5
Example = tuple[list[int], list[int]]
"""Token ids of a prompt and of its answer."""


def lr_at(step: int, steps: int, lr: float) -> float:
    """Linear warm-up, then linear decay that would reach 0 one step after the last.

    >>> [round(lr_at(step, 8, 1.0), 2) for step in range(8)]
    [0.2, 0.4, 0.6, 0.8, 1.0, 0.75, 0.5, 0.25]
    """
    return lr * min((step + 1) / WARM_UP, (steps - step) / max(1, steps - WARM_UP + 1))


def prompt_ids(tokenizer: Any, messages: Sequence[dict[str, str]]) -> list[int]:
    """The prompt as RL shows it."""
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    return token_ids(tokenizer, text)


def token_ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def examples(tokenizer: Any, rows: Sequence[dict[str, Any]]) -> list[Example]:
    """The rows of cold_start.parquet; an answer ends with END."""
    return [(prompt_ids(tokenizer, row["prompt"]), token_ids(tokenizer, row["answer"] + END)) for row in rows]


def batches(lengths: Sequence[int], steps: int) -> list[list[int]]:
    """Indices of the examples of each step. Neighbours in length share a batch, for little padding; order is seeded.

    Every example occurs once before one occurs again, except for those that do not fill a batch.
    """
    rng = random.Random(0)
    order = list(range(len(lengths)))
    chosen: list[list[int]] = []
    while len(chosen) < steps:
        rng.shuffle(order)
        kept = sorted(order[: len(order) // BATCH * BATCH], key=lengths.__getitem__)
        epoch = [kept[at : at + BATCH] for at in range(0, len(kept), BATCH)]
        rng.shuffle(epoch)
        chosen += epoch
    return chosen[:steps]


def loss_of(model: Any, batch: Sequence[Example]) -> torch.Tensor:
    """Mean cross-entropy of the answers' tokens. Logits are computed for these only: they are the largest tensor."""
    longest = max(len(prompt) + len(answer) for prompt, answer in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    wanted = torch.zeros(len(batch), longest, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(batch):
        size = len(prompt) + len(answer)
        ids[row, :size] = torch.tensor(prompt + answer)
        wanted[row, len(prompt) : size] = True
    # No attention mask: padding on the right comes after every token that counts.
    hidden = model.base_model(input_ids=ids).last_hidden_state
    logits = model.get_output_embeddings()(hidden[:, :-1][wanted[:, 1:]])
    return torch.nn.functional.cross_entropy(logits.float(), ids[wanted])


def backward(model: Any, batch: Sequence[Example]) -> float:
    """Add the gradients of the batch's loss, a few rows at a time for less memory; return the loss."""
    tokens, loss = sum(len(answer) for _, answer in batch), 0.0
    for at in range(0, len(batch), MICRO_BATCH):
        part = batch[at : at + MICRO_BATCH]
        # Without its own instructions for bf16 a processor takes tens of times as long as in fp32.
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=torch.ops.mkldnn._is_mkldnn_bf16_supported()):
            share = loss_of(model, part) * (sum(len(answer) for _, answer in part) / tokens)
        share.backward()
        loss += share.item()
    return loss


def train(model: Any, data: Sequence[Example], steps: int, lr: float) -> Iterator[float]:
    """Train in place with AdamW; yield the loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    model.train()
    for step, batch in enumerate(batches([len(prompt) + len(answer) for prompt, answer in data], steps)):
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, steps, lr)
        loss = backward(model, [data[index] for index in batch])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield loss


def sample(
    model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], *, temperature: float, max_tokens: int, seed: int
) -> list[list[int]]:
    """One answer's ids for each prompt, up to and with its end token. Temperature 0 is greedy."""
    sampling = Sampling(temperature=temperature, max_tokens=max_tokens)
    requests = [Request(prompt, sampling, seed + number) for number, prompt in enumerate(prompts)]
    done = generate(model.eval(), requests, eos=[tokenizer.eos_token_id], abort=threading.Event())
    return [completion.tokens for completion in done]
