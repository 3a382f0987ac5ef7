"""Check a run in the driver, before Ray starts. The trainers check it again: see `verl_ext.trainers.mixin`.

Every process loads this module, so it imports the rules only when it judges by them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from verl_ext import hooks
from verl_ext.errors import Finding

EXTERNAL_MODULES = "ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES"
"""The setting that names modules for the processes that Ray starts."""
ENTRIES = {"verl.utils.config": "validate_config", "verl.trainer.main_ppo": "run_ppo"}
"""The functions that verl's main programs call in the driver before Ray starts.

The main programs of other trainers import `run_ppo`, and some call nothing else. `python -m verl.trainer.main_ppo` runs
as `__main__`, whose `run_ppo` is not wrapped. It calls `validate_config`.
"""
MAIN_OF_VERL = "verl.trainer.main_ppo"
WORKER = "default_worker.py"
"""The main file of Ray's workers. A main program of verl may call `validate_config` again in a worker."""
_summarized: list[bool] = []
"""Whether this process is a driver that has logged its summary. Some drivers call both functions of `ENTRIES`."""


def install(module: ModuleType) -> None:
    """Wrap the module's function of `ENTRIES`."""
    hooks.wrap(module, ENTRIES[module.__name__], wrap_checked)


def wrap_checked(original: Callable[..., Any], config: Any, *args: Any, **kwargs: Any) -> Any:
    """`validate_config(config, ...)` or another function of the configuration: the checks of verl_ext come first."""
    if Path(getattr(sys.modules["__main__"], "__file__", None) or "").name != WORKER:
        check_in_driver(config)
    return original(config, *args, **kwargs)


def check_in_driver(config: Any) -> None:
    """Raise if the run is rejected. Log a summary of a run that uses verl_ext."""
    from omegaconf import OmegaConf

    from verl_ext.checks.judge import check_run, log_run
    from verl_ext.checks.verl_settings import old_sections
    from verl_ext.run_config import uses_default_trainer, uses_verl_ext

    main = main_program()
    has_external_modules = OmegaConf.is_dict(config) and OmegaConf.select(
        config, EXTERNAL_MODULES, throw_on_resolution_failure=False
    )
    # Another main program than verl's, or a module that it imports, may register an estimator of its own in the
    # trainer's process alone.
    name_is_certain = main.startswith("verl.") and not has_external_modules
    old_settings: tuple[Finding, ...] = ()
    if uses_verl_ext(config):
        old_settings = tuple(old_sections(config, "error" if main == MAIN_OF_VERL else "warning"))
    run = check_run(config, old_settings, name_is_certain=name_is_certain)
    if run is None:
        return
    if run.uses_verl_ext and main == MAIN_OF_VERL:
        hooks.require_hooked(hooks.TRAINERS[uses_default_trainer(config)])
    # The log of a driver begins with the summary of the run; a trainer logs it again before its first step.
    if not _summarized and (run.uses_verl_ext or name_is_certain):
        _summarized.append(True)
        log_run(run)


def main_program() -> str:
    """Return the module that this process runs, as in `python -m MODULE`; empty for a file or another program."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return "" if spec is None else spec.name
