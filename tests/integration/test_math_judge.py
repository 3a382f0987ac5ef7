"""`ray.cancel` raises KeyboardInterrupt in a worker, which then runs other tasks."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
import ray
from ray.exceptions import TaskCancelledError

SLOW_LIBRARY = """
import time
LatexExtractionConfig = dict
def parse(text, *args, **kwargs):
    return [text]
def verify(left, right, **kwargs):
    time.sleep(0.1)
    return left == right
"""


@ray.remote(num_cpus=1)
def verdicts(library: str, gold: str, answer: str, running: str | None = None) -> tuple[int, list[bool]]:
    """This worker's process and four verdicts; with `running`, a file to make, verdicts without end."""
    if library not in sys.path:
        sys.path.insert(0, library)
    from verl_ext.rewards.math_judge import JUDGE

    found = [JUDGE.equal(gold, answer, 5.0)]
    if running:
        Path(running).write_text(str(os.getpid()))
    while running or len(found) < 4:
        found.append(JUDGE.equal(gold, answer, 5.0))
    return os.getpid(), found


def test_after_ray_cancel_every_verdict_is_that_of_its_question(cluster: None, tmp_path: Path) -> None:
    (tmp_path / "math_verify.py").write_text(SLOW_LIBRARY)
    library = str(tmp_path)
    cancelled, asked_again = set(), set()
    for number in range(5):
        running = tmp_path / f"running{number}"
        task = verdicts.remote(library, "1", "1", str(running))
        deadline = time.monotonic() + 120
        while not running.exists() or not running.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        cancelled.add(int(running.read_text()))
        ray.cancel(task)
        with pytest.raises(TaskCancelledError):
            ray.get(task, timeout=120)
        for process, found in ray.get([verdicts.remote(library, "1", "2") for _ in range(2)], timeout=120):
            asked_again.add(process)
            assert found == [False] * 4
    assert cancelled & asked_again
