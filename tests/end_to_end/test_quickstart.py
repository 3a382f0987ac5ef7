"""The quickstart from its shell script, in the environment of the tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from tests.end_to_end.run import MARK, end_all
from tests.facts import a_line_says
from tests.signals import as_from_a_terminal
from verl_ext.registry import BUILT_IN

pytestmark = [pytest.mark.end_to_end, pytest.mark.slow]
SCRIPT = Path(__file__).parents[2] / "scripts/quickstart.sh"
TIMEOUT = 900


@pytest.fixture
def start(tmp_path):
    """Starts the script in a process group of its own, and fails the test where it leaves processes behind."""
    mark = uuid.uuid4().hex

    def begin(*options):
        command = [SCRIPT, "--python", sys.executable, "--output", tmp_path, *options]
        return subprocess.Popen(
            [str(part) for part in command],
            env={**os.environ, MARK: mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=as_from_a_terminal,
        )

    yield begin
    assert end_all(mark) == []


def test_it_trains_with_both_estimators_and_a_second_time_reuses_everything(start, tmp_path):
    first = start("--task", "sums", "--estimator", "drgrpo", "--steps", "2")
    output, _ = first.communicate(timeout=TIMEOUT)
    assert first.returncode == 0, output
    assert output.count("Training Progress: 100%") >= 2
    for reward in ("correctness", "integer", "format"):
        for name in ("grpo", "drgrpo"):
            assert f"{reward} {name} 1 1-2" in " ".join(output.split())
    assert (tmp_path / "sums.png").read_bytes().startswith(b"\x89PNG")
    checkpoints = [line.split(": ")[1] for line in output.splitlines() if line.startswith("checkpoint of ")]
    assert len(checkpoints) == 2
    assert all(list(Path(path).glob("actor/*.pt")) for path in checkpoints)
    began = time.monotonic()
    again = start("--task", "sums", "--estimator", "drgrpo", "--steps", "2")
    output, _ = again.communicate(timeout=TIMEOUT)
    assert again.returncode == 0, output
    assert output.count("is there already") == 3  # the task and two runs
    assert "Training Progress" not in output
    assert time.monotonic() - began < 60


def interrupted(start, tell):
    process = start("--steps", "500")
    for line in process.stdout:
        if "1/500" in line:
            break
    tell(process.pid)
    output, _ = process.communicate(timeout=120)
    return process.returncode, output


def test_ctrl_c_ends_everything_that_it_started(start, tmp_path):
    code, output = interrupted(start, lambda pid: os.killpg(pid, signal.SIGINT))  # as a terminal does
    assert code == 130
    assert "interrupted; every process of the run has ended" in output
    assert not (tmp_path / "tools.png").exists()


def test_a_request_to_end_reaches_everything_through_the_script_alone(start, tmp_path):
    code, _ = interrupted(start, lambda pid: os.kill(pid, signal.SIGTERM))
    assert code == 143
    assert not (tmp_path / "tools.png").exists()


def test_a_wrong_option_is_refused_before_anything_starts(start):
    process = start("--estimator", "ppo")
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 2
    assert a_line_says(output, "--estimator", "'ppo'", *({"grpo", *BUILT_IN} - {"compose"}))
