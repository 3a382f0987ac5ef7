"""Run math-verify in a separate process, which the kernel kills when a judgement takes too long.

Why not a library's process pool? Measured with one worker: pebble, loky and `concurrent.futures` take 0.3 to 0.5 ms a
verdict where this takes about 0.1 ms, all three hang after random interruptions, and pebble raises after `os.fork`.
They limit wall time, which depends on the load of the machine, so we would still need our own timer, memory limit and
search path.

A process answers one question at a time and is reused only after it has answered. An exception between a question and
its reply ends the process, so that a late reply is never taken for the reply to the next question.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from multiprocessing.connection import Pipe

from verl_ext.errors import ConfigurationError
from verl_ext.rewards import math_judge_process

logger = logging.getLogger(__name__)

_START_SECONDS = 60.0  # of CPU time for the first judgement, which loads most of sympy


class NoVerdictError(Exception):
    """math-verify did not finish; the message says why."""


class Judge:
    """Starts the process at the first judgement. One thread at a time asks it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: _Process | None = None

    def equal(self, gold: str, answer: str, timeout: float) -> bool:
        """Whether math-verify finds both equal. If it does not finish, log a warning and return False."""
        try:
            return self.ask(gold, answer, timeout)
        except NoVerdictError as error:
            logger.warning("%s, counted as wrong: %.200r", error, answer)
            return False

    def ask(self, gold: str, answer: str, timeout: float) -> bool:
        """Whether math-verify reads both and finds them equal; raise `NoVerdictError` after `timeout` s of CPU time."""
        with self._lock:
            for _ in range(2):  # the idle process may have been killed
                process = self._idle or _start()
                self._idle = None
                verdict = process.ask(gold, answer, timeout)
                if verdict is not None:
                    self._idle = process
                    return verdict
                if process.popen.returncode == -signal.SIGPROF:
                    raise NoVerdictError(f"math-verify took over {timeout:g} s")
            raise NoVerdictError(f"math-verify's process ended twice, {process.last_words}")

    def close(self) -> None:
        """End the process. The next judgement starts a new one."""
        with self._lock:
            if self._idle:
                self._idle.end()
            self._idle = None

    def forget(self) -> None:
        """In a forked child: do not use the process of the parent; the next judgement starts a new one."""
        self._lock = threading.Lock()
        if self._idle:
            self._idle.disown()
        self._idle = None


JUDGE = Judge()
os.register_at_fork(after_in_child=JUDGE.forget)


class _Process:
    def __init__(self) -> None:
        self.last_words = ""  # once the process has ended: its exit status, and what it printed for the last question
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115
        self._pipe, theirs = Pipe()
        # The search path of the caller, with the working folder last: no file there may hide a library.
        here = os.path.realpath(os.curdir)
        folders = sorted(map(os.path.abspath, sys.path), key=lambda folder: os.path.realpath(folder) == here)
        with theirs:
            self.popen = subprocess.Popen(  # noqa: S603
                [sys.executable, "-I", math_judge_process.__file__, str(theirs.fileno()), os.pathsep.join(folders)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._printed,
                stderr=self._printed,
                start_new_session=True,  # Ctrl-C is for the caller
            )

    def ask(self, *question: str | float) -> bool | None:
        """The verdict, or None if the process ended without one."""
        try:
            self._pipe.send(question)
            return bool(self._pipe.recv())
        except (EOFError, ConnectionError):  # it is ending: wait for its own exit status
            self.end(patience=5.0)
            return None
        except BaseException:  # the reply may still come: do not use this process again
            self.end()
            raise

    def end(self, patience: float = 0.0) -> None:
        self._pipe.close()
        with suppress(subprocess.TimeoutExpired):
            self.popen.wait(patience)
        self.popen.kill()  # does nothing if it has ended
        self.popen.wait()
        with self._printed as file:
            file.seek(0)
            printed = file.read().decode(errors="replace").strip()
        self.last_words = f"with status {self.popen.returncode}" + (f": {printed[-2000:]}" if printed else "")

    def disown(self) -> None:
        self._pipe.close()
        self._printed.close()
        self.popen.returncode = 0  # only the parent can wait for it


def _start() -> _Process:
    process = _Process()
    works = process.ask(r"10\%", r"10\%", _START_SECONDS)
    if works:
        return process
    reason = r"it cannot read 10\%" if works is False else f"its process ended {process.last_words}"
    raise ConfigurationError(
        f"math-verify does not work here: {reason}. Hydra, and so verl, needs antlr4-python3-runtime 4.9.3, "
        "with which this works: pip install 'math-verify>=0.8,<0.9'"
    )
