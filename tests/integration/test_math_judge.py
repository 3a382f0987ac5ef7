"""`ray.cancel` raises KeyboardInterrupt in a worker, which then runs other tasks."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, TaskCancelledError

LIBRARY = """
LatexExtractionConfig = dict
def parse(text, *args, **kwargs):
    return [text]
def verify(left, right, **kwargs):
    return left == right
"""
TASKS, ROUNDS = 4, 8
PATIENCE = 600.0
"""Seconds that a busy machine may take for anything here."""


@ray.remote(num_cpus=1)
def verdicts(library: str, gold: str, answer: str, running: str | None = None) -> tuple[int, list[bool]]:
    """This worker's process and four verdicts; with `running`, a file to make, verdicts without end."""
    # Ray interrupts by the handler of Ctrl-C, which a process in a script's background inherits as ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if library not in sys.path:
        sys.path.insert(0, library)
    from verl_ext.rewards.math_judge import JUDGE

    found = [JUDGE.equal(gold, answer, 5.0)]
    if running:
        Path(running).write_text(str(os.getpid()))
    while running or len(found) < 4:
        found = [*found[-3:], JUDGE.equal(gold, answer, 5.0)]
    time.sleep(0.2)  # so that another worker takes the next task
    return os.getpid(), found


def end(task: Any) -> None:
    """Wait for a cancelled task. Python drops an interrupt that arrives in a finaliser, so cancel again."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            ray.get(task, timeout=5)
        except GetTimeoutError:
            assert time.monotonic() < deadline
            ray.cancel(task)
        except TaskCancelledError:
            return


def test_after_ray_cancel_every_verdict_is_that_of_its_question(cluster: None, tmp_path: Path) -> None:
    (tmp_path / "math_verify.py").write_text(LIBRARY)
    library = str(tmp_path)
    cancelled, asked_again = set(), set()
    for number in range(ROUNDS):
        files = [tmp_path / f"running{number}_{task}" for task in range(TASKS)]
        tasks = [verdicts.remote(library, "1", "1", str(file)) for file in files]
        deadline = time.monotonic() + PATIENCE
        while not all(file.exists() and file.read_text() for file in files):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        cancelled |= {int(file.read_text()) for file in files}
        for task in tasks:
            ray.cancel(task)
        for task in tasks:
            end(task)
        for process, found in ray.get([verdicts.remote(library, "1", "2") for _ in range(TASKS)], timeout=PATIENCE):
            asked_again.add(process)
            assert found == [False] * 4
    assert cancelled & asked_again
