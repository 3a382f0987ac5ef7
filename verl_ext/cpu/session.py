"""Run a command whose processes all end with the process that runs it, even if that process is killed.

All processes of the command belong to one session of the operating system. A process group would not be enough, because
Ray gives each worker a group of its own.

`run` starts this module as a program, the guard, which starts the command in a new session. The guard ends all
processes of the session once the command has ended, or once the guard's standard input is closed. That input is a pipe
from the process that called `run`, so the operating system closes it when that process ends or is killed.
"""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import psutil

from verl_ext.files import exit_on_signals


def run(command: Sequence[str], seconds: float, **options: Any) -> int | None:
    """Run a command and return its exit status, or None if the time limit ended it.

    A signal ends the command, then this process, with exit status 128 + its number.
    """
    exit_on_signals()
    guard_command = [sys.executable, "-m", __name__, *command]
    # Leaving the block closes the guard's standard input and waits for the guard.
    with (
        subprocess.Popen(guard_command, stdin=subprocess.PIPE, start_new_session=True, **options) as guard,  # noqa: S603
        suppress(subprocess.TimeoutExpired),
    ):
        return guard.wait(seconds)
    return None


def _guard(command: Sequence[str]) -> int:
    """Run a command in a session of its own, end all processes of the session, and return the exit status."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)  # noqa: S603
    while process.poll() is None and not _standard_input_is_closed(seconds=0.1):
        pass
    for number, seconds in ((signal.SIGTERM, 10), (signal.SIGKILL, 1)):
        members = _running_processes(session=process.pid)
        for member in members:
            with suppress(psutil.Error):
                member.send_signal(number)
        psutil.wait_procs(members, timeout=seconds)
    status = process.wait()
    ended_by_signal = status < 0  # the number of the signal, negated
    return 128 - status if ended_by_signal else status


def _standard_input_is_closed(seconds: float) -> bool:
    """Wait up to this time; nobody writes to the guard's input, so it becomes readable only when it is closed."""
    readable, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(readable)


def _running_processes(session: int) -> list[psutil.Process]:
    """Return the processes of a session, without zombies."""
    members = []
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):  # a process may have ended meanwhile
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
    return members


if __name__ == "__main__":
    sys.exit(_guard(sys.argv[1:]))
