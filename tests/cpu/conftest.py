from __future__ import annotations

import pytest

from tests import tiny_model


@pytest.fixture(scope="session")
def tokenizer():
    return tiny_model.make_tokenizer()


@pytest.fixture(scope="session")
def model(tokenizer):
    import torch

    torch.set_num_threads(1)
    from verl_ext.cpu.generation import neutral

    return neutral(tiny_model.make_model(tokenizer).eval())


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """The folder of a tiny model and its data."""
    return tiny_model.write(tmp_path_factory.mktemp("tiny"))
