"""Batched sampling from a transformers model, with settings and a random stream per request.

    prefill   one pass over the different prompts
    decode    one token a row and step
    draw      one uniform number a token from the request's own generator, through the inverse of the distribution

A row that has ended leaves the batch. A row's random numbers depend only on its request, so the result does not depend
on the rest of the batch.
"""

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import TopKLogitsWarper, TopPLogitsWarper
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from verl_ext.errors import ConfigurationError, IntegrationError

LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
"""A model's cache has these. The state of any other layer depends on the padding of a prompt."""


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
    """Prompt tokens, sampling settings, the seed of the random numbers, and the response if it is not sampled."""

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


def truncate(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """`-inf` for all but each row's `top_k` best tokens and, of those, the smallest set that holds `top_p`."""
    if top_k > 0:
        logits = TopKLogitsWarper(top_k)(None, logits)
    return TopPLogitsWarper(top_p)(None, logits) if top_p < 1.0 else logits


class _Draw:
    """Samples one token per row, with the row's settings and its own stream of uniform numbers."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.temperature = torch.tensor([request.sampling.temperature for request in requests])[:, None]
        self.greedy = self.temperature[:, 0] == 0.0
        self.given = [request.given for request in requests]  # with the probabilities of no truncation
        self.kept = [(-1, 1.0) if r.given else (r.sampling.top_k, r.sampling.top_p) for r in requests]
        self.generators = [torch.Generator().manual_seed(request.seed) for request in requests]

    def __call__(self, logits: torch.Tensor, rows: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A token for each of these rows, and its log-probability."""
        greedy, kept = self.greedy[rows], [self.kept[row] for row in rows.tolist()]
        # In place: new memory for a large vocabulary costs more time than the computation.
        logits = logits.float().div_(torch.where(greedy[:, None], 1.0, self.temperature[rows]))
        for setting in set(kept) - {(-1, 1.0)}:
            alike = [place for place, other in enumerate(kept) if other == setting]
            logits[alike] = truncate(logits[alike], *setting)
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


@torch.inference_mode()
def generate(
    model: Any, requests: Sequence[Request], *, eos: Sequence[int], abort: threading.Event
) -> list[Completion]:
    """Continue every prompt; a completion includes its end token. The model's own sampling settings are not used."""
    numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(tuple(r.prompt) for r in requests))}
    prompt_of = torch.tensor([numbers[tuple(request.prompt)] for request in requests])
    width = max(map(len, numbers))
    # Padded on the left with any token: the mask hides it.
    input_ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in numbers])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in numbers])
    limit = torch.tensor([request.sampling.max_tokens for request in requests])
    ignore = torch.tensor([request.sampling.ignore_eos and not request.given for request in requests])
    ends = torch.tensor(list(eos))
    tokens: list[list[int]] = [[] for _ in requests]
    log_probs: list[list[float]] = [[] for _ in requests]
    draw = _Draw(requests)
    cache = DynamicCache(config=model.config)

    def forward(input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        settings = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
        logits: torch.Tensor = model(input_ids, attention_mask=mask, position_ids=positions, **settings).logits
        return logits[:, -1]

    logits = forward(input_ids, (mask.cumsum(dim=-1) - 1).clamp(min=0))[prompt_of]
    if any(type(layer) not in LAYERS for layer in cache.layers) or cache.get_seq_length() != width:
        raise IntegrationError("Some of its layers do not keep the keys and values of every token")
    cache.batch_select_indices(prompt_of)
    mask = mask[prompt_of]
    rows = torch.arange(len(requests))  # those still running
    for step in itertools.count():
        drawn, probabilities = draw(logits, rows, step)
        for row, token, log_prob in zip(rows.tolist(), drawn.tolist(), probabilities.tolist(), strict=True):
            tokens[row].append(token)
            log_probs[row].append(log_prob)
        running = ~(torch.isin(drawn, ends) & ~ignore[rows]) & (step + 1 < limit[rows])
        if abort.is_set() or not bool(running.any()):
            break
        if not bool(running.all()):
            cache.batch_select_indices(running)
            rows, drawn, mask = rows[running], drawn[running], mask[running]
        mask = pad(mask, (0, 1), value=1)
        logits = forward(drawn[:, None], mask.sum(dim=-1, keepdim=True) - 1)
    aborted = set(rows[running].tolist())
    return [Completion(tokens[row], log_probs[row], aborted=row in aborted) for row in range(len(requests))]


def check_model(model: Any) -> None:
    """Generate two tokens; raise if the embedded rollout cannot generate from the model."""
    try:
        greedy = Sampling(temperature=0.0, max_tokens=2, ignore_eos=True)
        generate(model, [Request((0, 0), greedy, seed=0)], eos=(), abort=threading.Event())
    except Exception as error:
        raise ConfigurationError(
            f"The embedded rollout cannot generate from {type(model).__name__}. {str(error).rstrip('.')}. "
            "Use a model with plain causal attention, such as Llama, Qwen2, Qwen3 or Gemma, or train on a GPU."
        ) from error
