"""A run's reward manager in a process of its own, which is ended when a response takes too long.

A regular expression that backtracks holds Python's lock, so nothing in its own process can end it.
"""

from __future__ import annotations

import asyncio
import copy
import ctypes
import inspect
import multiprocessing
import os
import pickle
import re
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import torch
from omegaconf import OmegaConf

from verl_ext.core.batch import SCORE
from verl_ext.errors import ConfigurationError, DataError, VerlExtError, reading, unknown
from verl_ext.files import exit_on_signals, say
from verl_ext.run_config import FUNCTION, select

MANAGER = "reward.reward_manager"
IN_PROCESS = ("naive", "dapo", "gdpo")
"""verl's reward managers that need neither Ray nor a service; `naive` calls the function for the others."""
ADDED_BY_ROLLOUT = {"min_global_steps": 0, "max_global_steps": 0, "turn_scores": [], "tool_rewards": []}
"""What a rollout of one turn adds to `extra_info`, at the first step."""
FIRST_TIMEOUT_FACTOR = 10
"""The timeout of loading, and of the first response, which may load what the others use, in timeouts of a response."""
REPORT_INTERVAL = 10.0
"""Seconds between two reports of the progress."""
ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""The arguments that verl passes to a reward function by name, in addition to `reward_kwargs`."""
CALLERS = ("_call_with_kwargs", "_call_with_kwargs_async")
"""The functions of verl that call a custom reward function."""
PARENT_DEATH_SIGNAL = 1
"""The option PR_SET_PDEATHSIG of Linux's `prctl`."""


class ScoringError(DataError):
    """A response cannot be scored. Errors of the same `cause` are one mistake in the reward function."""

    def __init__(self, text: str, fix: str, cause: str) -> None:
        super().__init__(text, fix, cause)  # all arguments, so that the error can be pickled
        self.text, self.fix, self.cause = text, fix, cause


class ScorerEndedError(DataError):
    """The process of a `Scorer` has ended: a response took too long, or the reward function ended the process."""


class Scorer:
    """Scores responses as the run will, one at a time, in a process with a session of its own."""

    def __init__(self, config: Any, timeout: float, deadline: float, *, accepts_nan: bool) -> None:
        """`timeout`: seconds for a response. `deadline`: by `time.monotonic()`. `accepts_nan`: in place of a score."""
        self.timeout, self.deadline, self.accepts_nan = timeout, deadline, accepts_nan
        self.scored = 0
        """The number of responses that were scored."""
        self.seconds = 0.0
        """The time for these responses."""
        exit_on_signals()  # so that this object ends its process
        self._last_report = time.monotonic()
        context = multiprocessing.get_context("fork")
        self._pipe, pipe_of_child = context.Pipe()
        # Not a daemon, because a daemon must not start processes, and a reward function may.
        self._process = context.Process(target=_serve, args=(self._pipe, pipe_of_child, config))
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
        with suppress(psutil.Error):
            for child in psutil.Process(self._process.pid).children(recursive=True):
                child.kill()
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
            text = f"the score is {score!r}, but verl needs a finite number"
            raise ScoringError(text, "Return a finite float as the score.", cause="score")
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
            end = time.monotonic() + 1
            while self._process.exitcode is None and time.monotonic() < end:
                time.sleep(0.01)
            raise ScorerEndedError(
                f"{action} ended the process of the reward function with exit status {self._process.exitcode}. Remove "
                "calls that end the process, such as os._exit, or correct the crash."
            ) from None
        with reading("The result of the reward function"):  # verl sends it to another process, too
            kind, content = pickle.loads(message)  # noqa: S301 - of our own process
        if kind == "error":
            raise content
        return content

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


def _serve(pipe_of_parent: Connection, pipe: Connection, config: Any) -> None:
    """Build the reward manager in the child process, and score until the pipe is closed."""
    os.setsid()
    # A fork copies the parent's loop, but not the threads in which that loop would run functions.
    asyncio.set_event_loop(asyncio.new_event_loop())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # processes of the function do not read the caller's input
    pipe_of_parent.close()
    if sys.platform == "linux":  # otherwise an endless loop would outlive a killed parent
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
    response = [""]
    tokenizer = SimpleNamespace(decode=lambda *_arguments, **_options: response[0])
    try:
        manager = load_manager(config, tokenizer)
    except VerlExtError as error:
        _send(pipe, "error", error)
        return
    _send(pipe, "result", bool(getattr(manager, "is_async_reward_score", False)))
    with suppress(EOFError):
        while True:
            row, response[0] = pipe.recv()
            try:
                _send(pipe, "result", _score(manager, row))
            except BaseException as error:  # noqa: BLE001 - the function is the user's
                _send(pipe, "error", _explained(error, manager))


def _send(pipe: Connection, kind: str, content: Any) -> None:
    sys.stdout.flush()  # what the function has printed, before this process is killed
    pipe.send_bytes(pickle.dumps((kind, content)))


def load_manager(config: Any, tokenizer: Any) -> Any:
    """Return the run's reward manager, with its reward function."""
    from verl.trainer.ppo.reward import load_reward_manager, resolve_reward_manager_cls

    name = select(config, f"{MANAGER}.name")
    merged: Any = OmegaConf.merge(config, {"reward": {"reward_manager": {"source": "register"}}})
    merged.reward.reward_manager.name = name if name in IN_PROCESS else "naive"
    _require_function(config)
    with reading("The reward function", ConfigurationError):
        resolve_reward_manager_cls(config)  # the run's own, which may need a service
        try:
            manager = load_reward_manager(merged, tokenizer)
        except RuntimeError as error:  # verl hides what went wrong
            raise error.__cause__ or error from error
    # Without this handler, Python before 3.12 waits forever for a function that raises StopIteration.
    manager.loop.set_exception_handler(_stop)
    return manager


def _require_function(config: Any) -> None:
    """Raise if the file of the reward function does not contain the name of the function."""
    file = Path(f"{select(config, f'{FUNCTION}.path')}")
    name = f"{select(config, f'{FUNCTION}.name')}"
    if not file.is_file():
        return
    source = file.read_text("utf-8", "replace")
    if not re.search(rf"\b{name}\b|import \*", source):
        valid = re.findall(r"^(?:async )?def (\w+)", source, re.M)
        raise ConfigurationError(f"{FUNCTION}.name: {unknown('function', name, valid)} in {file}.")


def _stop(loop: Any, context: dict[str, Any]) -> None:
    """Log an error of a loop, and end what runs in it."""
    loop.default_exception_handler(context)
    loop.stop()


def _score(manager: Any, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the score and the components of the response that the manager's tokenizer decodes."""
    from tensordict import TensorDict
    from verl import DataProto

    columns = dict(row)
    columns["extra_info"] = dict(row.get("extra_info") or {})
    columns["tool_extra_fields"] = copy.deepcopy(ADDED_BY_ROLLOUT)
    columns["__num_turns__"] = 2
    columns["reward_scores"] = {}
    arrays = {name: _array_of_one(value) for name, value in columns.items()}
    token = torch.zeros((1, 1), dtype=torch.long)
    mask = torch.ones(1, 2, dtype=torch.long)
    tensors = {"prompts": token, "responses": token, "attention_mask": mask}
    data = DataProto(batch=TensorDict(tensors, [1]), non_tensor_batch=arrays)
    result = manager.loop.run_until_complete(manager.run_single(data))
    return {**result["reward_extra_info"], SCORE: result["reward_score"]}


def _array_of_one(value: Any) -> np.ndarray[Any, Any]:
    """Return an array of shape `[1]` whose element is the value, even if the value is a list."""
    array = np.empty(1, dtype=object)
    array[0] = value
    return array


def _explained(error: BaseException, manager: Any) -> ScoringError:
    """Return the error of a reward function, with the line of the user's file that raised it."""
    kind = type(error).__name__
    message = str(error).rstrip(".")  # a sentence follows
    frames = traceback.extract_tb(error.__traceback__)
    file = _file_of_function(manager)
    of_user = [frame for frame in frames if frame.filename == file]
    arguments = f"{', '.join(ARGUMENTS[:-1])} and {ARGUMENTS[-1]}"
    if of_user:
        line = of_user[-1]
        text = f"it raises {kind}: {message} in line {line.lineno} of {line.filename} (`{line.line}`)"
        fix = "Correct this line."
        if isinstance(error, TypeError | AttributeError | LookupError):
            fix += f" verl passes the arguments {arguments} to the function."
        return ScoringError(text, fix, cause=f"{kind} {line.filename}:{line.lineno}")
    if isinstance(error, TypeError) and frames[-1].name in CALLERS:
        text = f"it cannot be called ({kind}: {message})"
        parameters = ", ".join(ARGUMENTS)
        fix = f"verl passes the arguments {arguments} by name. Define the function with ({parameters}, **kwargs)."
        return ScoringError(text, fix, cause=message)
    if isinstance(error, KeyError) and error.args == (SCORE,):
        text = f"it returns a dictionary without the entry `{SCORE}`"
        return ScoringError(text, f"Add the entry `{SCORE}`, a finite float, to the dictionary.", cause=text)
    return ScoringError(f"it raises {kind}: {message}", "", cause=f"{kind} {message}")


def _file_of_function(manager: Any) -> str:
    """Return the file of a custom reward function, as in tracebacks; empty if it is one of verl."""
    function = manager.compute_score
    # verl passes `reward_kwargs` to a custom function by a partial, whose first argument is the function.
    if not isinstance(function, partial) or not function.args:
        return ""
    custom_function = inspect.unwrap(function.args[0])
    code = getattr(custom_function, "__code__", None)
    return "" if code is None else str(code.co_filename)
