"""A tiny model, and the embedded rollout's server without Ray, as tests ask it."""

import asyncio
import threading
from types import SimpleNamespace

import pytest

from tests import tiny_model

PARAMS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
CONFIG = SimpleNamespace(
    dtype="float32",
    seed=7,
    prompt_length=16,
    response_length=8,
    max_model_len=None,
    max_num_seqs=64,
    ignore_eos=False,
    engine_kwargs={},
)


@pytest.fixture(scope="session")
def tokenizer():
    return tiny_model.make_tokenizer()


@pytest.fixture(scope="session")
def model(tokenizer):
    import torch

    torch.set_num_threads(1)

    return tiny_model.make_model(tokenizer).eval()


@pytest.fixture
def make(tiny, monkeypatch):
    """A server without Ray; verl's model configuration is reduced to what the server reads."""
    from transformers import AutoConfig

    from verl_ext.cpu import server as server_module
    from verl_ext.cpu.server import EmbeddedServer

    monkeypatch.setattr(server_module, "omega_conf_to_dataclass", lambda config: config)
    hf_config = AutoConfig.from_pretrained(tiny / "model", attn_implementation="sdpa")

    def build(replica_rank=0, eos=None, **settings):
        tokenizer = tiny_model.make_tokenizer()
        generation_config = None if eos is None else SimpleNamespace(eos_token_id=eos)
        model_config = SimpleNamespace(tokenizer=tokenizer, hf_config=hf_config, generation_config=generation_config)
        return EmbeddedServer(SimpleNamespace(**{**vars(CONFIG), **settings}), model_config, replica_rank)

    return build


@pytest.fixture
def served(make, model):
    """Runs a scenario with a server that has the model's weights."""

    def run(scenario, *, step=0, **settings):
        async def begin():
            server = make(**settings)
            await ready(server, model, step)
            return await scenario(server)

        return asyncio.run(begin())

    return run


async def ready(server, model, step=0):
    """Give it weights as the trainer sends them: a tied output layer comes once."""
    await server.load_weights(list(model.named_parameters()))
    await server.finish_weights(step)


def ask(server, prompt, **settings):
    return asyncio.ensure_future(server.generate(prompt, {**PARAMS, **settings}, "id"))


class Flag(threading.Event):
    """An abort flag that counts how often it was read: the running batch reads it before every token."""

    reads = 0

    def is_set(self):
        self.reads += 1
        return super().is_set()


async def begin(server, prompt, **settings):
    """A request whose batch has drawn a few tokens."""
    server._abort = Flag()
    asked = ask(server, prompt, **settings)
    while server._abort.reads < 4 and not asked.done():
        await asyncio.sleep(0.01)
    return asked
