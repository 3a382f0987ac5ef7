"""A program in a process that has seen neither verl nor this package, only libraries that they import.

Those take most of the seconds that `import verl` takes. A server process imports them once, and forks for each program.
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
"""Seconds after which a program hangs, on a machine that is busy with something else."""
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    ["torch", "transformers", "tensordict", "datasets", "peft", "ray.util.state", "fastapi", "aiohttp", "hydra"]
)


def run(code: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `python -c CODE`, or with `module` `python -m CODE`, in this environment or the one given."""
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
    """Begin as `run` does; what the program prints goes to these files."""
    given = dict(os.environ if environment is None else environment)
    process = SERVER.Process(target=_begin, args=(code, arguments, module, folder or Path.cwd(), given, (out, err)))
    process.start()
    return process


def _begin(code, arguments, module, folder, environment, printed) -> None:
    for number, path in enumerate(printed, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = ["-c", *arguments]
    if module:
        runpy.run_module(code, run_name="__main__", alter_sys=True)
    else:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})


def as_from_a_terminal() -> None:
    """Let every signal end the process, also where the tests run under `nohup`; for `preexec_fn`."""
    ending = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
    for number in ending:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ending)
