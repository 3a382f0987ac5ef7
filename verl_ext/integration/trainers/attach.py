"""Attach this package's settings and state to a trainer, and wrap the trainer's methods."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from omegaconf import OmegaConf

from verl_ext.core.chain import Chain
from verl_ext.core.state import RunState
from verl_ext.errors import IntegrationError, listed
from verl_ext.estimators import ESTIMATORS, build
from verl_ext.integration.advantage import dump
from verl_ext.integration.advantage.context import fit
from verl_ext.integration.compat import hooks
from verl_ext.integration.config import checks
from verl_ext.integration.config.read import estimator_name, settings_in_force
from verl_ext.integration.guards import guard, nodes, run_lock, tracker
from verl_ext.integration.trainers import checkpoint
from verl_ext.settings import Settings

logger = logging.getLogger("verl_ext")

ATTRIBUTE = "_verl_ext"


@dataclass
class TrainerRun:
    """The settings, steps and state of one trainer."""

    name: str
    """verl's `algorithm.adv_estimator`."""
    settings: Settings
    state: RunState = field(default_factory=RunState)
    chain: Chain | None = field(init=False, default=None)
    """The estimator's steps, None for an estimator of verl's own."""

    def __post_init__(self) -> None:
        if self.name in ESTIMATORS:
            self.chain = build(self.name, self.settings)

    @property
    def ours(self) -> bool:
        """Whether the run's estimator is one of this package's."""
        return self.chain is not None

    @property
    def watches(self) -> bool:
        """Whether this package takes part: the estimator is ours, or rewards are logged for another one."""
        return self.ours or self.settings.rewards.keys is not None

    @property
    def stateful(self) -> bool:
        """Whether there is something to save with a checkpoint."""
        return self.chain is not None and self.chain.stateful


def attach(trainer: Any, config: Any) -> TrainerRun:
    """Check the configuration and attach a `TrainerRun` to the trainer."""
    checks.check_run(config, unregistered=True)
    settings = settings_in_force(config)
    run = TrainerRun(estimator_name(config), settings)
    if run.watches:
        _require_wrapper(type(trainer), run)
    if run.ours:
        guard.attempt("check_nodes", settings.verl_ext, nodes.check_in_trainer)
    if run.watches and settings.verl_ext.dump_dir is not None:
        dump.prepare(settings.verl_ext.dump_dir)
    setattr(trainer, ATTRIBUTE, run)
    if run.ours:
        from verl.trainer.ppo import core_algos

        replaced = hooks.in_place_of(core_algos.ADV_ESTIMATOR_REGISTRY[run.name])
        logger.info("advantages by verl_ext's %s%s", run.name, replaced)
    return run


def run_of(trainer: Any) -> TrainerRun | None:
    """The run attached to a trainer, or None."""
    return getattr(trainer, ATTRIBUTE, None)


def required_run(trainer: Any) -> TrainerRun | None:
    """The run attached to a trainer; raise if there is none although the estimator is ours."""
    run = run_of(trainer)
    if run is None and estimator_name(trainer.config) in ESTIMATORS:
        raise IntegrationError(
            f"{type(trainer).__qualname__} runs {estimator_name(trainer.config)} unchecked, and the estimator's state "
            f"would not be saved: its configuration is a {type(trainer.config).__qualname__}, expected the DictConfig "
            "that verl's entry points pass; give the trainer OmegaConf.create(...)"
        )
    return run


def is_ours(trainer: Any) -> bool:
    """Whether a trainer's estimator is ours; raise if it is and the run was not checked."""
    run = required_run(trainer)
    return run is not None and run.ours


def _require_wrapper(cls: type, run: TrainerRun) -> None:
    """Raise if a module that defines the trainer calls verl's own `compute_advantage` instead of our wrapper.

    With an estimator of verl's own only the reward metrics are lost, so that is a warning. The default trainer calls
    the function in another module, inside the context that our wrapper of its method has set.
    """
    modules = {base.__module__ for base in cls.__mro__}
    bare = [path for path in hooks.unwrapped("compute_advantage") if path.rpartition(".")[0] in modules]
    if not bare:
        return
    message = (
        f"{cls.__qualname__} computes advantages without verl_ext's wrapper: {listed(bare)} is verl's own function. "
        "This version of verl changed what verl_ext hooks into; run `python -m verl_ext doctor` for details"
    )
    if run.ours:
        raise IntegrationError(f"{message}. The history would not be saved, and the metrics would be lost")
    logger.warning("%s. The rewards in algorithm.rewards.keys are not logged", message)


def wrap_fit(original: Callable[..., Any]) -> Callable[..., Any]:
    """A trainer's `fit(self, ...)`, in a context from which our other wrappers get the trainer.

    A coroutine function stays one: Ray awaits an actor's method only if it is declared with `async def`.
    """
    if inspect.iscoroutinefunction(original):

        async def fit_async(self: Any, *args: Any, **kwargs: Any) -> Any:
            with fit(self, is_ours):
                return await original(self, *args, **kwargs)

        return fit_async

    def fit_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        with fit(self, is_ours):
            return original(self, *args, **kwargs)

    return fit_sync


def wrap_init(original: Callable[..., None]) -> Callable[..., None]:
    """A trainer's `__init__(self, config, ...)`: check and attach before verl builds anything.

    A subclass whose `__init__` has other parameters is attached when it calls the base's.
    """

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        config: Any = kwargs.get("config", args[0] if args else None)
        first = run_of(self) is None and OmegaConf.is_config(config) and "algorithm" in config
        if first:
            attach(self, config)
        original(self, *args, **kwargs)
        if first:
            checks.check_registered(config)

    return __init__


def wrap_save(original: Callable[..., Any]) -> Callable[..., Any]:
    """`_save_checkpoint(self)`: save our state first, so that the current checkpoint always has it."""

    def _save_checkpoint(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = run_of(self)
        if run is not None:
            checkpoint.save_for(self, run.state)
        return original(self, *args, **kwargs)

    return _save_checkpoint


def wrap_load(original: Callable[..., Any]) -> Callable[..., Any]:
    """`_load_checkpoint(self)`: load our state once verl knows the step from which it resumes."""

    def _load_checkpoint(self: Any, *args: Any, **kwargs: Any) -> Any:
        before_load(self)
        result = original(self, *args, **kwargs)
        load_state(self)
        return result

    return _load_checkpoint


def before_load(trainer: Any) -> None:
    """Lock the folders that this package writes to, and repair an empty tracker, before a checkpoint is loaded.

    This runs at loading, not in `__init__`: the fully asynchronous trainer has a rollouter in another process. That is
    a trainer too, and it must not take the lock.
    """
    run = run_of(trainer)
    if run is None or not run.watches:
        return
    own = run.settings.verl_ext
    for folder, use in run_lock.folders(trainer.config, run.settings):
        guard.attempt("lock_folders", own, run_lock.hold, folder, use)
    if run.ours:
        state_file = checkpoint.FILE if run.stateful else None
        guard.attempt("repair_tracker", own, tracker.repair, trainer, state_file=state_file)


def load_state(trainer: Any) -> None:
    """Load the state, then set later dumps aside, for a trainer that knows the step from which it resumes."""
    run = run_of(trainer)
    if run is None:
        return
    if run.chain is not None and run.stateful:
        checkpoint.load_for(trainer, run.state, name=run.name, chain=run.chain)
    folder = run.settings.verl_ext.dump_dir
    if run.watches and folder is not None and not trainer.config.trainer.get("val_only"):
        dump.set_aside(folder, checkpoint.step_of(trainer))


Wrappers = Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]]

WRAPPERS: Wrappers = MappingProxyType(
    {"__init__": wrap_init, "fit": wrap_fit, "_save_checkpoint": wrap_save, "_load_checkpoint": wrap_load}
)
"""Wrappers for the methods of every trainer; the modules `v1` and `legacy` add their own."""


def adopt(cls: type, wrappers: Wrappers) -> None:
    """Wrap the methods of a trainer class now, and those that a subclass overrides when it is defined.

    So a subclass keeps our part even if it does not call `super`; verl's experimental trainers do not, not even in
    `__init__`.
    """
    owner: Any = cls
    previous: Any = vars(cls).get("__init_subclass__")

    def __init_subclass__(sub: Any, **kwargs: Any) -> None:
        (super(owner, sub).__init_subclass__ if previous is None else previous.__get__(None, sub))(**kwargs)
        _wrap_own(sub, wrappers)

    _wrap_own(cls, wrappers)
    if not getattr(getattr(previous, "__func__", None), hooks.MARK, False):
        setattr(__init_subclass__, hooks.MARK, True)
        cls.__init_subclass__ = classmethod(__init_subclass__)  # type: ignore[assignment, arg-type]


def _wrap_own(cls: type, wrappers: Wrappers) -> None:
    for name, make in wrappers.items():
        if name in vars(cls):
            hooks.wrap(cls, name, make)
