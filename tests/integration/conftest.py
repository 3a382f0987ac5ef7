from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A Ray cluster of this test session's own."""
    import ray

    # Ray's socket paths must be short.
    folder = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / f"ve-{uuid.uuid4().hex[:8]}"
    # Slots, not cores.
    ray.init(address="local", num_cpus=16, include_dashboard=False, _temp_dir=str(folder), log_to_driver=False)
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def pipeline(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    from tests.integration.pipeline import Pipeline

    found = Pipeline(tmp_path_factory.mktemp("pipeline"))
    yield found
    found.close()
