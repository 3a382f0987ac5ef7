import functools
import importlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from tests.end_to_end.run import MARK, end_all
from verl_ext.conf import read_yaml


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Ignore the tests of verl's default (V1) trainer if verl's main program starts another trainer."""
    prefixes = ("test_default_", "default_", "pipeline", "scripted_responses")
    if collection_path.name.startswith(prefixes) and not has_default_trainer():
        return True
    return None


@functools.cache
def has_default_trainer() -> bool:
    """Return whether verl's main program starts the V1 trainer by default."""
    verl = importlib.import_module("verl")
    path = Path(verl.__file__).parent / "trainer/config/ppo_trainer.yaml"
    return bool(read_yaml(path)["trainer"].get("use_v1"))


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """Start a Ray cluster for this test session."""
    import ray

    # Ray's socket paths must be short.
    folder = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / f"ve-{uuid.uuid4().hex[:8]}"
    with mock.patch.dict(os.environ, {MARK: folder.name}):
        # Ray counts slots, not cores.
        ray.init(address="local", num_cpus=16, include_dashboard=False, _temp_dir=str(folder), log_to_driver=False)
    yield
    ray.shutdown()
    end_all(folder.name, patience=15)  # one of Ray's workers may hang when it ends
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def pipeline(cluster: None, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """Return the workers of verl's default trainer, which the tests of this session share."""
    from tests.integration.pipeline import Pipeline

    started = Pipeline(tmp_path_factory.mktemp("pipeline"), tiny)
    yield started
    started.close()
