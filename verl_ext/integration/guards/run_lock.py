"""One run per folder: a second one would mix its checkpoints and history, or its dump, with those of the first.

The lock is the operating system's (`filelock`) and ends with the process, however that ends.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from omegaconf import OmegaConf

from verl_ext.errors import ConfigurationError
from verl_ext.settings import Settings

logger = logging.getLogger("verl_ext")

FILE = ".verl_ext.lock"
OWNER = ".verl_ext.owner"
PATIENCE = 60.0
"""Seconds to wait for the lock: the processes of a run whose driver was killed notice it only later."""


@dataclass(frozen=True)
class Use:
    """What a folder is claimed for, in the words of the messages."""

    setting: str
    what: str
    without: str


CHECKPOINTS = Use("trainer.default_local_dir", "checkpoints", "trainer.save_freq=-1 to save none")
DUMP = Use("algorithm.verl_ext.dump_dir", "advantages", "algorithm.verl_ext.dump_dir=null to dump none")

_held: dict[Path, FileLock] = {}


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
    """Claim a folder for this process until it ends; raise with the owner's name if another run has it."""
    home = Path(folder).resolve()
    if home in _held:
        return
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"{use.what} cannot be written to {use.setting}={folder}: {error}; set another folder, or {use.without}"
        ) from error
    _held[home] = _locked(home, use, patience)
    owner = f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%F %T %Z')}"
    try:
        (home / OWNER).write_text(owner + "\n")
    except OSError as error:  # a full disk; the lock itself takes no room
        logger.warning("%s is locked, but its owner cannot be written there: %s; make room", home, error)


def look(folder: str | os.PathLike[str], use: Use = CHECKPOINTS, *, patience: float = PATIENCE) -> None:
    """Raise as `hold` would, before anything is built, and claim nothing.

    Of two runs that start together, or where this machine does not see the folder, only `hold` refuses the second.
    """
    home = Path(folder).resolve()
    if home not in _held and (home / FILE).exists():
        _locked(home, use, patience).release()


def _locked(home: Path, use: Use, patience: float) -> FileLock:
    lock = FileLock(home / FILE)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        logger.warning("%s is held by %s: waiting up to %.0f s for its end", home / FILE, _owner(home), patience)
        try:
            lock.acquire(timeout=patience)
        except Timeout as error:
            raise ConfigurationError(
                f"another run saves its {use.what} in {use.setting}={home}: {_owner(home)}. Both would write into the "
                f"same files. Set another folder, or end that run; if its machine is gone and the lock is still there, "
                f"delete {home / FILE}"
            ) from error
    return lock


def _owner(home: Path) -> str:
    try:
        return (home / OWNER).read_text().strip() or "a process that is not named"
    except OSError:
        return "a process that is not named"
