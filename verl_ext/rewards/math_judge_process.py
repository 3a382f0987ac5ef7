r"""The child of `math_judge`, run as a script: reads (gold, answer, timeout) from a pipe and writes True or False.

It imports nothing of this package. Before each judgement it sets a timer that kills it, even inside a big-integer
operation, which Python code cannot interrupt. The timer counts CPU time, so that right answers stay right on a busy
machine. The process ends when its caller closes the pipe or dies.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import lru_cache
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

_MEMORY = 4 << 30  # bytes of address space: the limit for runaway powers of integers


def main(pipe: Connection, path: str) -> None:
    """Judge until the pipe is closed, with the libraries on `path`."""
    sys.path[:] = path.split(os.pathsep)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    if sys.platform == "linux":
        import resource

        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        soft = _MEMORY if hard == resource.RLIM_INFINITY else min(_MEMORY, hard)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    while True:
        try:
            gold, answer, timeout = pipe.recv()
        except (EOFError, ConnectionError):
            return
        os.lseek(2, 0, os.SEEK_SET)  # forget what was printed about earlier questions
        os.ftruncate(2, 0)
        signal.setitimer(signal.ITIMER_PROF, timeout)  # it does not run while the process waits
        pipe.send(judge(gold, answer))


def judge(gold: str, answer: str) -> bool:
    """Whether math-verify reads both and finds them equal. math-verify catches its own exceptions and returns False."""
    library = import_module("math_verify")
    return bool(library.verify(read(gold), read(answer), timeout_seconds=None))  # an empty list is equal to nothing


@lru_cache(maxsize=1024)  # a group's answers share their gold, and many of them are the same
def read(answer: str) -> list[Any]:
    r"""The expression that math-verify reads, or the text if it cannot, as with `0.\overline{72}`."""
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
