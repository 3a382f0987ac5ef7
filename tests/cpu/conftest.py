from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests import tiny_model


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

    from tests.cpu.servers import CONFIG
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
def batches(monkeypatch):
    """The prompts of every batch that is generated."""
    from verl_ext.cpu import server as server_module

    seen = []
    original = server_module.generate

    def counted(model, requests, **settings):
        seen.append([request.prompt for request in requests])
        return original(model, requests, **settings)

    monkeypatch.setattr(server_module, "generate", counted)
    return seen
