r"""Run math-verify in a child process, which the kernel kills if a verification takes too long.

`python -I math_judge.py FD PATH` is the child. A pipe connects it to the process that calls the reward function:

1. The parent starts the child for its first verification, and verifies `10\%`, which loads most of sympy.
2. The parent sends `(gold, answer, timeout)`. The child sets a timer, verifies, and sends True or False.
3. A child has one request at a time and is reused only after its reply. An exception between a request and its reply
   ends the child, so that a late reply is never taken for the reply to the next request.

Four mechanisms work together:

- The timer (SIGPROF) counts CPU time, so that correct answers stay correct on a busy machine. Its signal kills the
  child even inside a big-integer operation, which Python code cannot interrupt. The answer then counts as incorrect.
- A child that hangs uses no CPU time. So the parent waits only `_WALL_SECONDS_PER_CPU_SECOND` times the limit, and at
  least `_MIN_WALL_SECONDS`. After that it kills the child and raises an error, because the answer may be correct.
- A limit of the address space ends a child whose integers grow without end. The parent tries once more with a new
  child, because the idle child may have been killed for another reason.
- verl calls reward functions in threads, so a lock lets one thread at a time use the child. A process that was forked
  has a `Verifier` without a child, because the child belongs to its parent.

Process pools (pebble, loky, `concurrent.futures`) hang after random interruptions and limit wall time.
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

_START_SECONDS = 60.0
"""The limit of CPU time for the first verification of a child."""
_WALL_SECONDS_PER_CPU_SECOND = 10
"""How long the parent waits for a reply, for each second of the limit of CPU time."""
_MIN_WALL_SECONDS = 60.0
"""How long the parent waits at least, because two dozen verifications may share two cores."""
_EXIT_SECONDS = 5.0
"""How long the parent waits for the exit status of a child that has closed the pipe."""
_MEMORY = 4 << 30
"""The limit of the address space in bytes."""


class NoVerdictError(Exception):
    """math-verify did not finish. The message says why."""


class Verifier:
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
        """Return whether both are equal.

        Raise `NoVerdictError` after `timeout` seconds of CPU time, or if the child has ended twice without a reply.
        """
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


VERIFIER = Verifier()
os.register_at_fork(after_in_child=VERIFIER.forget)


def _folders_with_working_folder_last() -> list[str]:
    """Return the search path of this process, so ordered that no file of the user can shadow a library."""
    working_folder = os.path.realpath(os.curdir)
    folders = [os.path.abspath(folder) for folder in sys.path]
    libraries = [folder for folder in folders if os.path.realpath(folder) != working_folder]
    return [*libraries, *(folder for folder in folders if folder not in libraries)]


class _Child:
    """A child process, and this end of its pipe."""

    def __init__(self) -> None:
        self.pipe, pipe_of_child = Pipe()
        search_path = os.pathsep.join(_folders_with_working_folder_last())
        with pipe_of_child:
            self.popen = subprocess.Popen(  # noqa: S603
                [sys.executable, "-I", __file__, str(pipe_of_child.fileno()), search_path],
                pass_fds=[pipe_of_child.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the caller
            )

    def ask(self, gold: str, answer: str, timeout: float) -> bool | None:
        """Return the verdict, or None if the child ended without one."""
        wait = max(_MIN_WALL_SECONDS, _WALL_SECONDS_PER_CPU_SECOND * timeout)
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
            self.end(_EXIT_SECONDS)
            return None
        except BaseException:  # the reply may still come: do not use this child again
            self.end()
            raise

    def end(self, exit_seconds: float = 0.0) -> None:
        """Kill the child, if it does not end by itself within some seconds."""
        self.pipe.close()
        with suppress(subprocess.TimeoutExpired):
            self.popen.wait(exit_seconds)
        self.popen.kill()  # does nothing if it has ended
        self.popen.wait()


def _start() -> _Child:
    """Return a child that has verified an answer. Raise if math-verify does not work."""
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
            parsed_gold, parsed_answer = parse_answer(gold), parse_answer(answer)  # an empty list equals nothing
            pipe.send(bool(library.verify(parsed_gold, parsed_answer, timeout_seconds=None)))


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
