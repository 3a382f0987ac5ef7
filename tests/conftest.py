"""A tiny model for every test; Hypothesis: the same examples in every run, no limit on the time of one."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("fast", deadline=None, derandomize=True, max_examples=30)
settings.register_profile("thorough", deadline=None, max_examples=400)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile` one process has all tests of the default trainer, which share a Ray."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return super()._split_scope(nodeid).partition("/test_default_")[0]

    return Scheduling(config, log)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say for each room of the package how many of its tests ran, and in how many seconds of one process."""
    tests: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        if isinstance(report, pytest.TestReport):
            place = Path(report.nodeid.partition("::")[0]).parts
            room = place[1] if len(place) > 2 else "the whole"
            tests[room] += report.when == "call"
            seconds[room] += report.duration
    terminalreporter.section("rooms")
    for room in sorted(tests):
        terminalreporter.write_line(f"{room:12} {tests[room]:5} tests  {seconds[room]:6.0f} s")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model and its data."""
    from tests import tiny_model

    return tiny_model.write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    """A folder with the tiny model in it."""
    (tmp_path / "model").symlink_to(tiny / "model")
    return tmp_path
