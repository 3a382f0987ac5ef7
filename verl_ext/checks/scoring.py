"""A run's reward manager in a process of its own, which is ended when an answer takes too long.

A regular expression that backtracks holds Python's lock, so that nothing in its own process can end it.
"""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import pickle
import re
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
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
ROLLOUT = {"min_global_steps": 0, "max_global_steps": 0, "turn_scores": [], "tool_rewards": []}
"""What a rollout of one turn adds to `extra_info`, at the first step."""
FIRST = 10
"""Times the limit of an answer: that of loading, and of the first one, which may load what the others use."""
_PARENT_DIES = 1  # PR_SET_PDEATHSIG


class EndedError(DataError):
    """The process scores no more: an answer took too long, or the reward function ended it."""


class Scorer:
    """Scores answers as the run will, one at a time, in a session of its own: a scorer may start processes, too."""

    def __init__(self, config: Any, seconds: float, until: float, *, nan: bool) -> None:
        """`seconds`: for an answer. `until`: when to end, by the clock. `nan`: whether the run goes on with NaN."""
        self.seconds, self.until, self.nan, self.scored = seconds, until, nan, 0
        exit_on_signals()  # so that this object ends its process
        self._last_report = time.monotonic()
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(self._pipe, theirs, config))  # no daemon: it may fork
        self._process.start()
        theirs.close()
        try:
            self.is_async: bool = self._reply("Loading the reward function", FIRST * seconds)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the process, and those that it has started, also in sessions of their own."""
        with suppress(psutil.Error):
            for child in psutil.Process(self._process.pid).children(recursive=True):
                child.kill()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def score(self, row: Mapping[str, Any], text: str, where: str) -> dict[str, Any]:
        """Return the score of an answer and all components; raise `DataError` where a run would end."""
        limit = self.seconds * (1 if self.scored else FIRST)
        with suppress(BrokenPipeError):  # it has ended, which the reply tells
            self._pipe.send((row, text))
        result: dict[str, Any] = self._reply(f"Scoring {where}", limit)
        self.scored += 1
        score, stored = result[SCORE], torch.full((1,), torch.inf)
        with suppress(TypeError, ValueError, RuntimeError):
            stored[-1] = score  # as verl's rollout stores it
        if stored.isinf() or (stored.isnan() and not self.nan):
            raise DataError(
                f"the score is {score!r}, but verl needs a finite number. Return a finite float as the score."
            )
        return result

    def _reply(self, what: str, limit: float) -> Any:
        """Return what the process sends, and say now and then what it does."""
        begun = time.monotonic()
        end = min(begun + limit, self.until)
        while True:
            now = time.monotonic()
            if now - self._last_report > 10:
                self._last_report = now
                say(f"{self.scored} responses scored so far. {what}.", sys.stderr)
            if self._pipe.poll(max(0.0, min(self._last_report + 10, end) - now)):
                break
            if time.monotonic() >= end:
                fix = "Raise --minutes" if end == self.until else "Raise --seconds"
                seconds = f"{time.monotonic() - begun:.0f} s"
                raise EndedError(f"{what} timed out after {seconds}. {fix} if the function needs more time.")
        try:
            sent = self._pipe.recv_bytes()
        except EOFError:
            ending = time.monotonic() + 1
            while self._process.exitcode is None and time.monotonic() < ending:
                time.sleep(0.01)
            raise EndedError(
                f"{what} ended the process of the reward function with exit status {self._process.exitcode}. Remove "
                "calls that end the process, such as sys.exit, or correct the crash."
            ) from None
        with reading("The result of the reward function"):  # verl, too, sends it to another process
            kind, reply = pickle.loads(sent)  # noqa: S301 - of our own process
        if kind == "error":
            raise reply
        return reply


def _serve(parents: Connection, pipe: Connection, config: Any) -> None:
    """The process: build the reward manager, and score until the pipe is closed."""
    os.setsid()
    # A fork copies the parent's loop, but not the threads in which that loop would run functions.
    asyncio.set_event_loop(asyncio.new_event_loop())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the function's processes do not read the caller's input
    parents.close()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DIES, signal.SIGKILL)  # else an endless loop would outlive a killed parent
    answer = [""]
    try:
        manager = load_manager(config, SimpleNamespace(decode=lambda *_given, **_options: answer[0]))
    except VerlExtError as error:
        _send(pipe, "error", error)
        return
    _send(pipe, "result", bool(getattr(manager, "is_async_reward_score", False)))
    with suppress(EOFError):
        while True:
            row, answer[0] = pipe.recv()
            try:
                _send(pipe, "result", _scored(manager, row))
            except BaseException as error:  # noqa: BLE001 - the function is the user's
                _send(pipe, "error", DataError(f"the reward function raises {type(error).__name__}: {error}"))


def _send(pipe: Connection, kind: str, reply: Any) -> None:
    sys.stdout.flush()  # what the function has printed, before this process is killed
    pipe.send_bytes(pickle.dumps((kind, reply)))


def load_manager(config: Any, tokenizer: Any) -> Any:
    """Return the run's reward manager, with its reward function."""
    from verl.trainer.ppo.reward import load_reward_manager, resolve_reward_manager_cls

    name = select(config, f"{MANAGER}.name")
    called: Any = OmegaConf.merge(config, {"reward": {"reward_manager": {"source": "register"}}})
    called.reward.reward_manager.name = name if name in IN_PROCESS else "naive"
    file, function = Path(f"{select(config, f'{FUNCTION}.path')}"), f"{select(config, f'{FUNCTION}.name')}"
    source = file.read_text("utf-8", "replace") if file.is_file() else function
    if not re.search(rf"\b{function}\b|import \*", source):
        valid = re.findall(r"^(?:async )?def (\w+)", source, re.M)
        raise ConfigurationError(f"{FUNCTION}.name: {unknown('function', function, valid)} in {file}.")
    with reading("The reward function", ConfigurationError):
        resolve_reward_manager_cls(config)  # the run's own, which may need a service
        try:
            manager = load_reward_manager(called, tokenizer)
        except RuntimeError as error:  # verl hides what went wrong
            raise error.__cause__ or error from error
    # Without this Python before 3.12 waits for ever for a function that raises StopIteration.
    manager.loop.set_exception_handler(_stop)
    return manager


def _stop(loop: Any, context: dict[str, Any]) -> None:
    """Log an error of a loop, and end what runs in it."""
    loop.default_exception_handler(context)
    loop.stop()


def _scored(manager: Any, row: Mapping[str, Any]) -> dict[str, Any]:
    """Score an answer."""
    from tensordict import TensorDict
    from verl import DataProto

    fields = {**row, "extra_info": dict(row.get("extra_info") or {})}
    fields |= {"tool_extra_fields": dict(ROLLOUT), "__num_turns__": 2, "reward_scores": {}}
    token = torch.zeros((1, 1), dtype=torch.long)
    tensors = {"prompts": token, "responses": token, "attention_mask": torch.ones(1, 2, dtype=torch.long)}
    data = DataProto(
        batch=TensorDict(tensors, [1]),
        non_tensor_batch={name: np.array([value, None], dtype=object)[:1] for name, value in fields.items()},
    )
    result = manager.loop.run_until_complete(manager.run_single(data))
    return {**result["reward_extra_info"], SCORE: result["reward_score"]}
