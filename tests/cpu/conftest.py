"""A tiny model, and the embedded rollout's server in this process, without Ray."""

import asyncio
import threading
from types import SimpleNamespace

import pytest

from tests import tiny_model

SAMPLING_PARAMS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
"""What verl's agent loops send with a request."""
ROLLOUT_CONFIG = SimpleNamespace(
    dtype="float32",
    seed=7,
    prompt_length=16,
    response_length=8,
    max_model_len=None,
    max_num_seqs=64,
    ignore_eos=False,
    engine_kwargs={},
)
"""The settings of `actor_rollout_ref.rollout` that the server reads."""


@pytest.fixture(scope="session")
def tokenizer():
    return tiny_model.make_tokenizer()


@pytest.fixture(scope="session")
def model(tokenizer):
    import torch

    torch.set_num_threads(1)

    return tiny_model.make_model(tokenizer).eval()


@pytest.fixture
def make_server(tiny, monkeypatch):
    """Return a function that makes a server without weights; verl's model configuration is reduced to what it reads."""
    from transformers import AutoConfig

    from verl_ext.cpu import rollout

    monkeypatch.setattr(rollout, "omega_conf_to_dataclass", lambda config: config)
    hf_config = AutoConfig.from_pretrained(tiny / "model", attn_implementation="sdpa")

    def make(replica_rank=0, eos=None, **settings):
        generation_config = None if eos is None else SimpleNamespace(eos_token_id=eos)
        model_config = SimpleNamespace(
            tokenizer=tiny_model.make_tokenizer(), hf_config=hf_config, generation_config=generation_config
        )
        config = SimpleNamespace(**{**vars(ROLLOUT_CONFIG), **settings})
        return rollout.EmbeddedServer(config, model_config, replica_rank)

    return make


@pytest.fixture
def run_with_server(make_server, model):
    """Return a function that runs a coroutine function with a server that has the model's weights."""

    def run(scenario, *, step=0, **settings):
        async def start_and_run():
            server = make_server(**settings)
            await send_weights(server, model, step)
            return await scenario(server)

        return asyncio.run(start_and_run())

    return run


async def send_weights(server, model, step=0):
    """Send all weights to a server as the trainer does: a tied output layer comes once."""
    await server.load_weights(list(model.named_parameters()))
    await server.finish_weights(step)


def send_request(server, prompt, **sampling_params):
    """Send a request; return the future of its response."""
    params = {**SAMPLING_PARAMS, **sampling_params}
    return asyncio.ensure_future(server.generate(prompt, params, "id"))


class CountingFlag(threading.Event):
    """An abort flag that counts how often it was read: the running batch reads it after each token."""

    reads = 0

    def is_set(self):
        self.reads += 1
        return super().is_set()


async def start_generating(server, prompt, **sampling_params):
    """Send a request, and wait until its batch has sampled a few tokens; return the future of the response."""
    server._abort = CountingFlag()
    response = send_request(server, prompt, **sampling_params)
    while server._abort.reads < 4 and not response.done():
        await asyncio.sleep(0.01)
    return response
