"""Programs in a new process, which has imported neither verl nor this package, but some libraries that they import.

These libraries take most of the time of `import verl`. A server process imports them once, and forks for each program.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

TIMEOUT = 1200
"""Seconds after which a program is ended. It is high because the machine may be busy."""
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    ["torch", "transformers", "tensordict", "datasets", "peft", "ray.util.state", "fastapi", "aiohttp", "hydra"]
)


def run(code: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `python -c CODE`, or `python -m CODE` with `module=True`, and return its status and output."""
    with TemporaryDirectory() as home:
        out, err = Path(home, "out"), Path(home, "err")
        process = start(code, *arguments, out=out, err=err, **options)
        try:
            process.join(TIMEOUT)
        finally:
            process.kill()
        assert process.exitcode is not None, f"not done within {TIMEOUT} s: {err.read_text()}"
        return subprocess.CompletedProcess(code, process.exitcode, out.read_text(), err.read_text())


def start(code: str, *arguments: str, out, err, module=False, folder=None, environment=None) -> BaseProcess:
    """Start a program whose output goes to the files `out` and `err`.

    Without `environment` it has the variables of this process.
    """
    variables = dict(os.environ if environment is None else environment)
    process = SERVER.Process(target=_begin, args=(code, arguments, module, folder or Path.cwd(), variables, out, err))
    process.start()
    return process


def _begin(code, arguments, module, folder, environment, out, err) -> None:
    """Run a program in this process, which the server has forked."""
    _redirect(1, out)
    _redirect(2, err)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = ["-c", *arguments]
    if module:
        runpy.run_module(code, run_name="__main__", alter_sys=True)
    else:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})


def _redirect(descriptor: int, path: Path) -> None:
    """Append what is written to a file descriptor to a file."""
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)


def as_from_a_terminal() -> None:
    """Let these signals end the process, even if the tests run under `nohup`. This is for `preexec_fn`."""
    signals = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
    for number in signals:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
