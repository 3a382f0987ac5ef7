"""One run a folder: a second one would mix its checkpoints and its history, or its dump, with those of the first.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl_ext.errors import ConfigurationError
from verl_ext.settings import Settings

logger = logging.getLogger("verl_ext")

FILE = ".verl_ext.lock"
PATIENCE = 60.0
"""Seconds to wait for the lock: processes of a run whose driver was killed notice it only later."""


@dataclass(frozen=True)
class Use:
    """What a folder is claimed for, in the words of the messages."""

    setting: str
    what: str
    without: str


CHECKPOINTS = Use("trainer.default_local_dir", "checkpoints", "trainer.save_freq=-1 to save none")
DUMP = Use("algorithm.verl_ext.dump_dir", "advantages", "algorithm.verl_ext.dump_dir=null to dump none")

# Folder to open file. Never closed: closing any handle on the file would drop the process's lock.
_held: dict[Path, int] = {}


def folders(config: Any, settings: Settings) -> list[tuple[str, Use]]:
    """What a run with an estimator of ours writes to."""
    found = []
    home = OmegaConf.select(config, "trainer.default_local_dir")
    if home is not None and (OmegaConf.select(config, "trainer.save_freq") or -1) > 0:
        found.append((str(home), CHECKPOINTS))
    if settings.verl_ext.dump_dir is not None:
        found.append((settings.verl_ext.dump_dir, DUMP))
    return found


def hold(folder: str | os.PathLike[str], use: Use = CHECKPOINTS, *, patience: float = PATIENCE) -> None:
    """Claim a folder for this process until it ends; an error that names the owner if there is one."""
    home = Path(folder).resolve()
    if home in _held:
        return
    path = home / FILE
    try:
        home.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigurationError(
            f"{use.what} cannot be written to {use.setting}={folder}: {error}; set another folder, or {use.without}"
        ) from error
    locked = False
    try:
        locked = _lock(handle, fcntl.LOCK_EX, path, folder, use, patience)
    finally:
        if not locked:
            os.close(handle)
    if not locked:
        return
    _held[home] = handle
    owner = f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%F %T %Z')}\n"
    try:
        os.ftruncate(handle, 0)
        os.write(handle, owner.encode())
    except OSError as error:  # a full disk; the lock itself takes no room
        logger.warning(
            "%s is held, but cannot name its owner: %s; make room before this run writes its %s", path, error, use.what
        )


def look(folder: str | os.PathLike[str], use: Use = CHECKPOINTS, *, patience: float = PATIENCE) -> None:
    """The error that `hold` would raise for a folder that is held, before anything is built; claims and makes nothing.

    Of two runs that start together, or where this machine does not see the folder, only `hold` refuses the second.
    """
    home = Path(folder).resolve()
    if home in _held:  # closing the file would let go of it
        return
    path = home / FILE
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:  # nobody has held it, or this process does not see it
        return
    try:
        _lock(handle, fcntl.LOCK_SH, path, folder, use, patience)  # which keeps out no other that looks
    finally:
        os.close(handle)


def _lock(handle: int, kind: int, path: Path, folder: str | os.PathLike[str], use: Use, patience: float) -> bool:
    """Whether the file is locked: False where its file system cannot, an error where another process has it."""
    deadline, waiting = time.monotonic() + patience, False
    while True:
        try:
            fcntl.lockf(handle, kind | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                logger.warning("%s cannot be locked (%s): nothing stops a second run from saving there", path, error)
                return False
        if time.monotonic() > deadline:
            raise ConfigurationError(
                f"another run saves its {use.what} in {use.setting}={folder}: {_owner(handle)}. Both would write into "
                f"the same files. Set another folder, or end that run; if its machine is gone and the lock is still "
                f"there, delete {path}"
            )
        if not waiting:
            waiting = True
            logger.warning("%s is held by %s: waiting up to %.0f s for its end", path, _owner(handle), patience)
        time.sleep(0.2)


def _owner(handle: int) -> str:
    return os.pread(handle, 1000, 0).decode(errors="replace").strip() or "a process that is not named"
