"""math-verify in a process of its own, which the kernel ends when a judgement takes too long.

The process is this module run as a script. It reads one JSON object a line, `{"gold", "answer", "timeout"}`, and writes
`true` or `false`. Before each judgement it sets a timer that kills it, even inside one big-integer operation, which no
Python code could interrupt; the timer counts CPU time, so that a busy machine does not turn right answers into wrong
ones. The caller then sees the pipe close and starts another process for the next judgement. The process ends by itself
when its caller does.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from functools import lru_cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TextIO, cast

from verl_ext.errors import ConfigurationError

logger = logging.getLogger(__name__)

_MEMORY = 4 << 30  # bytes of address space, where a runaway power of integers stops
_READY = "ready"


class Judge:
    """The caller's side: starts the process with the first judgement and lets one thread at a time ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._inherited: subprocess.Popen[str] | None = None

    def equal(self, gold: str, answer: str, timeout: float) -> bool:
        """Whether math-verify reads both and finds them equal; False, and a warning logged, if it did not finish."""
        request = json.dumps({"gold": gold, "answer": answer, "timeout": timeout})
        with self._lock:
            for _ in range(2):
                reply = self._ask(request)
                if isinstance(reply, bool):
                    return reply
                if reply == -signal.SIGPROF:
                    logger.warning("math-verify took over %s s, counted as wrong: %.200r", timeout, answer)
                    return False
            logger.warning("math-verify's process ended twice (%s), counted as wrong: %.200r", reply, answer)
            return False

    def close(self) -> None:
        """End the process; the next judgement starts another one."""
        with self._lock:
            self._end()

    def forget(self) -> None:
        """In a forked child: leave the parent's process alone, and start one's own when it is needed."""
        self._lock = threading.Lock()
        # Kept, because Python would complain about a Popen that is dropped while its process runs.
        self._inherited, self._process = self._process, None

    def _ask(self, request: str) -> bool | int:
        """The reply, or the exit status of a process that gave none."""
        if self._process is None:
            self._process = _start()
        try:
            _write(cast(TextIO, self._process.stdin), request)
            line = cast(TextIO, self._process.stdout).readline()
        except BrokenPipeError:  # it ended between two judgements
            line = ""
        return bool(json.loads(line)) if line else self._end()

    def _end(self) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        try:
            # Closes its input: an idle process ends by itself, and one that has ended keeps its status.
            process.communicate(timeout=0.5)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            process.kill()
            process.wait()
        return process.returncode


JUDGE = Judge()
os.register_at_fork(after_in_child=JUDGE.forget)


def _start() -> subprocess.Popen[str]:
    process = subprocess.Popen(  # noqa: S603
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        # What can be imported here can be imported there, also where only sys.path knows of it.
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,  # Ctrl-C is for the caller
    )
    greeting = cast(TextIO, process.stdout).readline()
    if greeting.strip() != _READY:
        process.kill()
        process.communicate()
        reason = greeting.strip() or f"its process ended with status {process.returncode}"
        raise ConfigurationError(
            f"math-verify {_installed('math-verify')} does not work here: {reason}. With antlr4-python3-runtime "
            f"{_installed('antlr4-python3-runtime')} (Hydra, and so verl, needs 4.9.3) use: "
            "pip install 'math-verify>=0.8,<0.9'"
        )
    return process


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"


def _write(stream: TextIO, line: str) -> None:
    stream.write(line + "\n")
    stream.flush()


def serve() -> None:
    """The process's side: judge line by line until the input ends."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    _limit_memory()
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints is no reply
    try:
        works = judge(r"10\%", r"10\%") and not judge("1", "2")
    except ImportError as error:
        _write(replies, f"{type(error).__name__}: {error}".replace("\n", " "))
        return
    _write(replies, _READY if works else r"it cannot read 10\%")
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, request["timeout"])  # idle, it does not run
        _write(replies, json.dumps(judge(request["gold"], request["answer"])))


def _limit_memory() -> None:
    if sys.platform != "linux":
        return
    import resource

    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = _MEMORY if hard == resource.RLIM_INFINITY else min(_MEMORY, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def judge(gold: str, answer: str) -> bool:
    """Whether math-verify reads both and finds them equal. It turns its own exceptions into no."""
    # What cannot be read is an empty list, which equals nothing.
    return bool(import_module("math_verify").verify(_read(gold), _read(answer), timeout_seconds=None))


@lru_cache(maxsize=1024)  # a group's answers share their gold, and many of them are the same
def _read(answer: str) -> list[Any]:
    library = import_module("math_verify")
    target = library.LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)
    found: list[Any] = library.parse(
        rf"\boxed{{{answer}}}",
        [target],
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,  # the timer is ours, see above
    )
    return found


if __name__ == "__main__":
    serve()
