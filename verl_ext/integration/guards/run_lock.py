"""Lock a run's output folders: a second run would mix its checkpoints, history or dump with those of the first.

The operating system keeps the lock (`filelock`) and frees it when the process ends, also when it is killed.
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
from verl_ext.estimators import ESTIMATORS
from verl_ext.integration.config.read import estimator_name
from verl_ext.settings import Settings

logger = logging.getLogger("verl_ext")

FILE = ".verl_ext.lock"
OWNER = ".verl_ext.owner"
PATIENCE = 60.0
"""Seconds to wait for the lock: after a driver is killed, its other processes end a little later."""


@dataclass(frozen=True)
class Use:
    """What a folder is used for, as messages say it: the setting, what is written, and how to write nothing."""

    setting: str
    what: str
    without: str


CHECKPOINTS = Use("trainer.default_local_dir", "checkpoints", "trainer.save_freq=-1 to save none")
DUMP = Use("algorithm.verl_ext.dump_dir", "advantages", "algorithm.verl_ext.dump_dir=null to dump none")

_held: dict[Path, FileLock] = {}


def folders(config: Any, settings: Settings) -> list[tuple[str, Use]]:
    """The folders to lock: the dump, and the checkpoints if the estimator is ours."""
    used = []
    ours = estimator_name(config) in ESTIMATORS
    home = OmegaConf.select(config, "trainer.default_local_dir")
    if ours and home is not None and (OmegaConf.select(config, "trainer.save_freq") or -1) > 0:
        used.append((str(home), CHECKPOINTS))
    if settings.verl_ext.dump_dir is not None and (ours or settings.rewards.keys is not None):
        used.append((settings.verl_ext.dump_dir, DUMP))
    return used


def hold(folder: str | os.PathLike[str], use: Use = CHECKPOINTS, *, patience: float = PATIENCE) -> None:
    """Lock a folder until this process ends; raise an error that names the owner if another run holds it."""
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
    except OSError as error:  # for example a full disk; the lock itself needs no space
        logger.warning("%s is locked, but the owner's name cannot be written there: %s; free disk space", home, error)


def require_free(folder: str | os.PathLike[str], use: Use = CHECKPOINTS, *, patience: float = PATIENCE) -> None:
    """Raise as `hold` would, but lock nothing: for a check before anything is built.

    If two runs start together, or this machine does not see the folder, only `hold` stops the second run.
    """
    home = Path(folder).resolve()
    if home not in _held and (home / FILE).exists():
        _locked(home, use, patience).release()


def _locked(home: Path, use: Use, patience: float) -> FileLock:
    lock = FileLock(home / FILE)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        logger.warning("%s is locked by %s: waiting up to %.0f s for it to end", home / FILE, _owner(home), patience)
        try:
            lock.acquire(timeout=patience)
        except Timeout as error:
            raise ConfigurationError(
                f"another run saves its {use.what} in {use.setting}={home}: {_owner(home)}. Both would write the same "
                f"files. Set another folder, or end that run. If its machine is gone and the lock is still held, "
                f"delete {home / FILE}"
            ) from error
    return lock


def _owner(home: Path) -> str:
    try:
        return (home / OWNER).read_text().strip() or "an unknown process"
    except OSError:
        return "an unknown process"
