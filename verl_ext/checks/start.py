"""Check a run where it starts: in the driver, before Ray starts, and in the trainer, before anything of it is built.

Every process loads this module, so it imports the rules only when it judges by them.
"""

from __future__ import annotations

import functools
import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from verl_ext import hooks

if TYPE_CHECKING:
    from verl_ext.checks.judge import Verdict

EXTERNAL = "ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES"
"""The setting that names modules for the processes that Ray starts."""
ENTRIES = {"verl.utils.config": "validate_config", "verl.trainer.main_ppo": "run_ppo"}
"""What verl's entry points call in the driver before Ray starts.

Those of other trainers import `run_ppo`; some call nothing else. `python -m verl.trainer.main_ppo` runs as `__main__`,
which is not wrapped; that calls `validate_config`.
"""
WORKER = "default_worker.py"
"""The main file of Ray's workers. A worker does not know the main file of the run, which the driver has checked."""
_SUMMARIZED: list[bool] = []
"""Whether this process is a driver that has logged its summary: some drivers call both functions of `ENTRIES`."""


def over_driver(module: ModuleType) -> None:
    """Wrap the module's function of `ENTRIES`."""
    hooks.wrap(module, ENTRIES[module.__name__], wrap_checked)


def over_trainers(module: ModuleType) -> None:
    """Put our class over the trainers of a module, and check those that a registered function makes."""
    hooks.put_over(module, CheckedTrainer)
    if module.__name__ == hooks.TRAINERS[True]:
        hooks.wrap(module, "get_trainer_cls", wrap_get_trainer_cls)


def wrap_checked(original: Callable[..., Any], config: Any, *args: Any, **kwargs: Any) -> Any:
    """`validate_config(config, ...)` or another function of the configuration: our checks come first."""
    from omegaconf import OmegaConf

    from verl_ext.checks.judge import check_run, log_run

    main = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
    caller = Path(sys._getframe(2).f_code.co_filename)  # beyond the wrapper
    # Somebody's main, or a module of his, may register an estimator of his in the trainer's process alone.
    of_verl = Path(sys.modules["verl"].__file__ or "").parent in caller.parents
    if OmegaConf.is_dict(config) and OmegaConf.select(config, EXTERNAL, throw_on_resolution_failure=False):
        of_verl = False
    text = "".join(linecache.getlines(str(main))) if main.name != WORKER else None
    verdict = check_run(config, text, by_name=of_verl)
    if verdict is not None and verdict.ours and caller.match("verl/trainer/main_ppo.py"):
        hooks.require_hooked(hooks.TRAINERS[bool(config.trainer.get("use_v1"))])
    # The log of a driver begins with the summary of the run; a trainer logs it again before its first step.
    if verdict is not None and verdict.ours and main.name != WORKER and not _SUMMARIZED:
        _SUMMARIZED.append(True)
        log_run(verdict)
    return original(config, *args, **kwargs)


def wrap_get_trainer_cls(original: Callable[..., Any], name: str) -> Any:
    """`get_trainer_cls(name)`: return a class as it is, and a function that makes trainers with a check of them.

    A run that uses this package needs a trainer of a class that `get_trainer_cls` returns.
    """
    chosen = original(name)
    if isinstance(chosen, type):
        return chosen

    @functools.wraps(chosen)
    def make(*args: Any, **kwargs: Any) -> Any:
        trainer = chosen(*args, **kwargs)
        if not isinstance(trainer, CheckedTrainer):
            config = kwargs.get("config", args[0] if args else None)
            _refuse_if_used(name, chosen, trainer, config)
        return trainer

    return make


def _refuse_if_used(name: str, factory: Any, trainer: Any, config: Any) -> None:
    """Raise for a run that uses this package."""
    from verl_ext.errors import IntegrationError
    from verl_ext.run_config import RunConfig

    run = RunConfig.of(config)
    if run is not None and run.ours:
        made_by = getattr(factory, "__qualname__", type(factory).__qualname__)
        raise IntegrationError(
            f"trainer.v1.trainer_mode={name} is registered as the function {made_by}, and the "
            f"{type(trainer).__qualname__} that it returns does not have the methods of verl_ext. Register the class "
            "itself, or return an object of the class that verl.trainer.ppo.v1.get_trainer_cls returns."
        )


class CheckedTrainer:
    """A trainer whose configuration is judged first; the parts of other rooms read the verdict."""

    _verl_ext_verdict: Verdict | None = None

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        from verl_ext.checks.judge import check_run, log_run

        verl: Any = super()
        self._verl_ext_verdict = verdict = check_run(config)
        if verdict is not None:
            if verdict.ours and not hasattr(self, "_verl_ext"):
                raise hooks.lacking("it does not compute advantages or log rewards")
            log_run(verdict)
        verl.__init__(config, *args, **kwargs)
