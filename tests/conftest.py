"""A tiny model for every test; Hypothesis: the same examples in every run, no limit on the time of one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("fast", deadline=None, derandomize=True, max_examples=30)
settings.register_profile("mutation", deadline=None, derandomize=True, max_examples=8)
settings.register_profile("thorough", deadline=None, max_examples=400)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model and its data."""
    from tests import tiny_model

    return tiny_model.write(tmp_path_factory.mktemp("tiny"))
