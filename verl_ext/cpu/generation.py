"""Batched sampling from a transformers model, with settings and a random stream per request.

    prefill   one pass over each different prompt
    decode    one token a row and step; rows of one prompt share its keys and values (`shared_prompt`)
    draw      one uniform number a token from the request's own generator, through the inverse of the distribution

A row that has ended leaves the batch. A row's random numbers depend only on its request, so the result does not depend
on the rest of the batch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from verl_ext.cpu.shared_prompt import ATTENTION, SharedPromptCache
from verl_ext.errors import ConfigurationError, IntegrationError

PASS_TOKENS = 4096
"""Tokens, padding included, that one pass over prompts takes: a bound on its memory."""


@dataclass(frozen=True)
class Sampling:
    """How to sample a token. Temperature 0 is greedy; top_k below 1 and top_p of 1 do not truncate.

    The log-probability is that of the sampled distribution, after temperature and truncation (verl's
    `logprobs_mode=processed_logprobs`); without truncation it equals the trainer's. For a greedy token it is taken at
    temperature 1.
    """

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    max_tokens: int = 16
    ignore_eos: bool = False


@dataclass(frozen=True)
class Request:
    """Prompt tokens, how to continue them, the seed of the random numbers, and the answer if it is not sampled."""

    prompt: Sequence[int]
    sampling: Sampling
    seed: int
    given: Sequence[int] | None = None


@dataclass
class Completion:
    """The new tokens, their log-probabilities, and whether an abort cut them short."""

    tokens: list[int]
    log_probs: list[float]
    aborted: bool


def truncate(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """`-inf` for all but each row's `top_k` best tokens and, of those, the smallest set that holds `top_p`.

    >>> logits = torch.tensor([[0.0, 1.0, 2.0]]).repeat(2, 1)
    >>> truncate(logits, torch.tensor([2, 0]), torch.tensor([1.0, 0.5]))
    tensor([[-inf, 1., 2.],
            [-inf, -inf, 2.]])
    """
    vocabulary = logits.shape[-1]
    keep = torch.where(top_k > 0, top_k, vocabulary)[:, None]
    ordered, order = logits.sort(dim=-1, descending=True)
    ranks = torch.arange(vocabulary)[None, :]
    ordered = ordered.masked_fill(ranks >= keep, -torch.inf)
    probabilities = ordered.softmax(dim=-1)
    # Keep a token while the ones before it sum to less than top_p; so the best one is always kept.
    before = probabilities.cumsum(dim=-1) - probabilities
    ordered = ordered.masked_fill(before >= top_p[:, None], -torch.inf)
    return torch.empty_like(logits).scatter_(-1, order, ordered)


class _Draw:
    """Samples one token per row, with the row's settings and its own stream of uniform numbers."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.temperature = torch.tensor([request.sampling.temperature for request in requests])[:, None]
        self.greedy = self.temperature[:, 0] == 0.0
        self.given = [request.given for request in requests]  # with the probabilities of no truncation
        self.top_k = torch.tensor([-1 if request.given else request.sampling.top_k for request in requests])
        self.top_p = torch.tensor([1.0 if request.given else request.sampling.top_p for request in requests])
        self.generators = [torch.Generator().manual_seed(request.seed) for request in requests]

    def __call__(self, logits: torch.Tensor, rows: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A token for each of these rows, and its log-probability."""
        greedy, top_k, top_p = self.greedy[rows], self.top_k[rows], self.top_p[rows]
        # In place: new memory for a large vocabulary costs more time than the computation.
        logits = logits.float().div_(torch.where(greedy[:, None], 1.0, self.temperature[rows]))
        if bool(((top_k > 0) | (top_p < 1.0)).any()):
            logits = truncate(logits, top_k, top_p)
        log_probs = logits.log_softmax(dim=-1)
        cumulative = torch.exp(log_probs, out=logits).cumsum_(dim=-1)
        uniform = torch.stack([torch.rand(1, generator=self.generators[row]) for row in rows.tolist()])
        # Stay below the sum, so that the first entry above belongs to a token with a probability.
        target = uniform * (1 - 2**-20) * cumulative[:, -1:]
        drawn = torch.searchsorted(cumulative, target, right=True)
        tokens = torch.where(greedy[:, None], log_probs.argmax(dim=-1, keepdim=True), drawn)
        for place, row in enumerate(rows.tolist()):
            if (given := self.given[row]) is not None:
                tokens[place] = given[step]
        return tokens[:, 0], log_probs.gather(-1, tokens)[:, 0]


def _prefill(
    model: Any, prompts: Sequence[Sequence[int]]
) -> tuple[torch.Tensor, list[DynamicCache], list[torch.Tensor]]:
    """The logits after each prompt; a cache and a mask for each pass, of prompts that follow each other."""
    logits, caches, masks = [], [], []
    for part in _passes(prompts):
        width = max(len(prompt) for prompt in part)
        input_ids = torch.zeros(len(part), width, dtype=torch.long)  # padded with any token: the mask hides it
        mask = torch.zeros(len(part), width, dtype=torch.bool)
        for row, prompt in enumerate(part):
            input_ids[row, width - len(prompt) :] = torch.tensor(list(prompt))
            mask[row, width - len(prompt) :] = True
        cache = DynamicCache(config=model.config)
        output = model(
            input_ids,
            attention_mask=mask,
            position_ids=(mask.cumsum(dim=-1) - 1).clamp(min=0),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits.append(output.logits[:, -1])
        caches.append(cache)
        masks.append(mask)
    return torch.cat(logits), caches, masks


def _passes(prompts: Sequence[Sequence[int]]) -> Iterator[Sequence[Sequence[int]]]:
    """Neighbours whose padded size is at most `PASS_TOKENS`, but at least one prompt."""
    start = width = 0
    for end, prompt in enumerate(prompts):
        width = max(width, len(prompt))
        if end > start and width * (end + 1 - start) > PASS_TOKENS:
            yield prompts[start:end]
            start, width = end, len(prompt)
    yield prompts[start:]


@torch.inference_mode()
def generate(
    model: Any, requests: Sequence[Request], *, eos: Sequence[int], abort: threading.Event
) -> list[Completion]:
    """Continue every prompt; a completion includes its end token. The model's own sampling settings are not used."""
    # By length, so that a pass has little padding.
    prompts = sorted({tuple(request.prompt) for request in requests}, key=lambda prompt: (len(prompt), prompt))
    numbers = {prompt: number for number, prompt in enumerate(prompts)}
    prompt_of = torch.tensor([numbers[tuple(request.prompt)] for request in requests])
    rows = prompt_of.argsort(stable=True)  # the requests still running, those of a prompt side by side
    start = torch.tensor([len(request.prompt) for request in requests])
    limit = torch.tensor([request.sampling.max_tokens for request in requests])
    ignore = torch.tensor([request.sampling.ignore_eos and not request.given for request in requests])
    ends = torch.tensor(list(eos))
    tokens: list[list[int]] = [[] for _ in requests]
    log_probs: list[list[float]] = [[] for _ in requests]
    draw = _Draw(requests)

    logits, caches, masks = _prefill(model, prompts)
    shared = SharedPromptCache(caches, masks, prompt_of[rows])
    logits = logits[prompt_of[rows]]
    usual = model.config._attn_implementation
    model.config._attn_implementation = ATTENTION
    try:
        while True:
            drawn, probabilities = draw(logits, rows, shared.length)
            for row, token, log_prob in zip(rows.tolist(), drawn.tolist(), probabilities.tolist(), strict=True):
                tokens[row].append(token)
                log_probs[row].append(log_prob)
            running = ~(torch.isin(drawn, ends) & ~ignore[rows]) & (shared.length + 1 < limit[rows])
            if abort.is_set() or not bool(running.any()):
                break
            if not bool(running.all()):
                shared.keep(running.nonzero()[:, 0])
                rows, drawn = rows[running], drawn[running]
            logits = model(
                drawn[:, None],
                position_ids=(start[rows] + shared.length)[:, None],
                past_key_values=shared,
                use_cache=True,
                shared=shared,
            ).logits[:, -1]
            shared.length += 1
    finally:
        model.config._attn_implementation = usual
    aborted = set(rows[running].tolist())
    return [Completion(tokens[row], log_probs[row], aborted=row in aborted) for row in range(len(requests))]


def check_model(model: Any, longest: int) -> None:
    """Generate two tokens: a model whose attention the rollout cannot compute is refused at the start."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    limited = "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"])
    try:
        if window is not None and limited and window < longest:
            raise IntegrationError(f"it attends to {window} tokens, fewer than a prompt and its answer ({longest})")
        greedy = Sampling(temperature=0.0, max_tokens=2, ignore_eos=True)
        generate(model, [Request((0, 0), greedy, seed=0)], eos=(), abort=threading.Event())
    except Exception as error:
        raise ConfigurationError(
            f"the embedded rollout cannot generate from {type(model).__name__}: {error}; "
            "take a model with plain causal attention, such as Llama, Qwen2, Qwen3 or Gemma, or train on a GPU"
        ) from error
