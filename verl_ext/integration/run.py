"""One `Run` per trainer: its settings, its estimator, its state. One ContextVar says whose batch is being computed."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_ext.core.metrics import Metrics
from verl_ext.core.state import RunState
from verl_ext.errors import IntegrationError, listed
from verl_ext.integration import hooks
from verl_ext.registry import INSTALLED
from verl_ext.settings import ACCURACY, Settings

if TYPE_CHECKING:
    from verl_ext.core.chain import Chain
    from verl_ext.integration.components import Components, Needs

logger = logging.getLogger("verl_ext")

ATTRIBUTE = "_verl_ext"
"""The attribute of a trainer that holds its `Run`."""


@dataclass(eq=False)
class Run:
    """The settings, the steps and the state of one trainer, and what its current batch needs."""

    name: str = ""
    """verl's `algorithm.adv_estimator`; empty outside a trainer."""
    settings: Settings = field(default_factory=Settings)
    chain: Chain | None = None
    """The estimator's steps; None for an estimator of verl's own, and outside a trainer."""
    state: RunState = field(default_factory=RunState)
    trainer: Any = None
    accuracy: dict[str, Any] | None = None
    """Key and threshold of the accuracy that the state was computed from."""
    start: int = 0
    """The step after which this start or resume begins."""
    computed_at: int = 0
    """The step of the last batch."""
    called: bool = False
    """Whether the estimator computed advantages since the trainer was last asked."""
    rewards: Components | None = None
    """The rewards of the batch that is being computed."""
    metrics: Metrics = field(default_factory=dict)
    """Metrics of the last batch, until the trainer logs them."""
    ranks_checked: bool = False
    """Whether each rank of the actor has shown that it leaves rows out if it is asked to (see `skip`)."""
    dumps: Path | None = None
    """The folder for the dumps of this start or resume."""

    @property
    def ours(self) -> bool:
        """Whether the estimator is one of this package or of another package that registered it here."""
        return self.chain is not None

    @property
    def watches(self) -> bool:
        """Whether this package takes part: the estimator is ours, or one of verl's has metrics from here."""
        own = self.settings.rewards
        return self.ours or own.keys is not None or own.accuracy_between is not None or self.log == "all"

    @property
    def log(self) -> str:
        """Which rewards have metrics: `all`, `keys` or `none`."""
        return self.settings.rewards.log or ("keys" if self.chain is None else "all")

    @property
    def needs(self) -> Needs:
        """What the run reads of each batch."""
        from verl_ext.integration.components import SCORE, Needs

        own, chain = self.settings.rewards, self.chain
        accuracy = (own.accuracy_key or ACCURACY,) if chain is not None and chain.needs_accuracy else ()
        fields = () if chain is None else chain.needs_fields
        dumped = self.settings.verl_ext.dump_dir is not None
        return Needs(
            names=(*(own.keys or ()), *accuracy, *fields),
            score=self.settings.kl_in_reward or SCORE in (own.keys or ()),
            response_lengths=dumped or (chain is not None and chain.needs_response_lengths),
            everything=self.log == "all",
        )

    @property
    def saved_step(self) -> int:
        """The number in the name of a checkpoint: the step, or the version of the weights when fully asynchronous."""
        version = getattr(self.trainer, "current_param_version", None)
        return int(self.trainer.global_steps if version is None else version)

    @property
    def step(self) -> int:
        """The step that verl logs for this update and that a resumed run repeats; 0 outside a trainer.

        `global_steps` of the fully asynchronous trainer counts updates, and one too many after each resumption.
        """
        version = getattr(self.trainer, "current_param_version", None)
        return int(getattr(self.trainer, "global_steps", 0)) if version is None else int(version) + 1

    @property
    def update(self) -> int:
        """The number of the update within its step; verl's asynchronous trainers make several."""
        return int(getattr(self.trainer, "local_trigger_step", 0))

    @contextmanager
    def computing(self, rewards: Components) -> Iterator[None]:
        """Make this run the current one while a batch with these rewards is computed."""
        token = _current.set(self)
        self.rewards = rewards
        try:
            yield
        finally:
            self.rewards = None
            _current.reset(token)

    def add_metrics(self, metrics: dict[str, Any]) -> None:
        """Add the metrics of the last batch to those of verl, which keep their values, and forget them."""
        metrics |= self.metrics | metrics
        self.metrics = {}

    def require_called(self) -> None:
        """Raise if the trainer computed the advantages of a step without the run's estimator."""
        if self.ours and not self.called:
            raise IntegrationError(
                f"{type(self.trainer).__qualname__} did not call the estimator {self.name!r}: its advantages are "
                "computed without verl's registry of estimators, or outside verl_ext's wrapper"
            )
        self.called = False

    def warn_once(self, kind: str, text: str) -> None:
        """Log a warning once per run."""
        if kind not in self.state.warned:
            self.state.warned.add(kind)
            logger.warning("%s", text)


_outside = Run()
"""The run of all calls from outside a trainer."""
_current: ContextVar[Run] = ContextVar("verl_ext_run", default=_outside)
"""The run whose batch is being computed, or that of `use_run_state`."""
_made: Callable[[], Run | None] = lambda: None  # noqa: E731 - a weak reference to the run of the last trainer


def current() -> Run:
    """Return the run whose batch is being computed, else that of the process's trainer: for metrics."""
    run = _current.get()
    return (_made() or run) if run is _outside else run


def computing(name: str) -> Run:
    """Return the run that an estimator computes for; without a trainer it is one per process.

    Unlike `current` it never takes the trainer's run: a call beside our wrapper, whose history would not be saved and
    whose metrics would be lost, is an error.
    """
    run, trainers = _current.get(), _made()
    if run is _outside and trainers is not None and trainers.ours and trainers.name == name:
        raise IntegrationError(
            f"{type(trainers.trainer).__qualname__} called the estimator {name!r} outside verl_ext's wrapper, which "
            "saves its history and logs its metrics: call compute_advantage of verl.trainer.ppo.ray_trainer, or use "
            "verl_ext.use_run_state(RunState())"
        )
    return run


def run_state() -> RunState:
    """Return the current state: that of the trainer inside a trainer, otherwise one per process.

    >>> run_state().reset()                          # start afresh
    >>> saved = run_state().state_dict()             # plain data
    >>> run_state().load_state_dict(saved)
    """
    return _current.get().state


@contextmanager
def use_run_state(state: RunState) -> Iterator[RunState]:
    """Use another state inside the block.

    >>> with use_run_state(RunState()) as fresh:
    ...     run_state() is fresh
    True
    """
    token = _current.set(Run(state=state))
    try:
        yield state
    finally:
        _current.reset(token)


def start(trainer: Any, config: Any) -> Run:
    """Check the configuration, then attach a `Run` to the trainer."""
    from verl_ext.integration.checks import check_run, log_run

    global _made
    verdict = check_run(config)
    log_run(verdict)
    settings = verdict.settings
    run = Run(verdict.name, settings, verdict.chain, trainer=trainer)
    if run.watches:
        _require_wrapper(type(trainer), run)
        if settings.verl_ext.dump_dir is not None:
            Path(settings.verl_ext.dump_dir).mkdir(parents=True, exist_ok=True)  # raise now, not at the first step
    setattr(trainer, ATTRIBUTE, run)
    _made = weakref.ref(run)
    return run


def run_of(trainer: Any) -> Run | None:
    """Return the run of a trainer; raise if it has none although its estimator is ours."""
    run: Run | None = getattr(trainer, ATTRIBUTE, None)
    if run is None:
        algorithm = getattr(trainer.config, "algorithm", None)
        name = getattr(algorithm, "adv_estimator", None)
        if str(getattr(name, "value", name)) in INSTALLED:
            raise IntegrationError(
                f"{type(trainer).__qualname__} runs {name} unchecked, and its state would not be saved: its "
                f"configuration is a {type(trainer.config).__qualname__}, expected the DictConfig that verl's entry "
                "points pass"
            )
    return run


def wrap_init(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    """A trainer's `__init__(self, config, ...)`: check and attach before verl builds anything.

    A subclass whose `__init__` has other parameters is attached when it calls the base's.
    """
    from omegaconf import OmegaConf

    config: Any = kwargs.get("config", args[0] if args else None)
    if not hasattr(self, ATTRIBUTE) and OmegaConf.is_config(config) and "algorithm" in config:
        start(self, config)
    original(self, *args, **kwargs)


def in_place_of(function: Any) -> str:
    """Return which function of verl an estimator replaced, for a message; empty if none."""
    replaced = getattr(function, "replaced", None)
    return "" if replaced is None else f", in place of {replaced.__module__}.{replaced.__qualname__}"


def _require_wrapper(cls: type, run: Run) -> None:
    """Raise if a module that defines the trainer calls verl's own `compute_advantage` instead of our wrapper.

    With an estimator of verl's own only the reward metrics are lost, so that is a warning.
    """
    modules = {base.__module__ for base in cls.__mro__}
    bare = [path for path in hooks.unwrapped("compute_advantage") if path.rpartition(".")[0] in modules]
    if not bare:
        return
    message = (
        f"{cls.__qualname__} computes advantages without verl_ext's wrapper: {listed(bare)} is verl's own function; "
        f"{hooks.versions()}"
    )
    if run.ours:
        raise IntegrationError(f"{message}. The history would not be saved, and the metrics would be lost")
    logger.warning("%s. The rewards in algorithm.rewards.keys are not logged", message)
