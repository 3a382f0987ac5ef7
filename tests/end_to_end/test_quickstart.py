"""The quickstart from its shell script, in the environment of the tests."""

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.end_to_end.run import MARK, end_all
from tests.fresh import TIMEOUT, as_from_a_terminal

pytestmark = [pytest.mark.end_to_end, pytest.mark.slow]
SCRIPT = Path(__file__).parents[2] / "scripts/quickstart.sh"


@pytest.fixture
def start(tmp_path):
    """Return a function that starts the script in its own process group. After the test, no process may be left."""
    mark = uuid.uuid4().hex

    def start_script(*options):
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

    yield start_script
    assert end_all(mark) == []


def test_the_script_trains_both_configs_and_compares_them(start, tmp_path):
    process = start("--steps", "2")
    output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, output
    for name in ("grpo", "gdpo"):
        assert f"{name} Training Progress: 100%" in output
        assert list(tmp_path.glob(f"{name}/checkpoints/global_step_2/actor/*.pt"))
        for reward in ("correctness", "format"):
            assert f"{reward} {name} 1 1-2" in " ".join(output.split())
    assert (tmp_path / "rewards.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("send_signal", "number"),
    [(os.killpg, signal.SIGINT), (os.kill, signal.SIGTERM)],
    ids=["Ctrl-C to the process group", "SIGTERM to the script"],
)
def test_a_signal_ends_all_processes_of_the_script(start, tmp_path, send_signal, number):
    process = start("--steps", "500")
    for line in process.stdout:
        if "1/500" in line:
            break
    send_signal(process.pid, number)
    output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 128 + number, output
    assert not (tmp_path / "rewards.png").exists()
