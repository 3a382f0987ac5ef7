"""A program in an interpreter that has seen neither verl nor this package, without the seconds that imports take.

One process imports what verl imports from elsewhere (torch, transformers, Ray and so on, half of a test's time) and
forks for each program. What these libraries read from the environment when they are imported, they have read by then.
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
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

LIBRARIES = (
    "accelerate",
    "datasets",
    "fastapi",
    "hydra",
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


def run(
    code: str,
    *arguments: str,
    module: bool = False,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    timeout: float = 120,
) -> subprocess.CompletedProcess[str]:
    """What `python -c CODE` (or with `module` `python -m CODE`) does in this environment (or the one given)."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        request = {
            "code": code,
            "arguments": arguments,
            "module": module,
            "folder": str(folder or Path.cwd()),
            "environment": dict(os.environ if environment is None else environment),
            "streams": [f"/proc/{os.getpid()}/fd/{stream.fileno()}" for stream in (out, err)],
            "timeout": timeout,
        }
        server = _server()
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        if not (answer := server.stdout.readline()):
            raise RuntimeError(f"the process that forks ended with {server.wait()}")
        status = int(answer)
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


def _become(request: dict[str, Any]) -> None:
    """Streams, folder, environment, arguments and path as a new interpreter has them."""
    signal.alarm(int(request["timeout"]))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    for number, path in enumerate(request["streams"], start=1):
        os.dup2(os.open(path, os.O_WRONLY), number)
    os.chdir(request["folder"])
    old = os.environ.get("PYTHONPATH")
    os.environ.clear()
    os.environ.update(request["environment"])
    if (new := os.environ.get("PYTHONPATH")) != old:
        raise SystemExit(f"PYTHONPATH is {old!r} here, and {new!r} asked for: start a process of its own")
    sys.path[0] = ""
    sys.argv = ["-c", *request["arguments"]]


def _run(request: dict[str, Any]) -> int:
    """The exit status of the program."""
    try:
        if request["module"]:
            runpy.run_module(request["code"], run_name="__main__", alter_sys=True)
        else:
            exec(compile(request["code"], "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    except BaseException:  # noqa: BLE001  as an interpreter does
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    for _name in LIBRARIES:
        importlib.import_module(_name)
    for _found in [name for name in sys.modules if name.partition(".")[0] in ("verl", "verl_ext")]:
        sys.exit(f"{_found} was imported by a library")
    gc.freeze()
    # A program's own output must not end up among the answers.
    _answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _request = _wait_for_a_program(sys.stdin, _answers)
    _become(_request)
    _status = _run(_request)
    # As an interpreter ends, but for the seconds of taking down the libraries.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_status)
