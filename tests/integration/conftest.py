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
    """Leave out the tests of verl's default (V1) trainer where verl's main starts another one."""
    of_it = collection_path.name.startswith(("test_default_", "default_", "pipeline", "scripted_responses"))
    return True if of_it and not has_default_trainer() else None


@functools.cache
def has_default_trainer() -> bool:
    verl = importlib.import_module("verl")
    path = Path(verl.__file__).parent / "trainer/config/ppo_trainer.yaml"
    return bool(read_yaml(path)["trainer"].get("use_v1"))


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A Ray cluster of this test session's own."""
    import ray

    # Ray's socket paths must be short.
    folder = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / f"ve-{uuid.uuid4().hex[:8]}"
    with mock.patch.dict(os.environ, {MARK: folder.name}):
        # Slots, not cores.
        ray.init(address="local", num_cpus=16, include_dashboard=False, _temp_dir=str(folder), log_to_driver=False)
    yield
    ray.shutdown()
    end_all(folder.name, patience=15)  # one of Ray's workers may hang on its way out
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def pipeline(cluster: None, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    from tests.integration.pipeline import Pipeline

    found = Pipeline(tmp_path_factory.mktemp("pipeline"), tiny)
    yield found
    found.close()
