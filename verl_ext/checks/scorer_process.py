"""The child process of a `Scorer`: load the run's reward manager, and score responses with it.

`scoring` describes the messages between the two processes. verl's reward manager calls the reward function, so that the
function gets the arguments that it gets in a run. Errors of the function become a `ScoringError`, which says where the
mistake is and what to do.
"""

from __future__ import annotations

import asyncio
import copy
import ctypes
import inspect
import os
import pickle
import re
import signal
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

from verl_ext.checks.managers import MANAGER, manager_of_verl
from verl_ext.core.batch import SCORE
from verl_ext.errors import ConfigurationError, DataError, VerlExtError, explaining_errors, unknown
from verl_ext.run_config import FUNCTION, select

ADDED_BY_ROLLOUT = {"min_global_steps": 0, "max_global_steps": 0, "turn_scores": [], "tool_rewards": []}
"""What a rollout of one turn adds to `extra_info`, at the first step."""
TURNS = 2
"""The number of turns that verl's agent loop `single_turn_agent` writes: the prompt and the response."""
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
        self.where: list[str] = []
        """The responses for which the mistake occurred, for messages. `RewardProbe` adds them."""


def serve(pipe_of_parent: Connection, pipe: Connection, config: Any) -> None:
    """Load the reward manager in the child process, and score until the pipe is closed."""
    _leave_parent(pipe_of_parent, pipe)
    # The manager decodes the tokens of a response. This tokenizer returns the text in the list instead.
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
                result = _score(manager, row)
            except BaseException as error:  # noqa: BLE001 - the function is the user's
                _send(pipe, "error", _explained(error, manager))
            else:
                _send(pipe, "result", result)


def _leave_parent(pipe_of_parent: Connection, pipe: Connection) -> None:
    """Make the process independent of what it has inherited from the parent, except for its end of the pipe."""
    os.setsid()
    # A fork copies the parent's loop, but not the threads in which that loop would run functions.
    asyncio.set_event_loop(asyncio.new_event_loop())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # processes of the function do not read the caller's input
    pipe_of_parent.close()
    # Otherwise a process that the function forks would hold the pipe, and the parent would not see that this one ends.
    os.register_at_fork(after_in_child=pipe.close)
    if sys.platform == "linux":  # otherwise an endless loop would outlive a killed parent
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _send(pipe: Connection, kind: str, content: Any) -> None:
    """Send a message, or an error if the result of the reward function cannot be sent."""
    try:
        message = pickle.dumps((kind, content))
    except Exception as error:  # noqa: BLE001 - an object of the user decides how it is pickled
        message = pickle.dumps(("error", result_not_sent(error)))
    sys.stdout.flush()  # what the function has printed, before this process is killed
    pipe.send_bytes(message)


def result_not_sent(error: Exception) -> ScoringError:
    """Return the error for a result that cannot be pickled here, or that cannot be unpickled in the parent."""
    kind = type(error).__name__
    text = f"it returns a result that cannot be sent to another process ({kind}: {error})"
    fix = "Return only numbers, strings, and lists of them, because verl sends each result to another process."
    return ScoringError(text, fix, cause=f"{kind} of a result")


def load_manager(config: Any, tokenizer: Any) -> Any:
    """Return the run's reward manager, with its reward function; `naive` if the manager cannot be used here."""
    from verl.trainer.ppo.reward import load_reward_manager

    manager_of_run = manager_of_verl(partial(select, config))
    is_usable = manager_of_run is not None and not manager_of_run.needs_service
    usable: Any = OmegaConf.merge(config, {"reward": {"reward_manager": {"source": "register"}}})
    usable.reward.reward_manager.name = select(config, f"{MANAGER}.name") if is_usable else "naive"
    with explaining_errors("The reward function", ConfigurationError):
        _require_function(config)
        _require_manager(config)
        try:
            manager = load_reward_manager(usable, tokenizer)
        except RuntimeError as error:  # verl hides what went wrong
            raise error.__cause__ or error from error
    # Without this handler, Python before 3.12 waits forever for a function that raises StopIteration.
    manager.loop.set_exception_handler(_stop)
    return manager


def _require_function(config: Any) -> None:
    """Raise if the file of the reward function does not contain the name of the function."""
    path = select(config, f"{FUNCTION}.path")
    if path is None or not Path(path).is_file():
        return
    name = str(select(config, f"{FUNCTION}.name"))
    source = Path(path).read_text("utf-8", "replace")
    words_of_source = re.findall(r"\w+", source)
    if name not in words_of_source and "import *" not in source:
        valid = re.findall(r"^(?:async )?def (\w+)", source, re.M)
        raise ConfigurationError(f"{FUNCTION}.name: {unknown('function', name, valid)} in {path}.")


def _require_manager(config: Any) -> None:
    """Raise if the run's own reward manager does not exist, because `naive` may take its place here."""
    from verl.trainer.ppo.reward import resolve_reward_manager_cls

    resolve_reward_manager_cls(config)


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
    columns["__num_turns__"] = TURNS
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
    frames_of_function = [frame for frame in frames if frame.filename == file]
    arguments = f"{', '.join(ARGUMENTS[:-1])} and {ARGUMENTS[-1]}"
    if frames_of_function:
        line = frames_of_function[-1]
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
