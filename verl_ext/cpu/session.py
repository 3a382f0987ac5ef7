"""A command whose processes all end with the process that runs it, even if that one is killed.

They are one session, since Ray gives each worker a process group of its own. This module as a program is their guard:
it starts the command, and ends the session once the command has ended, or its own input, which no killed process holds.
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
    """Run a command and return its exit status, or None if it was ended after its time.

    A signal ends the command, then this process, with exit status 128 + its number.
    """
    exit_on_signals()
    guard = [sys.executable, "-m", __name__, *command]
    with (
        subprocess.Popen(guard, stdin=subprocess.PIPE, start_new_session=True, **options) as process,  # noqa: S603
        suppress(subprocess.TimeoutExpired),
    ):
        return process.wait(seconds)
    return None


def _guard(command: Sequence[str]) -> int:
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)  # noqa: S603
    while process.poll() is None and not select.select([sys.stdin], [], [], 0.1)[0]:
        pass
    for number, seconds in ((signal.SIGTERM, 10), (signal.SIGKILL, 1)):
        for member in (members := _members(process.pid)):
            with suppress(psutil.Error):
                member.send_signal(number)
        psutil.wait_procs(members, timeout=seconds)
    status = process.wait()
    return status if status >= 0 else 128 - status


def _members(session: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):  # it may have ended meanwhile
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


if __name__ == "__main__":
    sys.exit(_guard(sys.argv[1:]))
