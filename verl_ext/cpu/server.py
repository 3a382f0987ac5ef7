"""The embedded rollout's server: a transformers model in a Ray actor that takes requests and weights."""

import asyncio
import hashlib
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.replica import TokenOutput

from verl_ext.checks.samples import read_responses
from verl_ext.cpu.generation import Completion, Request, Sampling, check_model, generate
from verl_ext.cpu.patches import reached
from verl_ext.errors import ConfigurationError, IntegrationError, unknown
from verl_ext.hooks import versions

OTHER_MODEL = "Set actor_rollout_ref.model.path to a model of another architecture, or train on a GPU."
QUIET_SECONDS = 0.02
"""A batch starts when no request has arrived for this long: verl sends a step's requests in one burst."""

KNOWN = {*vars(Sampling()), "max_new_tokens", "logprobs", "repetition_penalty"}
"""The sampling parameters that `Sampling` can express. The repetition penalty must be 1, which has no effect."""


def sampling_from(params: dict[str, Any], *, prompt_length: int, config: Any) -> Sampling:
    """Convert verl's sampling parameters, with the limits of `vLLMHttpServer.generate` (verl 0.9.1)."""
    if others := params.keys() - KNOWN:
        raise ConfigurationError(
            f"In the embedded rollout, {unknown('sampling parameter', min(others), KNOWN)}, or train on a GPU."
        )
    if params.get("repetition_penalty", 1.0) != 1.0:
        raise ConfigurationError(
            f"The embedded rollout does not support repetition_penalty={params['repetition_penalty']}. Set "
            "repetition_penalty=1.0 in the sampling parameters of the agent loop, or train on a GPU."
        )
    capacity = config.prompt_length + config.response_length - prompt_length
    limit = params.get("max_tokens", params.get("max_new_tokens", min(config.response_length, capacity)))
    if config.max_model_len is not None:
        limit = min(limit, config.max_model_len - prompt_length)
    greedy = params.get("temperature") == 0  # then top_k and top_p have no effect; vLLM ignores them as well
    return Sampling(
        temperature=float(params.get("temperature", 1.0)),
        top_k=-1 if greedy else int(params.get("top_k", -1)),
        top_p=1.0 if greedy else float(params.get("top_p", 1.0)),
        max_tokens=max(1, int(limit)),
        ignore_eos=bool(params.get("ignore_eos", config.ignore_eos)),
    )


class EmbeddedServer:
    """One model that runs one batch at a time, with the methods that verl's replicas call on a rollout server.

    Requests wait in a queue. A thread generates a batch of the waiting requests, and those that arrive meanwhile form
    the next batch. Weights are replaced between batches. After `abort_all_requests` no batch starts until
    `resume_generation`. Interrupted requests return their tokens marked as aborted, and verl sends them again.
    """

    def __init__(self, config: Any, model_config: Any, replica_rank: int) -> None:
        self.config = config
        self.replica_rank = replica_rank
        self.global_steps: int | None = None
        self._model, self._eos, tokenizer = _build(omega_conf_to_dataclass(model_config), config.dtype)
        self._responses = _responses(config, tokenizer)
        # The tokens of a conversation so far -> its next responses, for each session with these tokens.
        self._turns: defaultdict[tuple[int, ...], list[list[list[int]]]] = defaultdict(list)
        check_model(self._model)
        self._parameters: dict[str, torch.Tensor] = self._model.state_dict(keep_vars=True)
        self._received: set[str] = set()
        self._ready = False
        self._seen: Counter[tuple[int, ...]] = Counter()
        self._waiting: list[tuple[Request, asyncio.Future[Completion]]] = []  # those of a prompt as they arrived
        self._arrived = asyncio.Event()
        self._admitting = asyncio.Event()
        self._admitting.set()
        self._rejecting = False
        self._busy = asyncio.Lock()
        self._abort = threading.Event()
        self._loop: asyncio.Task[None] | None = None

    async def generate(
        self, prompt_ids: Sequence[int], sampling_params: dict[str, Any], request_id: str, **other: Any
    ) -> TokenOutput:
        """Continue one prompt."""
        if names := [name for name, value in other.items() if value is not None]:
            raise ConfigurationError(
                f"The embedded rollout generates only from text, but a request has {', '.join(names)}. Remove images, "
                "audio and videos from the data, or train on a GPU."
            )
        if self._rejecting:
            return self._output(Completion([], [], aborted=True))
        prompt = tuple(int(token) for token in prompt_ids)
        sampling = sampling_from(sampling_params, prompt_length=len(prompt), config=self.config)
        given = self._given(prompt) if self._responses else None
        drawn_for = self.config.seed, self.replica_rank, self.global_steps, self._seen[prompt], prompt
        seed = int.from_bytes(hashlib.blake2b(repr(drawn_for).encode(), digest_size=7).digest(), "little")
        self._seen[prompt] += 1
        if self._loop is None:
            reached("started")
            self._loop = asyncio.create_task(self._serve())
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append((Request(prompt, sampling, seed, given), future))
        self._arrived.set()
        return self._output(await future, log_probs=bool(sampling_params.get("logprobs", False)))

    def _given(self, prompt: tuple[int, ...]) -> list[int]:
        """Return the next response of the file.

        The tokens of a prompt choose the line of its first response, and its other responses are the lines after it.
        A prompt that begins with the tokens of a conversation is the next turn of that conversation.
        """
        begun = [tokens for tokens, left in self._turns.items() if left and prompt[: len(tokens)] == tokens]
        line = self._responses[(sum(prompt) + self._seen[prompt]) % len(self._responses)]
        turns = self._turns[max(begun, key=len)].pop(0) if begun else line
        self._turns[prompt + tuple(turns[0])].append(turns[1:] or turns)
        return turns[0]

    def _output(self, completion: Completion, *, log_probs: bool = False) -> TokenOutput:
        return TokenOutput(
            token_ids=completion.tokens,
            log_probs=completion.log_probs if log_probs else None,
            stop_reason="aborted" if completion.aborted else "completed",
            num_preempted=0,
            # The trainer reads the version of the weights from here.
            extra_fields={"global_steps": self.global_steps},
        )

    async def _serve(self) -> None:
        while True:
            await self._arrived.wait()
            await self._admitting.wait()
            while self._arrived.is_set():
                self._arrived.clear()
                await asyncio.sleep(QUIET_SECONDS)
            async with self._busy:
                # Aborted while waiting for the weights: keep the queue until generation resumes.
                if not self._admitting.is_set():
                    self._arrived.set()
                    continue
                await self._run_batch()

    async def _run_batch(self) -> None:
        # Sort, so that the order does not depend on the network and equal runs form equal batches.
        self._waiting.sort(key=lambda item: tuple(item[0].prompt))
        batch, self._waiting = self._waiting[: self.config.max_num_seqs], self._waiting[self.config.max_num_seqs :]
        if self._waiting:
            self._arrived.set()
        if not batch:
            return
        try:
            if not self._ready:
                raise IntegrationError(
                    "verl sent a request to the embedded rollout before it had sent all weights of the model. "
                    f"{versions()}"
                )
            completions = await asyncio.to_thread(
                generate, self._model, [request for request, _ in batch], eos=self._eos, abort=self._abort
            )
        except Exception as error:  # noqa: BLE001 - any failure goes to the waiting callers
            for _, future in batch:
                if not future.done():  # a caller may have canceled; the loop must go on
                    future.set_exception(error)
            return
        for (_, future), completion in zip(batch, completions, strict=True):
            if not future.done():
                future.set_result(completion)

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Stop the running batch and hold the queue; with `reject_request` return the queue as aborted."""
        self._admitting.clear()
        self._rejecting = reject_request
        self._abort.set()
        async with self._busy:
            pass
        if reject_request:
            for _, future in self._waiting:
                if not future.done():
                    future.set_result(Completion([], [], aborted=True))
            self._waiting.clear()

    async def resume_generation(self) -> None:
        """Resume the queue after `abort_all_requests`."""
        self._abort.clear()
        self._rejecting = False
        self._admitting.set()

    async def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy a bucket of weights into the model; `finish_weights` ends the update."""
        async with self._busy:
            # No batch may run with a part of the new weights.
            self._ready = False
            weights = dict(tensors)
            if others := self._model.load_state_dict(weights, strict=False).unexpected_keys:
                raise IntegrationError(
                    f"The trainer sent the weights {', '.join(others)}, but the model of the embedded rollout does not "
                    f"have them. {OTHER_MODEL}"
                )
            self._received |= weights.keys()

    async def finish_weights(self, global_steps: int | None) -> None:
        """Check that every weight arrived, and allow generation with them."""
        held = {self._parameters[name].data_ptr() for name in self._received}
        missing = [name for name, tensor in self._parameters.items() if tensor.data_ptr() not in held]
        sent, self._received = len(self._received), set()  # reset for the next update even if this one fails
        if missing:
            raise IntegrationError(
                f"The trainer sent {sent} weights to the embedded rollout, but not {', '.join(missing)}. {OTHER_MODEL}"
            )
        self._seen.clear()
        self._turns.clear()
        self._ready = True
        if global_steps is not None:
            self.global_steps = global_steps

    async def _nothing(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing: a model in plain memory does not sleep, and every batch has its own cache."""

    wake_up = sleep = clear_kv_cache = release_kv_cache = resume_kv_cache = start_profile = stop_profile = _nothing


def _build(model_config: Any, dtype: str) -> tuple[Any, list[int], Any]:
    """Return the model, whose weights the trainer sends later, its end tokens, and its tokenizer."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(model_config.hf_config, dtype=getattr(torch, dtype))
    configured = getattr(model_config.generation_config, "eos_token_id", None)
    more = configured if isinstance(configured, list) else [configured]
    return model.eval(), sorted({model_config.tokenizer.eos_token_id, *more} - {None}), model_config.tokenizer


def _responses(config: Any, tokenizer: Any) -> list[list[list[int]]]:
    """Return the tokens of the responses, by turn, in the JSONL file `engine_kwargs.embedded.responses`."""
    file = (config.engine_kwargs.get("embedded") or {}).get("responses")
    if not file:
        return []
    end, encode = tokenizer.eos_token_id, tokenizer.encode
    return [[[*encode(text, add_special_tokens=False), end] for text in turns] for turns in read_responses(Path(file))]
