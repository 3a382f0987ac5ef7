"""One run a checkpoint folder: a second one would mix its checkpoints, and its history, with those of the first.

The lock is the operating system's and ends with the process, however it ends. It is POSIX's (`lockf`): NFS passes it
to other nodes, and a forked data loader does not inherit it.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import time
from pathlib import Path

from verl_ext.errors import ConfigurationError

logger = logging.getLogger("verl_ext")

FILE = ".verl_ext.lock"
PATIENCE = 60.0
"""Seconds to wait for the lock: processes of a run whose driver was killed notice it only later."""

# Folder to open file. Never closed: closing any handle on the file would drop the process's lock.
_held: dict[Path, int] = {}


def hold(folder: str | os.PathLike[str], *, patience: float = PATIENCE) -> None:
    """Claim a checkpoint folder for this process until it ends; an error that names the owner if there is one."""
    home = Path(folder).resolve()
    if home in _held:
        return
    path = home / FILE
    try:
        home.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigurationError(
            f"checkpoints cannot be written to trainer.default_local_dir={folder}: {error}; set another folder, or "
            "trainer.save_freq=-1 to save none"
        ) from error
    deadline, waiting = time.monotonic() + patience, False
    while True:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                os.close(handle)
                logger.warning("%s cannot be locked (%s): nothing stops a second run from saving there", path, error)
                return
        if time.monotonic() > deadline:
            owner = _owner(handle)
            os.close(handle)
            raise ConfigurationError(
                f"another run saves its checkpoints in trainer.default_local_dir={folder}: {owner}. Both "
                "would write into the same files. Set another folder, or end that run; if its machine is gone and the "
                f"lock is still there, delete {path}"
            )
        if not waiting:
            waiting = True
            logger.warning("%s is held by %s: waiting up to %.0f s for its end", path, _owner(handle), patience)
        time.sleep(0.2)
    os.ftruncate(handle, 0)
    os.write(handle, f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%F %T %Z')}\n".encode())
    _held[home] = handle


def _owner(handle: int) -> str:
    return os.pread(handle, 1000, 0).decode(errors="replace").strip() or "a process that is not named"
