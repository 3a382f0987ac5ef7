"""Check that the checkpoint from which a run resumes was written with the run's number of ranks.

Follows `FSDPCheckpointManager` of verl 0.9.0 and 0.9.1. Each rank reads its own files
`{model,optim,extra_state}_world_size_<ranks>_rank_<rank>.pt`. With another number of ranks that raises a
FileNotFoundError, but only after all models are loaded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl_ext.integration.checkpoint import DATA, STEP_FOLDER, TRACKER
from verl_ext.integration.config.read import select

_SHARD = re.compile(r"(model|optim|extra_state)_world_size_(\d+)_rank_\d+\.pt")
# The name of each content in `checkpoint.load_contents`.
_CONTENTS = {"model": "model", "optim": "optimizer", "extra_state": "extra"}


def wrong_ranks(config: Any) -> Iterator[str]:
    """One message for each part of the checkpoint that was written with another number of ranks.

    Nothing if the checkpoint cannot be found or read here: verl or the trainer reports that later.
    """
    nodes, per_node = select(config, "trainer.nnodes"), select(config, "trainer.n_gpus_per_node")
    folder = _checkpoint(config)
    if folder is None or type(nodes) is not int or type(per_node) is not int:
        return
    ranks = nodes * per_node
    parts = {"actor": "actor_rollout_ref.actor", **({"critic": "critic"} if _has_critic(config) else {})}
    for part, section in parts.items():
        shards = _shards(folder / part, select(config, f"{section}.checkpoint.load_contents"))
        wrong = [sizes for sizes in shards.values() if ranks not in sizes]
        if wrong:
            written = " or ".join(map(str, sorted(set().union(*wrong))))
            yield (
                f"{folder / part} was written with world size {written}, and this run has world size {ranks}: "
                f"trainer.nnodes={nodes} times trainer.n_gpus_per_node={per_node}. verl resumes only with the same "
                f"world size. Set trainer.nnodes and trainer.n_gpus_per_node so that their product is {written}, or "
                "start from scratch with trainer.resume_mode=disable or another trainer.default_local_dir"
            )


def _checkpoint(config: Any) -> Path | None:
    """The folder of the checkpoint from which the run would resume, or None."""
    mode = select(config, "trainer.resume_mode")
    if mode == "resume_path":
        path = select(config, "trainer.resume_from_path")
        return Path(path) if isinstance(path, str) else None
    home = select(config, "trainer.default_local_dir")
    if mode != "auto" or not isinstance(home, str):
        return None
    try:
        text = (Path(home) / TRACKER).read_bytes()
        return Path(home) / f"{STEP_FOLDER}{int(text) if text.strip() else _highest(Path(home))}"
    except (OSError, ValueError):  # no checkpoint, or a broken tracker, which is reported when the run loads it
        return None


def _highest(home: Path) -> int:
    """The highest step with a whole checkpoint: the trainer resumes there, or refuses, if the tracker is empty."""
    files = (file for file in home.glob(f"{STEP_FOLDER}*/{DATA}") if file.stat().st_size)
    numbers = (file.parent.name.removeprefix(STEP_FOLDER) for file in files)
    return max(int(number) for number in numbers if number.isdecimal())


def _has_critic(config: Any) -> bool:
    """The same as verl's `need_critic`."""
    enabled = select(config, "critic.enable")
    return bool(enabled) if enabled is not None else select(config, "algorithm.adv_estimator") == "gae"


def _shards(folder: Path, contents: Any) -> dict[str, set[int]]:
    """By kind of file that the run would read: the numbers of ranks with which such files were written."""
    sizes: dict[str, set[int]] = {}
    try:
        names = os.listdir(folder)
    except (OSError, ValueError):  # it does not exist, or we may not read it
        return sizes
    for name in names:
        match = _SHARD.fullmatch(name)
        if match and (not OmegaConf.is_list(contents) or _CONTENTS[match[1]] in contents):
            sizes.setdefault(match[1], set()).add(int(match[2]))
    return sizes
