"""The embedded rollout's server without Ray, as tests ask it."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

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


def weights_of(model):
    """As the trainer sends them: a tied output layer comes once."""
    return [(name, tensor) for name, tensor in model.named_parameters()]


async def ready(server, model, step=0):
    await server.load_weights(weights_of(model))
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
