"""Check a run in the driver, before Ray starts. The trainers check it again: see `verl_ext.trainers.mixin`.

Every process loads this module, so it imports the rules only when it judges by them.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from verl_ext import hooks

EXTERNAL = "ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES"
"""The setting that names modules for the processes that Ray starts."""
ENTRIES = {"verl.utils.config": "validate_config", "verl.trainer.main_ppo": "run_ppo"}
"""The functions that verl's entry points call in the driver before Ray starts.

The entry points of other trainers import `run_ppo`, and some call nothing else. `python -m verl.trainer.main_ppo` runs
as `__main__`, whose `run_ppo` is not wrapped. It calls `validate_config`.
"""
WORKER = "default_worker.py"
"""The main file of Ray's workers. A worker does not know the main file of the run, which the driver has checked."""
_SUMMARIZED: list[bool] = []
"""Whether this process is a driver that has logged its summary. Some drivers call both functions of `ENTRIES`."""


def over_driver(module: ModuleType) -> None:
    """Wrap the module's function of `ENTRIES`."""
    hooks.wrap(module, ENTRIES[module.__name__], wrap_checked)


def wrap_checked(original: Callable[..., Any], config: Any, *args: Any, **kwargs: Any) -> Any:
    """`validate_config(config, ...)` or another function of the configuration: our checks come first."""
    from omegaconf import OmegaConf

    from verl_ext.checks.judge import check_run, log_run

    main = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
    caller = Path(sys._getframe(2).f_code.co_filename)  # beyond the wrapper
    # Another main program than verl's, or a module that it imports, may register an estimator of its own in the
    # trainer's process alone.
    called_by_verl = Path(sys.modules["verl"].__file__ or "").parent in caller.parents
    if OmegaConf.is_dict(config) and OmegaConf.select(config, EXTERNAL, throw_on_resolution_failure=False):
        called_by_verl = False
    main_source = "".join(linecache.getlines(str(main))) if main.name != WORKER else None
    run = check_run(config, main_source, by_name=called_by_verl)
    if run is not None and run.uses_verl_ext:
        if caller.match("verl/trainer/main_ppo.py"):
            hooks.require_hooked(hooks.TRAINERS[bool(config.trainer.get("use_v1"))])
        # The log of a driver begins with the summary of the run; a trainer logs it again before its first step.
        if main.name != WORKER and not _SUMMARIZED:
            _SUMMARIZED.append(True)
            log_run(run)
    return original(config, *args, **kwargs)
