"""A tiny model for all tests, and the settings of Hypothesis: the same examples in each run, and no time limit."""

import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("fast", deadline=None, derandomize=True, max_examples=30)
settings.register_profile("thorough", deadline=None, max_examples=400)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, run all tests of the default trainer in one process, because they share a Ray."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return super()._split_scope(nodeid).partition("/test_default_")[0]

    return Scheduling(config, log)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print for each folder how many of its tests ran, and their total duration."""
    tests: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            path = Path(report.nodeid.partition("::")[0])
            folder = path.parts[1] if len(path.parts) > 2 else "no folder"
            seconds[folder] += report.duration
            if report.when == "call":
                tests[folder] += 1
    terminalreporter.section("tests by folder")
    for folder in sorted(seconds):
        terminalreporter.write_line(f"{folder:12} {tests[folder]:5} tests  {seconds[folder]:6.0f} s")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny model and its data."""
    from tests import tiny_model

    return tiny_model.write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    """Return an empty folder with a link to the tiny model."""
    (tmp_path / "model").symlink_to(tiny / "model")
    return tmp_path


@pytest.fixture
def main_program(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """Return a function that makes this process look as if it ran `python -m MODULE`, or a file if MODULE is None."""

    def run(module: str | None) -> None:
        spec = None if module is None else SimpleNamespace(name=module)
        monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=spec, __file__="main.py"))

    return run
