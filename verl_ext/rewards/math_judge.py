r"""Run math-verify in a child process, which the kernel kills if a verification takes too long.

`python -I math_judge.py FD PATH` is the child: it reads (gold, answer, timeout) from a pipe and writes True or False.
Before each verification it sets a timer that kills it, even inside a big-integer operation, which Python code cannot
interrupt. The timer counts CPU time, so that correct answers stay correct on a busy machine. A child that hangs uses no
CPU time. It is killed after ten times the limit in wall time, and after at least a minute. That is an error, and the
answer does not count as incorrect.

A child processes one request at a time and is reused only after its reply. An exception between a request and its reply
ends the child, so that a late reply is never taken for the reply to the next request. Process pools (pebble, loky,
`concurrent.futures`) hang after random interruptions and limit wall time.
"""

import logging
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from multiprocessing.connection import Connection, Pipe
from typing import Any

logger = logging.getLogger(__name__)

_START_SECONDS = 60.0  # of CPU time for the first verification, which loads most of sympy
_PATIENCE = 10  # seconds of wall time for each second of CPU time
_LEAST_WAIT = 60.0  # seconds of wall time, because two dozen verifications may share two cores
_MEMORY = 4 << 30  # bytes of address space: the limit for runaway powers of integers


class NoVerdictError(Exception):
    """math-verify did not finish. The message says why."""


class Judge:
    """Starts the child for the first verification, and lets one thread at a time use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: _Child | None = None

    def equal(self, gold: str, answer: str, timeout: float) -> bool:
        """Return whether both are equal. Log a warning and return False if math-verify does not finish."""
        try:
            return self.ask(gold, answer, timeout)
        except NoVerdictError as error:
            logger.warning("%s, so the answer counts as incorrect: %.200r", error, answer)
            return False

    def ask(self, gold: str, answer: str, timeout: float) -> bool:
        """Return whether both are equal. Raise `NoVerdictError` after `timeout` seconds of CPU time."""
        with self._lock:
            for _ in range(2):  # the idle child may have been killed
                child = self._idle or _start()
                self._idle = None
                verdict = child.ask(gold, answer, timeout)
                if verdict is not None:
                    self._idle = child
                    return verdict
                if child.popen.returncode == -signal.SIGPROF:
                    raise NoVerdictError(f"math-verify took more than {timeout:g} s of CPU time")
            raise NoVerdictError(f"the process of math-verify ended twice, with status {child.popen.returncode}")

    def forget(self) -> None:
        """Leave the child to the parent process after a fork. The next verification here starts a new child."""
        if self._idle:
            self._idle.pipe.close()
            self._idle.popen.returncode = 0  # only the parent can wait for it
        self.__init__()  # type: ignore[misc]


JUDGE = Judge()
os.register_at_fork(after_in_child=JUDGE.forget)


class _Child:
    def __init__(self) -> None:
        self.pipe, theirs = Pipe()
        # The search path of the caller, with the working folder last, so that no file there can shadow a library.
        here = os.path.realpath(os.curdir)
        folders = sorted(map(os.path.abspath, sys.path), key=lambda folder: os.path.realpath(folder) == here)
        with theirs:
            self.popen = subprocess.Popen(  # noqa: S603
                [sys.executable, "-I", __file__, str(theirs.fileno()), os.pathsep.join(folders)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the caller
            )

    def ask(self, gold: str, answer: str, timeout: float) -> bool | None:
        """Return the verdict, or None if the child ended without one."""
        wait = max(_LEAST_WAIT, _PATIENCE * timeout)
        try:
            self.pipe.send((gold, answer, timeout))
            if self.pipe.poll(wait):
                return bool(self.pipe.recv())
            from verl_ext.errors import VerlExtError  # the child has no search path when it imports this file

            raise VerlExtError(
                f"math-verify returned no verdict within {wait:g} s, although its limit is {timeout:g} s of CPU time. "
                "Its process does not get CPU time. Reduce the load of this machine, or free memory."
            )
        except (EOFError, ConnectionError):  # the child is ending: wait for its own exit status
            self.end(patience=5.0)
            return None
        except BaseException:  # the reply may still come: do not use this child again
            self.end()
            raise

    def end(self, patience: float = 0.0) -> None:
        self.pipe.close()
        with suppress(subprocess.TimeoutExpired):
            self.popen.wait(patience)
        self.popen.kill()  # does nothing if it has ended
        self.popen.wait()


def _start() -> _Child:
    child = _Child()
    if child.ask(r"10\%", r"10\%", _START_SECONDS):
        return child
    from verl_ext.errors import ConfigurationError

    raise ConfigurationError(
        r"math-verify does not work in this environment. It cannot read 10\%, or its process ended with the output "
        "above. Its version must work with antlr4-python3-runtime 4.9.3, which Hydra needs. Install it with "
        "`pip install 'math-verify>=0.8,<0.9'`."
    )


def main(pipe: Connection, path: str) -> None:
    """Verify answers until the pipe is closed, with the libraries on `path`."""
    sys.path[:] = path.split(os.pathsep)
    logging.disable(logging.WARNING)  # math-verify warns at each call that its own timer is off
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    if sys.platform == "linux":
        import resource

        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        soft = _MEMORY if hard == resource.RLIM_INFINITY else min(_MEMORY, hard)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    with suppress(EOFError, ConnectionError):
        while True:
            gold, answer, timeout = pipe.recv()
            signal.setitimer(signal.ITIMER_PROF, timeout)  # it does not run while the process waits
            library = import_module("math_verify")  # it catches its own exceptions, and answers False
            wanted, given = parse_answer(gold), parse_answer(answer)  # an empty list is equal to nothing
            pipe.send(bool(library.verify(wanted, given, timeout_seconds=None)))


@lru_cache(maxsize=1024)  # the answers of a group share their gold, and many of them are equal
def parse_answer(answer: str) -> list[Any]:
    r"""Return the expression that math-verify reads, or the text if math-verify cannot read it (`0.\overline{72}`)."""
    library = import_module("math_verify")
    target = library.LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)
    parsed: list[Any] = library.parse(
        rf"\boxed{{{answer}}}",
        [target],
        fallback_mode="first_match",
        extraction_mode="first_match",
        parsing_timeout=None,  # main() sets the timer
    )
    return parsed[:1]


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])), sys.argv[2])
