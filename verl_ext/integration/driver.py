"""Check the configuration in the driver, before Ray starts.

Every process loads this module, so it imports the checks only when it runs them.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from verl_ext.integration import hooks

TRAINERS = {True: "verl.trainer.ppo.v1.trainer_base", False: "verl.trainer.ppo.ray_trainer"}
"""The module of the trainer that verl's main starts, by `trainer.use_v1`."""
EXTERNAL = "ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES"
"""The setting that names modules for the processes that Ray starts."""
ENTRIES = {"verl.utils.config": "validate_config", "verl.trainer.main_ppo": "run_ppo"}
"""What verl's entry points call in the driver before Ray starts.

Those of other trainers import `run_ppo`; some call nothing else. `python -m verl.trainer.main_ppo` runs as `__main__`,
which is not wrapped; that calls `validate_config`.
"""
WORKER = "default_worker.py"
"""The file that begins Ray's workers: what began the run is known in the driver, which was there first."""


def install(module: ModuleType) -> None:
    """Wrap the module's function of `ENTRIES`."""
    hooks.wrap(module, ENTRIES[module.__name__], wrap_checked)


def wrap_checked(original: Callable[..., Any], config: Any, *args: Any, **kwargs: Any) -> Any:
    """`validate_config(config, ...)` or another function of the configuration: our checks come first."""
    from omegaconf import OmegaConf

    from verl_ext.integration.checks import check_run

    main = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
    caller = Path(sys._getframe(2).f_code.co_filename)  # beyond the wrapper
    # Somebody's main, or a module of his, may register an estimator of his in the trainer's process alone.
    of_verl = Path(sys.modules["verl"].__file__ or "").parent in caller.parents
    if OmegaConf.is_dict(config) and OmegaConf.select(config, EXTERNAL, throw_on_resolution_failure=False):
        of_verl = False
    text = "".join(linecache.getlines(str(main))) if main.name != WORKER else None
    verdict = check_run(config, text, by_name=of_verl)
    if verdict is not None and verdict.ours and caller.match("verl/trainer/main_ppo.py"):
        hooks.require_hooked(TRAINERS[bool(config.trainer.get("use_v1"))])
    return original(config, *args, **kwargs)
