"""The embedded rollout, with which verl generates on a machine without a GPU.

It consists of the three classes that verl expects of a rollout (verl 0.9.0 and 0.9.1):

- `EmbeddedReplica` starts a server next to each rank of the trainer.
- `EmbeddedServer` is a Ray actor with a transformers model. It takes requests and weights.
- `EmbeddedRollout` runs in each rank of the trainer and sends the weights to the rank's server.

verl calls them in this order:

1. `EmbeddedReplica.launch_servers`. The model of a server has no weights yet.
2. `EmbeddedRollout.update_weights` in every rank, before the first step and after each step. It calls the server's
   `load_weights` for each bucket of weights, then `finish_weights`.
3. `EmbeddedServer.generate` for each response, and for each turn of a multi-turn session.
4. With `colocate_async`, `abort_all_requests` once a step has its batch, and `resume_generation` after the next update
   of the weights. Interrupted responses return early, and verl continues them with requests whose prompts include the
   tokens so far. With `separate_async`, verl calls both around each update.

`sync` calls neither of the two. The other methods of a server are for GPU memory and profilers, and do nothing here.
"""

import asyncio
import hashlib
import os
import threading
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput
from verl.workers.rollout.utils import ensure_async_iterator

from verl_ext.cpu import progress
from verl_ext.cpu.generation import Completion, Request, Sampling, check_model, generate
from verl_ext.cpu.responses import FileResponses
from verl_ext.errors import ConfigurationError, IntegrationError, unknown
from verl_ext.hooks import versions

Weight = tuple[str, torch.Tensor]
OTHER_MODEL = "Set actor_rollout_ref.model.path to a model of another architecture, or train on a GPU."
QUIET_SECONDS = 0.02
"""A batch starts when no request has arrived for this long: verl sends a step's requests in one burst."""
SAMPLING_PARAMETERS = {*vars(Sampling()), "max_new_tokens", "logprobs", "repetition_penalty"}
"""The sampling parameters that the server accepts. The repetition penalty must be 1, which has no effect."""


def server_name(replica_rank: int) -> str:
    """Return the name of a replica's Ray actor."""
    return f"embedded_server_{replica_rank}"


async def buckets(weights: Iterable[Weight] | AsyncIterable[Weight], max_bytes: int) -> AsyncIterator[list[Weight]]:
    """Yield lists of weights with at most `max_bytes` bytes each; a larger weight has a list for itself."""
    bucket: list[Weight] = []
    size = 0
    async for name, tensor in ensure_async_iterator(weights):
        if bucket and size + tensor.nbytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor.detach().cpu()))
        size += tensor.nbytes
    yield bucket


class EmbeddedReplica(RolloutReplica):
    """A replica with one rank and one server. It follows `vLLMReplica.launch_servers`."""

    async def launch_servers(self) -> None:
        """Start the server on the node of its rank and wait until it has built its model."""
        node_id = await self.workers[0].__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id())
        same_node = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id, soft=False)
        name = server_name(self.replica_rank)
        actor_class: Any = ray.remote(EmbeddedServer).options(
            name=name, num_cpus=0, max_concurrency=self.max_concurrency, scheduling_strategy=same_node
        )
        server = actor_class.remote(config=self.config, model_config=self.model_config, replica_rank=self.replica_rank)
        await server.__ray_ready__.remote()
        self.servers = [server]
        self._server_handle = server
        self._server_address = name


class EmbeddedRollout(BaseRollout):
    """The adapter in each of the trainer's ranks, which sends the weights to the server of the same rank."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        self.is_leader_rank = True
        self._server: Any = None

    async def update_weights(
        self,
        weights: Generator[Weight, None, None],
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        **_others: Any,
    ) -> None:
        """Send all weights in buckets. Each rank reads the generator to its end, because gathering is collective."""
        if self._server is None:
            self._server = ray.get_actor(server_name(self.replica_rank))
        max_bytes = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20
        async for bucket in buckets(weights, max_bytes):
            await self._server.load_weights.remote(bucket)
        await self._server.finish_weights.remote(global_steps)

    async def resume(self, tags: list[str] | None = None) -> None:
        """Do nothing: the server never sleeps."""

    release = resume


class EmbeddedServer:
    """A model that generates one batch at a time.

    Requests wait in a queue. A thread generates a batch of the waiting requests, and those that arrive meanwhile form
    the next batch. Weights are replaced between batches. After `abort_all_requests` no batch starts until
    `resume_generation`.
    """

    def __init__(self, config: Any, model_config: Any, replica_rank: int) -> None:
        self.config = config
        self.replica_rank = replica_rank
        self.global_steps: int | None = None
        model_settings = omega_conf_to_dataclass(model_config)
        self._model = _build_model(model_settings, config.dtype)
        self._end_tokens = _end_tokens(model_settings)
        self._file_responses = _file_responses(config, model_settings.tokenizer)
        check_model(self._model)
        self._parameters: dict[str, torch.Tensor] = self._model.state_dict(keep_vars=True)
        self._received_weights: set[str] = set()
        self._has_all_weights = False
        self._requests_by_prompt: Counter[tuple[int, ...]] = Counter()
        """How many requests each prompt has had since the last update of the weights."""
        self._queue: list[tuple[Request, asyncio.Future[Completion]]] = []
        self._has_requests = asyncio.Event()
        self._may_generate = asyncio.Event()
        self._may_generate.set()
        self._rejects_requests = False
        self._model_is_used = asyncio.Lock()
        self._abort = threading.Event()
        self._serving: asyncio.Task[None] | None = None

    async def generate(
        self, prompt_ids: Sequence[int], sampling_params: dict[str, Any], request_id: str, **other: Any
    ) -> TokenOutput:
        """Continue one prompt."""
        unsupported = [name for name, value in other.items() if value is not None]
        if unsupported:
            raise ConfigurationError(
                f"The embedded rollout generates only from text, but a request has {', '.join(unsupported)}. Remove "
                "images, audio and videos from the data, or train on a GPU."
            )
        if self._rejects_requests:
            return self._output(Completion([], [], aborted=True))
        request = self._make_request(tuple(int(token) for token in prompt_ids), sampling_params)
        if self._serving is None:
            progress.record(progress.STARTED)
            self._serving = asyncio.create_task(self._serve())
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._queue.append((request, future))
        self._has_requests.set()
        return self._output(await future, log_probs=bool(sampling_params.get("logprobs", False)))

    def _make_request(self, prompt: tuple[int, ...], sampling_params: dict[str, Any]) -> Request:
        sampling = sampling_from(sampling_params, prompt_length=len(prompt), config=self.config)
        earlier_requests = self._requests_by_prompt[prompt]
        self._requests_by_prompt[prompt] += 1
        response = None
        if self._file_responses is not None:
            response = self._file_responses.next_response(prompt, earlier_requests)
        # Equal runs have equal seeds, and the requests of a prompt have different ones.
        identity = (self.config.seed, self.replica_rank, self.global_steps, earlier_requests, prompt)
        digest = hashlib.blake2b(repr(identity).encode(), digest_size=7).digest()
        return Request(prompt, sampling, seed=int.from_bytes(digest, "little"), forced_response=response)

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
        """Generate batches for as long as the server runs."""
        while True:
            await self._has_requests.wait()
            await self._may_generate.wait()
            while self._has_requests.is_set():
                self._has_requests.clear()
                await asyncio.sleep(QUIET_SECONDS)
            async with self._model_is_used:
                if self._may_generate.is_set():
                    await self._run_batch()
                else:  # aborted while waiting for the weights: keep the queue until generation resumes
                    self._has_requests.set()

    async def _run_batch(self) -> None:
        """Generate the responses of a batch, and give them, or the error, to the callers that wait for them."""
        batch = self._take_batch()
        if not batch:
            return
        requests = [request for request, _ in batch]
        try:
            if not self._has_all_weights:
                raise IntegrationError(
                    "verl sent a request to the embedded rollout before it had sent all weights of the model. "
                    f"{versions()}"
                )
            completions = await asyncio.to_thread(
                generate, self._model, requests, eos=self._end_tokens, abort=self._abort
            )
        except Exception as error:  # noqa: BLE001 - any failure goes to the waiting callers
            for _, future in batch:
                if not future.done():  # a caller may have canceled; the server must continue
                    future.set_exception(error)
            return
        for (_, future), completion in zip(batch, completions, strict=True):
            if not future.done():
                future.set_result(completion)

    def _take_batch(self) -> list[tuple[Request, asyncio.Future[Completion]]]:
        """Remove the next batch from the queue.

        The requests are sorted by prompt, so that equal runs form equal batches in whatever order requests arrive.
        Requests of the same prompt stay in their order, because they are numbered.
        """
        self._queue.sort(key=lambda entry: tuple(entry[0].prompt))
        size = self.config.max_num_seqs
        batch, self._queue = self._queue[:size], self._queue[size:]
        if self._queue:
            self._has_requests.set()
        return batch

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Stop the running batch and hold the queue; with `reject_request` return the queue as aborted."""
        self._may_generate.clear()
        self._rejects_requests = reject_request
        self._abort.set()
        async with self._model_is_used:
            pass  # the running batch has returned its tokens
        if reject_request:
            for _, future in self._queue:
                if not future.done():
                    future.set_result(Completion([], [], aborted=True))
            self._queue.clear()

    async def resume_generation(self) -> None:
        """Resume the queue after `abort_all_requests`."""
        self._abort.clear()
        self._rejects_requests = False
        self._may_generate.set()

    async def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy a bucket of weights into the model; `finish_weights` ends the update."""
        async with self._model_is_used:
            # No batch may run while the model has only some of the new weights.
            self._has_all_weights = False
            weights = dict(tensors)
            unexpected = self._model.load_state_dict(weights, strict=False).unexpected_keys
            if unexpected:
                raise IntegrationError(
                    f"The trainer sent the weights {', '.join(unexpected)}, but the model of the embedded rollout does "
                    f"not have them. {OTHER_MODEL}"
                )
            self._received_weights |= weights.keys()

    async def finish_weights(self, global_steps: int | None) -> None:
        """Check that every weight arrived, and allow generation with them."""
        received, self._received_weights = self._received_weights, set()  # also if this update fails
        # Tied weights have several names and one address, and verl sends one of the names.
        received_addresses = {self._parameters[name].data_ptr() for name in received}
        missing = [name for name, tensor in self._parameters.items() if tensor.data_ptr() not in received_addresses]
        if missing:
            raise IntegrationError(
                f"The trainer sent {len(received)} weights to the embedded rollout, but not {', '.join(missing)}. "
                f"{OTHER_MODEL}"
            )
        self._requests_by_prompt.clear()
        if self._file_responses is not None:
            self._file_responses.forget_sessions()
        self._has_all_weights = True
        if global_steps is not None:
            self.global_steps = global_steps

    async def _nothing(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing: a model in plain memory does not sleep, and every batch has its own cache."""

    wake_up = sleep = clear_kv_cache = release_kv_cache = resume_kv_cache = start_profile = stop_profile = _nothing


def sampling_from(params: dict[str, Any], *, prompt_length: int, config: Any) -> Sampling:
    """Convert verl's sampling parameters, with the limits of `vLLMHttpServer.generate` (verl 0.9.1)."""
    unsupported = params.keys() - SAMPLING_PARAMETERS
    if unsupported:
        problem = unknown("sampling parameter", min(unsupported), SAMPLING_PARAMETERS)
        raise ConfigurationError(f"In the embedded rollout, {problem}, or train on a GPU.")
    penalty = params.get("repetition_penalty", 1.0)
    if penalty != 1.0:
        raise ConfigurationError(
            f"The embedded rollout does not support repetition_penalty={penalty}. Set repetition_penalty=1.0 in the "
            "sampling parameters of the agent loop, or train on a GPU."
        )
    # A prompt above its length takes tokens from the response.
    capacity = config.prompt_length + config.response_length - prompt_length
    limit = params.get("max_tokens", params.get("max_new_tokens", min(config.response_length, capacity)))
    if config.max_model_len is not None:
        limit = min(limit, config.max_model_len - prompt_length)
    temperature = float(params.get("temperature", 1.0))
    top_k, top_p = int(params.get("top_k", -1)), float(params.get("top_p", 1.0))
    if temperature == 0:  # greedy: vLLM ignores top_k and top_p as well
        top_k, top_p = -1, 1.0
    return Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        max_tokens=max(1, int(limit)),
        ignore_eos=bool(params.get("ignore_eos", config.ignore_eos)),
    )


def _build_model(model_settings: Any, dtype: str) -> Any:
    """Build the model, whose weights the trainer sends later."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(model_settings.hf_config, dtype=getattr(torch, dtype))
    return model.eval()


def _end_tokens(model_settings: Any) -> list[int]:
    """Return the end tokens of the tokenizer and of the generation configuration, which may have several or none."""
    configured = getattr(model_settings.generation_config, "eos_token_id", None)
    tokens = configured if isinstance(configured, list) else [configured]
    return sorted({model_settings.tokenizer.eos_token_id, *tokens} - {None})


def _file_responses(config: Any, tokenizer: Any) -> FileResponses | None:
    """Return the responses of the file `engine_kwargs.embedded.responses`, if there is one."""
    file = (config.engine_kwargs.get("embedded") or {}).get("responses")
    return FileResponses(Path(file), tokenizer) if file else None
