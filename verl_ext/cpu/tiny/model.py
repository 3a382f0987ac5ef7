"""A small Qwen2 model, trained with supervision until it answers about as well as its examples."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch

from verl_ext.cpu.tiny.task import Example, Task

BATCH = 32
LEARNING_RATE = 3e-3
IGNORED = -100
"""transformers' label of a token that does not count in the loss."""


def make_model(tokenizer: Any, *, seed: int, **changes: Any) -> Any:
    """Three layers, head_dim 32 for vLLM's attention on the CPU, the tokenizer's vocabulary; or with changes."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    settings = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "initializer_range": 0.1,  # with the usual 0.02 so narrow a model learns to copy ten times slower
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    model: Any = Qwen2ForCausalLM
    return model(Qwen2Config(**settings | changes))


def encode(tokenizer: Any, example: Example) -> tuple[list[int], list[int]]:
    """The tokens of the prompt, as verl's rollout gets it, and of the answer, with its end token."""
    prompt = tokenizer.apply_chat_template(list(example.messages), add_generation_prompt=True, tokenize=False)
    answer = tokenizer.encode(example.answer, add_special_tokens=False)
    return tokenizer.encode(prompt, add_special_tokens=False), [*answer, tokenizer.eos_token_id]


def batches(task: Task, tokenizer: Any, rng: random.Random) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of fresh examples, padded on the right, whose labels are the answers' tokens."""
    while True:
        pairs = [encode(tokenizer, task.draw(rng)) for _ in range(BATCH)]
        width = max(len(prompt) + len(answer) for prompt, answer in pairs)
        input_ids = torch.full((BATCH, width), tokenizer.pad_token_id)
        labels = torch.full((BATCH, width), IGNORED)
        for row, (prompt, answer) in enumerate(pairs):
            end = len(prompt) + len(answer)
            input_ids[row, :end] = torch.tensor(prompt + answer)
            labels[row, len(prompt) : end] = torch.tensor(answer)
        yield {"input_ids": input_ids, "attention_mask": (input_ids != tokenizer.pad_token_id).long(), "labels": labels}


def warm_up(
    model: Any, task: Task, tokenizer: Any, *, steps: int, seed: int, report: Callable[[int, float], None] | None = None
) -> None:
    """Supervised training with a rate that rises over a tenth of the steps and then falls to 0 as a cosine."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.1)
    model.train()
    for step, batch in zip(range(1, steps + 1), batches(task, tokenizer, random.Random(seed)), strict=False):
        loss = model(**batch).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if report is not None:
            report(step, float(loss.detach()))


@torch.inference_mode()
def sample(model: Any, task: Task, tokenizer: Any, *, count: int, seed: int) -> list[tuple[Example, str]]:
    """Fresh questions with the model's answers, sampled at temperature 1."""
    rng = random.Random(seed)
    examples = [task.draw(rng) for _ in range(count)]
    prompts = [encode(tokenizer, example)[0] for example in examples]
    width = max(map(len, prompts))
    input_ids = torch.full((count, width), tokenizer.pad_token_id)
    for row, prompt in enumerate(prompts):
        input_ids[row, width - len(prompt) :] = torch.tensor(prompt)
    torch.manual_seed(seed)
    model.eval()
    output = model.generate(
        input_ids,
        attention_mask=(input_ids != tokenizer.pad_token_id).long(),
        do_sample=True,
        top_k=0,
        max_new_tokens=task.response_length,
        pad_token_id=tokenizer.pad_token_id,
    )
    texts = tokenizer.batch_decode(output[:, width:], skip_special_tokens=True)
    return list(zip(examples, texts, strict=True))
