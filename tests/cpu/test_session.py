"""A command whose processes end with the process that runs it."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.fresh import as_from_a_terminal
from verl_ext.cpu import session

RUN_COMMAND = """
import sys, time
from verl_ext.cpu import session
print("ended", session.run(sys.argv[2:], float(sys.argv[1])), flush=True)
time.sleep(60)
"""
START_CHILDREN = """
import os, signal, subprocess, sys, time
if sys.argv[1] == "ignores SIGTERM":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
children = [subprocess.Popen(sleep), subprocess.Popen(sleep, preexec_fn=os.setpgrp)]
print(os.getpid(), *(child.pid for child in children), flush=True)
if sys.argv[1] != "ends":
    time.sleep(60)
"""


@pytest.fixture
def start_command():
    """Return a function that starts a process which runs a command of three processes.

    One of the three is in a process group of its own. The function returns the first process and the ids of the three.
    """
    started = []

    def start(behavior="sleeps", seconds=60.0):
        program = [sys.executable, "-c", RUN_COMMAND, str(seconds), sys.executable, "-c", START_CHILDREN, behavior]
        process = subprocess.Popen(program, stdout=subprocess.PIPE, text=True, preexec_fn=as_from_a_terminal)
        started.append(process)
        pids = [int(pid) for pid in process.stdout.readline().split()]
        return process, pids

    yield start
    for process in started:
        process.kill()
        process.communicate()


def is_running(pid):
    """Whether a process exists and is no zombie."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def have_ended(pids, seconds=30.0):
    """Whether the processes have ended, or end within this time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(is_running(pid) for pid in pids):
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize(
    ("number", "behavior"),
    [
        (signal.SIGTERM, "sleeps"),
        (signal.SIGINT, "sleeps"),
        (signal.SIGHUP, "sleeps"),
        (signal.SIGTERM, "ignores SIGTERM"),
    ],
)
def test_a_signal_ends_all_processes_of_the_command_first(start_command, number, behavior):
    process, pids = start_command(behavior)
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    assert have_ended(pids, seconds=1)


def test_a_killed_process_leaves_no_process_of_its_command(start_command):
    process, pids = start_command()
    process.kill()
    assert have_ended(pids)


@pytest.mark.parametrize(("behavior", "seconds", "status"), [("sleeps", 2, None), ("ends", 60, 0)])
def test_the_time_limit_or_the_end_of_the_command_ends_all_processes(start_command, behavior, seconds, status):
    process, pids = start_command(behavior, seconds)
    assert process.stdout.readline() == f"ended {status}\n"
    assert have_ended(pids, seconds=1)


def test_an_ignored_signal_stays_ignored():
    program = """
import os, signal
from verl_ext.cpu.session import run
signal.signal(signal.SIGHUP, signal.SIG_IGN)
run(["true"], 60)
os.kill(os.getpid(), signal.SIGHUP)
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


@pytest.mark.parametrize(("program", "status"), [("exit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)])
def test_the_status_is_that_of_the_command(program, status):
    assert session.run([sys.executable, "-c", program], 60.0) == status
