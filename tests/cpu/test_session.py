"""A command whose processes end with the process that runs it."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.fresh import as_from_a_terminal
from verl_ext.cpu import session

RUNS = """
import sys, time
from verl_ext.cpu import session
print("ended", session.run(sys.argv[2:], float(sys.argv[1])), flush=True)
time.sleep(60)
"""
HAS_CHILDREN = """
import os, signal, subprocess, sys, time
if sys.argv[1] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
mine = [os.getpid(), subprocess.Popen(sleep).pid, subprocess.Popen(sleep, preexec_fn=os.setpgrp).pid]
print(*mine, flush=True)
if sys.argv[1] != "ends":
    time.sleep(60)
"""


@pytest.fixture
def running():
    """Start a command of three processes, one in a process group of its own; return what runs it, and the three."""
    started = []

    def start(kind="mild", seconds=60.0):
        program = [sys.executable, "-c", RUNS, str(seconds), sys.executable, "-c", HAS_CHILDREN, kind]
        process = subprocess.Popen(program, stdout=subprocess.PIPE, text=True, preexec_fn=as_from_a_terminal)
        started.append(process)
        return process, list(map(int, process.stdout.readline().split()))

    yield start
    for process in started:
        process.kill()
        process.communicate()


def gone(pids, seconds=30.0):
    """Whether the processes have ended, or soon do."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        left = [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
        if not left:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize(
    ("number", "kind"),
    [(signal.SIGTERM, "mild"), (signal.SIGINT, "mild"), (signal.SIGHUP, "mild"), (signal.SIGTERM, "stubborn")],
)
def test_a_signal_ends_all_processes_before_this_one_also_those_that_ignore_it(running, number, kind):
    process, pids = running(kind)
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    assert gone(pids, seconds=1)


def test_a_killed_process_leaves_none(running):
    process, pids = running()
    process.kill()
    assert gone(pids)


@pytest.mark.parametrize(("kind", "seconds", "status"), [("mild", 2, None), ("ends", 60, 0)])
def test_its_time_or_its_own_end_ends_all_processes(running, kind, seconds, status):
    process, pids = running(kind, seconds)
    assert process.stdout.readline() == f"ended {status}\n"
    assert gone(pids, seconds=1)


def test_a_signal_that_is_ignored_stays_so():
    program = "import os, signal; from verl_ext.cpu.session import run; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    program += "run(['true'], 60); os.kill(os.getpid(), signal.SIGHUP)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


@pytest.mark.parametrize(("program", "status"), [("exit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)])
def test_the_status_is_that_of_the_command(program, status):
    assert session.run([sys.executable, "-c", program], 60.0) == status
