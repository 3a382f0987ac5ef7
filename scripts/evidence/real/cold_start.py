"""A short supervised fine-tuning that teaches the format of the answers, in plain torch, and samples after it."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from real.model import END
from verl_ext.cpu.generation import Request, Sampling, generate
from verl_ext.errors import CheckpointError, ConfigurationError, DataError
from verl_ext.files import replacing


@dataclass(frozen=True)
class Settings:
    """All that the fine-tuning depends on besides the model and the examples."""

    steps: int = 60
    batch_size: int = 8
    micro_batch_size: int = 4
    """Rows of one forward and backward pass. Smaller needs less memory."""
    lr: float = 1e-4
    warm_up: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1 or not 0 < self.lr < math.inf:
            raise ConfigurationError(f"steps must be at least 1 and lr above 0, found {self.steps} and {self.lr}")

    def lr_at(self, step: int) -> float:
        """Linear warm-up, then linear decay that would reach 0 one step after the last.

        >>> [round(Settings(steps=4, lr=1.0, warm_up=2).lr_at(step), 2) for step in range(4)]
        [0.5, 1.0, 0.67, 0.33]
        """
        warming = (step + 1) / self.warm_up
        return self.lr * min(warming, (self.steps - step) / max(1, self.steps - self.warm_up + 1))


@dataclass(frozen=True)
class Example:
    """Token ids of a prompt and of its answer."""

    prompt: Sequence[int]
    answer: Sequence[int]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)


def prompt_ids(tokenizer: Any, messages: Sequence[dict[str, str]]) -> list[int]:
    """The prompt as RL shows it."""
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def examples(tokenizer: Any, rows: Sequence[dict[str, Any]]) -> list[Example]:
    """The rows of cold_start.parquet; an answer ends with END."""

    def answer(row: dict[str, Any]) -> list[int]:
        ids: list[int] = tokenizer(row["answer"] + END, add_special_tokens=False)["input_ids"]
        return ids

    return [Example(prompt_ids(tokenizer, row["prompt"]), answer(row)) for row in rows]


def batches(lengths: Sequence[int], settings: Settings) -> list[list[int]]:
    """Indices of the examples of each step. Neighbours in length share a batch, for little padding; order is seeded.

    Every example occurs once before one occurs again, except for those that do not fill a batch.
    """
    rng = random.Random(settings.seed)
    order = list(range(len(lengths)))
    chosen: list[list[int]] = []
    while len(chosen) < settings.steps:
        rng.shuffle(order)
        kept = sorted(order[: len(order) // settings.batch_size * settings.batch_size], key=lengths.__getitem__)
        epoch = [kept[at : at + settings.batch_size] for at in range(0, len(kept), settings.batch_size)]
        if not epoch:
            raise DataError(f"{len(lengths)} examples do not fill a batch of {settings.batch_size}")
        rng.shuffle(epoch)
        chosen += epoch
    return chosen[: settings.steps]


def collate(batch: Sequence[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids padded on the right with 0, and which of them are the answers'."""
    longest = max(map(len, batch))
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    wanted = torch.zeros(len(batch), longest, dtype=torch.bool)
    for row, example in enumerate(batch):
        ids[row, : len(example)] = torch.tensor([*example.prompt, *example.answer])
        wanted[row, len(example.prompt) : len(example)] = True
    return ids, wanted


def loss_of(model: Any, batch: Sequence[Example]) -> torch.Tensor:
    """Mean cross-entropy of the answers' tokens. Logits are computed for these only: they are the largest tensor."""
    ids, wanted = collate(batch)
    # No attention mask: padding on the right comes after every token that counts.
    hidden = model.base_model(input_ids=ids).last_hidden_state
    logits = model.get_output_embeddings()(hidden[:, :-1][wanted[:, 1:]])
    return torch.nn.functional.cross_entropy(logits.float(), ids[wanted])


def backward(model: Any, batch: Sequence[Example], micro_batch_size: int) -> float:
    """Add the gradients of the batch's loss, a few rows at a time; return the loss."""
    tokens, loss = sum(len(example.answer) for example in batch), 0.0
    for at in range(0, len(batch), micro_batch_size):
        part = batch[at : at + micro_batch_size]
        # Without its own instructions for bf16 a processor takes tens of times as long as in fp32.
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=torch.ops.mkldnn._is_mkldnn_bf16_supported()):
            share = loss_of(model, part) * (sum(len(example.answer) for example in part) / tokens)
        share.backward()
        loss += share.item()
    return loss


def train(
    model: Any,
    data: Sequence[Example],
    settings: Settings,
    state: Path,
    *,
    save_every: int = 15,
    report: Callable[[int, float], None] = lambda _step, _loss: None,
) -> list[float]:
    """Train in place; return the loss of each step. What `state` holds of an earlier call is not done again."""
    plan = batches([len(example) for example in data], settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=0.0)
    losses: list[float] = []
    if state.is_file():
        saved = torch.load(state, weights_only=True)
        if saved["settings"] != asdict(settings):
            raise CheckpointError(f"{state} is of a fine-tuning with {saved['settings']}, not {asdict(settings)}")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        losses = saved["losses"]
        report(len(losses), losses[-1])
    model.train()
    for step in range(len(losses), settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.lr_at(step)
        losses.append(backward(model, [data[index] for index in plan[step]], settings.micro_batch_size))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        report(len(losses), losses[-1])
        if len(losses) % save_every == 0 or len(losses) == settings.steps:
            content = {
                "settings": asdict(settings),
                "losses": losses,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
            }
            with replacing(state) as temporary:
                torch.save(content, temporary)
    return losses


def sample(
    model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], *, temperature: float, max_tokens: int, seed: int
) -> list[list[int]]:
    """One answer's ids for each prompt, up to and with its end token. Temperature 0 is greedy."""
    sampling = Sampling(temperature=temperature, max_tokens=max_tokens)
    requests = [Request(prompt, sampling, seed + number) for number, prompt in enumerate(prompts)]
    done = generate(model.eval(), requests, eos=[tokenizer.eos_token_id], abort=threading.Event())
    return [completion.tokens for completion in done]
