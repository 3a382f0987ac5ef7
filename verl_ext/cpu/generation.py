"""Batched sampling with transformers' `generate`, with settings and a random stream per request.

`generate` handles what is easy to get wrong and differs between models: left padding and positions, the key/value
cache, the end of sequences. Two plug-ins add what a rollout needs. A `LogitsProcessor` samples each row's token with
that row's settings and generator, stores its log-probability, and leaves `generate` a distribution with one possible
token. A `StoppingCriteria` has a limit per row and an abort flag. A row's random numbers depend only on its request, so
the result does not depend on the rest of the batch.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from verl_ext.errors import ConfigurationError


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

    def __post_init__(self) -> None:
        if self.temperature < 0.0:
            raise ConfigurationError(f"temperature must be at least 0 (greedy), found {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigurationError(f"top_p must be above 0 and at most 1, found {self.top_p}")


@dataclass(frozen=True)
class Request:
    """Prompt tokens, how to continue them, and the seed of this request's random numbers."""

    prompt: Sequence[int]
    sampling: Sampling
    seed: int


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


class _Draw(LogitsProcessor):
    """Samples one token per row, stores its log-probability, and makes it the only possible one."""

    def __init__(self, requests: Sequence[Request]) -> None:
        settings = [request.sampling for request in requests]
        self.temperature = torch.tensor([s.temperature for s in settings])[:, None]
        self.greedy = self.temperature[:, 0] == 0.0
        self.top_k = torch.tensor([s.top_k for s in settings])
        self.top_p = torch.tensor([s.top_p for s in settings])
        self.truncated = bool(((self.top_k > 0) | (self.top_p < 1.0)).any())
        self.generators = [torch.Generator().manual_seed(request.seed) for request in requests]
        self.log_probs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        logits = scores.float() / torch.where(self.greedy[:, None], 1.0, self.temperature)
        if self.truncated:
            logits = truncate(logits, self.top_k, self.top_p)
        log_probs = logits.log_softmax(dim=-1)
        # argmax(log p + Gumbel noise) samples from p; with exponential noise e, argmax(p / e) does the same.
        noise = torch.empty_like(log_probs)
        # Row by row, because a call of torch uses one generator and each request has its own.
        for row, generator in zip(noise, self.generators, strict=True):
            row.exponential_(generator=generator)
        drawn = (log_probs - noise.log()).argmax(dim=-1)
        tokens = torch.where(self.greedy, log_probs.argmax(dim=-1), drawn)[:, None]
        self.log_probs.append(log_probs.gather(-1, tokens)[:, 0])
        return torch.full_like(scores, -torch.inf).scatter_(-1, tokens, 0.0)


class _Stop(StoppingCriteria):
    """Ends a row at its limit or at an end-of-sequence token, and all rows on abort."""

    def __init__(self, requests: Sequence[Request], width: int, eos: Sequence[int], abort: threading.Event) -> None:
        self.width = width
        self.limits = torch.tensor([request.sampling.max_tokens for request in requests])
        self.ignore = torch.tensor([request.sampling.ignore_eos for request in requests])
        self.eos = torch.tensor(list(eos))
        self.abort = abort

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_kwargs: Any) -> torch.Tensor:  # noqa: ARG002
        ended = torch.isin(input_ids[:, -1], self.eos) & ~self.ignore
        done = ended | (input_ids.shape[1] - self.width >= self.limits)
        return done | self.abort.is_set()


def neutral(model: Any) -> Any:
    """Remove a model's generation settings, such as a repetition penalty: `generate` would apply them."""
    model.generation_config = GenerationConfig()
    return model


@torch.inference_mode()
def generate(
    model: Any, requests: Sequence[Request], *, eos: Sequence[int], pad: int, abort: threading.Event
) -> list[Completion]:
    """Continue every prompt with a `neutral` model; a completion includes its end token."""
    width = max(len(request.prompt) for request in requests)
    input_ids = torch.full((len(requests), width), pad)
    attention_mask = torch.zeros_like(input_ids)
    for row, request in enumerate(requests):
        start = width - len(request.prompt)
        input_ids[row, start:] = torch.tensor(list(request.prompt))
        attention_mask[row, start:] = 1
    draw = _Draw(requests)
    stop = _Stop(requests, width, eos, abort)
    output = model.generate(
        input_ids,
        attention_mask=attention_mask,
        logits_processor=LogitsProcessorList([draw]),
        stopping_criteria=StoppingCriteriaList([stop]),
        # No end-of-sequence token here: the criteria end the rows, so that a request can ignore it.
        generation_config=GenerationConfig(
            max_new_tokens=int(stop.limits.max()), do_sample=False, pad_token_id=pad, eos_token_id=None
        ),
    )
    new = output[:, width:]
    log_probs = torch.stack(draw.log_probs, dim=1)
    completions = []
    for row, request in enumerate(requests):
        length = min(new.shape[1], request.sampling.max_tokens)
        ended = False
        if not request.sampling.ignore_eos:
            ends = torch.isin(new[row, :length], stop.eos).nonzero()
            if len(ends):
                length, ended = int(ends[0]) + 1, True
        completions.append(
            Completion(
                tokens=new[row, :length].tolist(),
                log_probs=log_probs[row, :length].tolist(),
                aborted=not ended and length < request.sampling.max_tokens,
            )
        )
    return completions
