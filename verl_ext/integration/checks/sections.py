"""The reward sections that verl once had at the top of a configuration: `main_ppo` composes them, and reads none."""

from __future__ import annotations

import json
import linecache
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from verl_ext.integration.checks.presets import leaves
from verl_ext.integration.checks.read import resolved, select

OLD = ("reward_model", "custom_reward_function", "sandbox_fusion")
READS = re.compile(rf"migrate_legacy_reward_impl|config(\.|\.get\(.|\[.)({'|'.join(OLD)})\b")
"""What the file of a main has that migrates these sections, or reads them."""


def dropped(config: Any, mains: Iterable[Path]) -> Iterator[str]:
    """Yield each setting in them that has no effect, and the line that has, unless one of these files reads them."""
    old = {name: config.get(name) for name in OLD}
    given = {path: value for path, value in leaves(_plain(old)) if value is not None}
    if not given or "async_training" in config or any(READS.search(_text(file)) for file in mains):
        return
    import verl
    from verl.experimental.reward_loop import migrate_legacy_reward_impl

    known = dict(leaves(_plain(config.reward), "reward"))
    # Each setting has its own path as value, so that it is known again in its new place.
    probe = OmegaConf.load(Path(verl.__file__).with_name("trainer") / "config/legacy_reward_impl.yaml")
    probe.reward = _plain(config.reward)
    for path in given:
        OmegaConf.update(probe, path, path, force_add=True)
    moved = {f"{value}": path for path, value in leaves(_plain(migrate_legacy_reward_impl(probe).reward), "reward")}
    for path, written in given.items():
        value = written if (read := resolved(select(config, path))) is None else read
        text = value if isinstance(value, str) else json.dumps(value)
        lost = f"verl.trainer.main_ppo does not read {path}={text}"
        if (new := moved.get(path)) is None:
            yield f"{lost}, which has no place any more: remove it"
        elif resolved(select(config, new)) != value:
            yield f"{lost}: write {shlex.quote(('' if new in known else '+') + f'{new}={text}')}"


def _plain(section: Any) -> Any:
    return OmegaConf.to_container(OmegaConf.create(section))


def _text(file: Path) -> str:
    return "".join(linecache.getlines(str(file)))  # nothing for a file that is no text


def mains_of_file() -> Iterator[Path]:
    """The mains beside the folder of the primary file that name it, such as those of verl's recipes."""
    hydra = HydraConfig.get()
    for source in hydra.runtime.config_sources:
        if source.provider == "main" and source.schema == "file":
            for file in Path(source.path).parent.glob("*.py"):
                if f'"{hydra.job.config_name}"' in _text(file):
                    yield file
