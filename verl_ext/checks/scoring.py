"""Score responses in a child process, which is ended when a response takes too long.

A regular expression that backtracks holds Python's lock, so nothing in its own process can end it. The code of the
child process is in `scorer_process`. A pipe connects the two processes:

1. The parent forks the child. A fork passes on the configuration and the modules that are already loaded, while `spawn`
   would import verl once more, which takes seconds.
2. The child loads the run's reward manager and sends `("result", is_async)`, where `is_async` says whether the reward
   function is a coroutine function. If loading fails, it sends `("error", error)` and ends.
3. The parent sends `(row, text)`: a row of data and a response to the row.
4. The child sends `("result", result)`, the score and all components, or `("error", error)`, a `ScoringError`. Then the
   parent may send the next response.
5. The child ends when the parent closes the pipe, or when the parent kills it.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import psutil
import torch

from verl_ext.checks.scorer_process import ScoringError, result_not_sent, serve
from verl_ext.core.batch import SCORE
from verl_ext.errors import DataError
from verl_ext.files import say

FIRST_TIMEOUT_FACTOR = 10
"""Loading the function may take this many timeouts of a response, and so may each response until one is scored.

The first response may load what the others use.
"""
REPORT_INTERVAL = 10.0
"""Seconds between two reports of the progress."""
EXIT_PATIENCE = 1.0
"""Seconds to wait for the exit status of a child process that has closed the pipe."""


class ScorerEndedError(DataError):
    """The process of a `Scorer` can score nothing more: a call took too long, or the function ended the process."""


class Scorer:
    """Scores responses as the run will, one at a time, in a process with a session of its own."""

    def __init__(self, config: Any, timeout: float, deadline: float, *, accepts_nan: bool) -> None:
        """`timeout`: seconds for a response. `deadline`: by `time.monotonic()`. `accepts_nan`: in place of a score."""
        self.timeout, self.deadline, self.accepts_nan = timeout, deadline, accepts_nan
        self.scored = 0
        """The number of responses that were scored."""
        self.seconds = 0.0
        """The time for these responses."""
        self._last_report = time.monotonic()
        context = multiprocessing.get_context("fork")
        self._pipe, pipe_of_child = context.Pipe()
        # Not a daemon, because a daemon must not start processes, and a reward function may.
        self._process = context.Process(target=serve, args=(self._pipe, pipe_of_child, config))
        self._process.start()
        pipe_of_child.close()
        try:
            self.is_async: bool = self._receive("Loading the reward function", FIRST_TIMEOUT_FACTOR * timeout)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the process, and those that it has started, also in sessions of their own.

        Edge cases: a process in a session of its own survives if the process that has started it has crashed.
        """
        descendants = []
        with suppress(psutil.Error):
            descendants = psutil.Process(self._process.pid).children(recursive=True)
        for descendant in descendants:
            with suppress(psutil.Error):
                descendant.kill()
        if self._process.pid is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def score(self, row: Mapping[str, Any], text: str, where: str) -> dict[str, Any]:
        """Return the score of a response and all components; raise `ScoringError` where a run would end."""
        timeout = self.timeout * (1 if self.scored else FIRST_TIMEOUT_FACTOR)
        with suppress(OSError):  # the process has ended, which `_receive` reports
            self._pipe.send((row, text))
        start = time.monotonic()
        result: dict[str, Any] = self._receive(f"Scoring {where}", timeout)
        self.seconds += time.monotonic() - start
        self.scored += 1
        score = result[SCORE]
        stored = _as_stored(score)
        if stored is None or np.isinf(stored) or (np.isnan(stored) and not self.accepts_nan):
            message = f"the score is {score!r}, but verl needs a finite number"
            raise ScoringError(message, "Return a finite float as the score.", cause="score")
        if np.ndim(score) > 0:
            result[SCORE] = stored
        return result

    def _receive(self, action: str, timeout: float) -> Any:
        """Return what the process sends, and report now and then what it does."""
        start = time.monotonic()
        self._wait(action, start, min(start + timeout, self.deadline))
        try:
            message = self._pipe.recv_bytes()
        except (EOFError, OSError):
            raise ScorerEndedError(
                f"{action} ended the process of the reward function with exit status {self._exit_status()}. Remove "
                "calls that end the process, such as os._exit, or correct the crash."
            ) from None
        try:
            kind, content = pickle.loads(message)  # noqa: S301 - of our own process
        except Exception as error:
            raise result_not_sent(error) from error
        if kind == "error":
            raise content
        return content

    def _exit_status(self) -> int | None:
        """Return the exit status of a process that has closed its pipe, or None if it does not end."""
        end = time.monotonic() + EXIT_PATIENCE
        while self._process.exitcode is None and time.monotonic() < end:
            time.sleep(0.01)
        return self._process.exitcode

    def _wait(self, action: str, start: float, end: float) -> None:
        """Wait until the process has sent something. Raise if it has not done so at the time `end`."""
        while True:
            now = time.monotonic()
            if now - self._last_report > REPORT_INTERVAL:
                self._last_report = now
                say(f"{self.scored} responses scored so far. {action}.", sys.stderr)
            next_report = self._last_report + REPORT_INTERVAL
            if self._pipe.poll(max(0.0, min(next_report, end) - now)):
                return
            if time.monotonic() >= end:
                option = "--minutes" if end == self.deadline else "--seconds"
                raise ScorerEndedError(
                    f"{action} timed out after {time.monotonic() - start:.0f} s. Correct the function, for example a "
                    f"regular expression that backtracks, or raise {option} if it needs more time."
                )


def _as_stored(score: Any) -> float | None:
    """Return a score as verl's rollout stores it, in a tensor of float32; None if the tensor cannot hold it."""
    stored = torch.zeros(1)
    try:
        stored[-1] = score
    except (TypeError, ValueError, RuntimeError):
        return None
    return float(stored)
