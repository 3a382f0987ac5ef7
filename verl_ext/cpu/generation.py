"""Sample responses from a transformers model, with sampling settings and a random stream for each request.

`generate` has three parts:

1. Prefill: one forward pass over the different prompts. Requests with the same prompt share this computation.
2. Decoding: one forward pass for each further token. A response that has ended leaves the batch.
3. Sampling: a token takes one uniform number from the generator of its request. The token is the first one whose
   cumulative probability exceeds this number.

The random numbers of a request depend only on its seed, so its response does not depend on the rest of the batch.
"""

import itertools
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import TopKLogitsWarper, TopPLogitsWarper
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from verl_ext.errors import ConfigurationError, IntegrationError

SUPPORTED_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
"""The layers that a model's cache may have. The state of any other layer depends on the padding of a prompt."""
NO_TRUNCATION = (-1, 1.0)
"""The `top_k` and `top_p` that keep every token."""
PADDING = 0
"""Any token will do, because the attention mask hides it."""


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
    """A prompt to continue.

    With `forced_response`, these tokens are returned instead of sampled ones, with the model's log-probabilities of
    them. They must end with an end token.
    """

    prompt: Sequence[int]
    sampling: Sampling
    seed: int
    forced_response: Sequence[int] | None = None


@dataclass
class Completion:
    """The tokens of a response, their log-probabilities, and whether an abort ended it early."""

    tokens: list[int]
    log_probs: list[float]
    aborted: bool


@torch.inference_mode()
def generate(
    model: Any, requests: Sequence[Request], *, eos: Sequence[int], abort: threading.Event
) -> list[Completion]:
    """Continue every prompt until an end token, the limit of its request, or the abort.

    A completion includes its end token. The model's own sampling settings are not used.
    """
    end_tokens = torch.tensor(list(eos))
    limits = torch.tensor([request.sampling.max_tokens for request in requests])
    # A forced response ends with its end token, whatever the sampling settings say.
    ignores_eos = torch.tensor([request.sampling.ignore_eos and not request.forced_response for request in requests])
    completions = [Completion([], [], aborted=False) for _ in requests]
    decoder = _Decoder(model)
    sampler = _Sampler(requests)
    logits = decoder.prefill([tuple(request.prompt) for request in requests])
    # The indices of the requests whose responses have not ended. Row i of all tensors below belongs to running[i].
    running = torch.arange(len(requests))
    for position in itertools.count():
        tokens, log_probs = sampler.sample(logits, running, position)
        for request, token, log_prob in zip(running.tolist(), tokens.tolist(), log_probs.tolist(), strict=True):
            completions[request].tokens.append(token)
            completions[request].log_probs.append(log_prob)
        has_ended = torch.isin(tokens, end_tokens) & ~ignores_eos[running]
        continues = ~has_ended & (position + 1 < limits[running])
        if abort.is_set() or not bool(continues.any()):
            break
        if not bool(continues.all()):
            decoder.keep(continues)
            running, tokens = running[continues], tokens[continues]
        logits = decoder.decode(tokens)
    for request in running[continues].tolist():
        completions[request].aborted = True
    return completions


class _Decoder:
    """A model with the keys and values of the sequences so far."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.cache = DynamicCache(config=model.config)
        # [rows, tokens so far]: 0 for padding, 1 for a token.
        self.mask: torch.Tensor

    def prefill(self, prompts: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """Return the logits [requests, vocabulary] of each request's first token. Each prompt is computed once."""
        different_prompts = list(dict.fromkeys(prompts))
        row_of_prompt = {prompt: row for row, prompt in enumerate(different_prompts)}
        row_of_request = torch.tensor([row_of_prompt[prompt] for prompt in prompts])
        width = max(len(prompt) for prompt in different_prompts)
        padding_lengths = [width - len(prompt) for prompt in different_prompts]
        # Padding is on the left, so that the last column holds the last token of every prompt.
        rows = zip(padding_lengths, different_prompts, strict=True)
        input_ids = torch.tensor([[PADDING] * length + list(prompt) for length, prompt in rows])
        self.mask = torch.tensor([[0] * length + [1] * (width - length) for length in padding_lengths])
        positions = (self.mask.cumsum(dim=-1) - 1).clamp(min=0)
        logits = self._forward(input_ids, positions)
        layer_kinds = {type(layer) for layer in self.cache.layers}
        if not layer_kinds.issubset(SUPPORTED_LAYERS) or self.cache.get_seq_length() != width:
            raise IntegrationError("Some of its layers do not keep the keys and values of every token")
        # From one row per prompt to one row per request.
        self.keep(row_of_request)
        return logits[row_of_request]

    def decode(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append a token to each sequence; return the logits [rows, vocabulary] of the next tokens."""
        self.mask = pad(self.mask, (0, 1), value=1)
        positions = self.mask.sum(dim=-1, keepdim=True) - 1
        return self._forward(tokens[:, None], positions)

    def keep(self, rows: torch.Tensor) -> None:
        """Select rows by their indices, which may repeat, or by a boolean for each row."""
        self.cache.batch_select_indices(rows)
        self.mask = self.mask[rows]

    def _forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        output = self.model(
            input_ids,
            attention_mask=self.mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits


class _Sampler:
    """Sampling settings and random numbers of the requests of a batch."""

    def __init__(self, requests: Sequence[Request]) -> None:
        temperatures = torch.tensor([request.sampling.temperature for request in requests])
        self.is_greedy = temperatures == 0.0
        self.divisors = torch.where(self.is_greedy, 1.0, temperatures)
        self.truncations = [_truncation(request) for request in requests]
        self.generators = [torch.Generator().manual_seed(request.seed) for request in requests]
        self.forced_responses = [request.forced_response for request in requests]

    def sample(self, logits: torch.Tensor, running: torch.Tensor, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the token at a position of each running response, and its log-probability.

        Row i of `logits` [rows, vocabulary] belongs to the request with the index `running[i]`.
        """
        requests = running.tolist()
        # In place: new memory for a large vocabulary costs more time than the computation.
        logits = logits.float().div_(self.divisors[running][:, None])
        self._truncate(logits, requests)
        log_probs = logits.log_softmax(dim=-1)
        most_likely = log_probs.argmax(dim=-1)
        cumulative = torch.exp(log_probs, out=logits).cumsum_(dim=-1)
        sampled = self._first_above_random_number(cumulative, requests)
        tokens = torch.where(self.is_greedy[running], most_likely, sampled)
        self._force(tokens, requests, position)
        return tokens, log_probs.gather(-1, tokens[:, None])[:, 0]

    def _truncate(self, logits: torch.Tensor, requests: Sequence[int]) -> None:
        """Set the logits of excluded tokens to `-inf`, together for all requests with the same settings."""
        rows_by_truncation: defaultdict[tuple[int, float], list[int]] = defaultdict(list)
        for row, request in enumerate(requests):
            rows_by_truncation[self.truncations[request]].append(row)
        rows_by_truncation.pop(NO_TRUNCATION, None)
        for (top_k, top_p), rows in rows_by_truncation.items():
            logits[rows] = truncate(logits[rows], top_k, top_p)

    def _first_above_random_number(self, cumulative: torch.Tensor, requests: Sequence[int]) -> torch.Tensor:
        """Draw a number for each request; return the first token whose cumulative probability exceeds it."""
        uniform = torch.stack([torch.rand(1, generator=self.generators[request]) for request in requests])
        # Stay below the sum, so that the first entry above belongs to a token with a probability.
        thresholds = uniform * (1 - 2**-20) * cumulative[:, -1:]
        return torch.searchsorted(cumulative, thresholds, right=True)[:, 0]

    def _force(self, tokens: torch.Tensor, requests: Sequence[int], position: int) -> None:
        """Replace the tokens of requests with a forced response."""
        for row, request in enumerate(requests):
            forced_response = self.forced_responses[request]
            if forced_response is not None:
                tokens[row] = forced_response[position]


def _truncation(request: Request) -> tuple[int, float]:
    """Return the `top_k` and `top_p` of a request. A forced response may contain any token."""
    if request.forced_response:
        return NO_TRUNCATION
    return request.sampling.top_k, request.sampling.top_p


def truncate(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Set the logits to `-inf`, except for the `top_k` best tokens and, of those, the smallest set that holds `top_p`.

    A `top_k` below 1 and a `top_p` of 1 exclude no token.
    """
    if top_k > 0:
        logits = TopKLogitsWarper(top_k)(None, logits)
    if top_p < 1.0:
        logits = TopPLogitsWarper(top_p)(None, logits)
    return logits


def check_model(model: Any) -> None:
    """Generate two tokens; raise if the embedded rollout cannot generate from the model."""
    greedy = Sampling(temperature=0.0, max_tokens=2, ignore_eos=True)
    request = Request(prompt=(0, 0), sampling=greedy, seed=0)
    try:
        generate(model, [request], eos=(), abort=threading.Event())
    except Exception as error:
        raise ConfigurationError(
            f"The embedded rollout cannot generate from {type(model).__name__}. {str(error).rstrip('.')}. "
            "Use a model with plain causal attention, such as Llama, Qwen2, Qwen3 or Gemma, or train on a GPU."
        ) from error
