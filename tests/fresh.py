"""A program in an interpreter that has seen neither verl nor this package, without the seconds that imports take.

One process imports what verl imports from elsewhere (torch, transformers, Ray and so on, half of a test's time) and
forks for each program. Unlike a new interpreter's, these libraries have been imported, each with its submodules, and
have read the environment.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import IO, Any

LIBRARIES = (
    "accelerate",
    "datasets",
    "fastapi",
    "pandas",
    "peft",
    "ray",
    "scipy.stats",
    "tensordict",
    "torch",
    "torchdata.stateful_dataloader",
    "transfer_queue",
    "transformers",
    "uvicorn",
    "zmq",
)
WAITED_FOR = ("hydra", "verl", "verl_ext")
"""What the package's hooks wait for: no library may bring it."""


def run(
    code: str,
    *arguments: str,
    module: bool = False,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    timeout: float = 120,
) -> subprocess.CompletedProcess[str]:
    """What `python -c CODE` (or with `module` `python -m CODE`) does in this environment (or the one given)."""
    given = dict(os.environ if environment is None else environment)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        request = {
            "code": code,
            "arguments": arguments,
            "module": module,
            "folder": str(folder or Path.cwd()),
            "environment": given,
            "streams": [f"/proc/{os.getpid()}/fd/{stream.fileno()}" for stream in (out, err)],
            "timeout": timeout,
        }
        server = _server()
        try:
            server.stdin.write(json.dumps(request) + "\n")
            server.stdin.flush()
            status = int(server.stdout.readline())
        except (BrokenPipeError, ValueError) as error:
            _server.cache_clear()
            raise RuntimeError(f"the process that forks ended with {server.wait()}") from error
        for stream in (out, err):
            stream.seek(0)
        done = subprocess.CompletedProcess(code, status, out.read(), err.read())
    if status == -signal.SIGALRM:
        raise subprocess.TimeoutExpired(code, timeout, done.stdout, done.stderr)
    return done


@functools.cache
def _server() -> Any:
    command = [sys.executable, "-W", "ignore", __file__]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(server.kill)
    return server


def _wait_for_a_program(requests: IO[str], answers: IO[str]) -> dict[str, Any]:
    """Returns in a fork for each request, and in the first process never."""
    for line in requests:
        request: dict[str, Any] = json.loads(line)
        if (child := os.fork()) == 0:
            return request
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)
    os._exit(0)


def _become(request: dict[str, Any], added: Mapping[str, str]) -> None:
    """Streams, folder, environment, arguments and path as a new interpreter has them."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, request["timeout"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, path in enumerate(request["streams"], start=1):
        os.dup2(os.open(path, os.O_WRONLY), number)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(added)
    os.environ.update(request["environment"])
    sys.path[0] = ""
    sys.argv = ["-c", *request["arguments"]]


def _run(request: dict[str, Any]) -> int:
    """The exit status of the program."""
    try:
        if request["module"]:
            runpy.run_module(request["code"], run_name="__main__", alter_sys=True)
        else:
            main = sys.modules["__main__"] = ModuleType("__main__")
            exec(compile(request["code"], "<string>", "exec"), vars(main))
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    except BaseException as error:  # noqa: BLE001  as an interpreter does
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def _end(status: int) -> None:
    """As an interpreter ends, but for the seconds of taking down the libraries."""
    threading._shutdown()  # waits for those that are no daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _main() -> None:
    old = dict(os.environ)
    for name in LIBRARIES:
        importlib.import_module(name)
    added = {name: value for name, value in os.environ.items() if old.get(name) != value}
    if found := sorted({name.partition(".")[0] for name in sys.modules} & set(WAITED_FOR)):
        sys.exit(f"a library has imported {', '.join(found)}")
    gc.freeze()
    # A program's own output must not end up among the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    request = _wait_for_a_program(sys.stdin, answers)
    _become(request, added)
    _end(_run(request))


if __name__ == "__main__":
    _main()
