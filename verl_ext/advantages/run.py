"""One `Run` per trainer: its settings, its estimator, its state. One ContextVar names the run that is computing."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from verl_ext.advantages.dump_folder import DumpFolder
from verl_ext.advantages.table import Needs, Table
from verl_ext.core.batch import SCORE
from verl_ext.core.chain import Chain, State
from verl_ext.core.metrics import Metrics
from verl_ext.errors import IntegrationError
from verl_ext.hooks import member
from verl_ext.run_config import require_unchanged
from verl_ext.settings import Settings

logger = logging.getLogger("verl_ext")


@dataclass(eq=False)
class Run:
    """The settings, the steps and the state of one trainer, and what its current batch needs."""

    name: str
    """verl's `algorithm.adv_estimator`."""
    settings: Settings
    chain: Chain | None
    """The estimator's steps; None for an estimator of verl's own, whose rewards are only logged."""
    trainer: Any = None
    state: State | None = None
    """The estimator's state before the next batch; None before the first one."""
    accuracy: dict[str, Any] | None = None
    """Key and threshold of the accuracy that the state was computed from."""
    warned: set[str] = field(default_factory=set)
    """Keys of the warnings that were already logged."""
    start: int = 0
    """The step after which this start or resume begins."""
    computed_at: int = 0
    """The step of the last batch."""
    called: bool = False
    """Whether the estimator computed advantages since the trainer was last asked."""
    unchanged: str = ""
    """The section `algorithm` of the trainer's configuration, as text, when its settings were last compared."""
    table: Table | None = None
    """The rewards of the batch that is being computed."""
    metrics: Metrics = field(default_factory=dict)
    """Metrics of the last batch, until the trainer logs them."""
    logged: Metrics = field(default_factory=dict)
    """The metrics that the trainer logged last."""
    logged_at: int | None = None
    """The step at which it logged them; None before the first batch."""
    dumps: DumpFolder | None = None
    """The folder for the dumps of this start or resume; None before the first dump."""
    zero_batches: int = 0
    """The number of consecutive batches, up to the last one, in which every advantage was 0."""

    @cached_property
    def log(self) -> str:
        """Which rewards have metrics: `all`, `keys` or `none`."""
        return self.settings.rewards.log or ("keys" if self.chain is None else "all")

    @cached_property
    def needs(self) -> Needs:
        """What the run reads of each batch."""
        rewards, chain = self.settings.rewards, self.chain or Chain(())
        keys, per_turn = rewards.keys or (), bool(rewards.per_turn)
        log_all = self.log == "all"
        is_named = rewards.accuracy_key is not None
        named_accuracy = (rewards.accuracy_key,) if chain.needs_accuracy and rewards.accuracy_key is not None else ()
        # verl passes the trainer's score to an estimator of this package. With one of verl's own only metrics read it:
        # the curve of the score, and the shares of the rewards in the advantages of grpo.
        shows_shares = self.name == "grpo" and keys != ()
        score_for_metrics = self.chain is None and (log_all or shows_shares)
        return Needs(
            rewards,
            names=(*keys, *named_accuracy, *chain.needs_fields),
            score=self.settings.kl_in_reward or SCORE in keys or score_for_metrics,
            turns=per_turn,
            longest=self.trainer.config.data.max_response_length if per_turn and self.trainer is not None else 0,
            returned=log_all or (chain.needs_accuracy and not is_named),
        )

    @property
    def step(self) -> int:
        """The step that verl logs for this update; 0 without a trainer."""
        return int(getattr(self.trainer, "global_steps", 0))

    @property
    def update(self) -> int:
        """The number of the update within its step; verl's asynchronous trainers make several."""
        return 0 if self.trainer is None else int(member(self.trainer, "local_trigger_step"))

    @contextmanager
    def computing(self, table: Table) -> Iterator[None]:
        """Make this the current run, with the table of its batch: the estimators read both from `CURRENT`."""
        self.require_unchanged()
        self.called = False
        token = CURRENT.set(self)
        self.table = table
        try:
            yield
        finally:
            self.table = None
            CURRENT.reset(token)

    def require_unchanged(self) -> None:
        """Raise if the run's settings in the trainer's configuration have changed since the run read them."""
        if self.trainer is None:
            return
        config = self.trainer.config
        text = repr(config.algorithm)  # without interpolations it says all, and much faster than reading the entries
        if text != self.unchanged or "${" in text:
            require_unchanged(config, self.name, self.settings, computes=self.chain is not None)
            self.unchanged = text

    def require_called(self) -> None:
        """Raise if the trainer computed the last advantages without the run's estimator."""
        if self.chain is not None and not self.called:
            raise IntegrationError(
                f"{type(self.trainer).__qualname__} did not call the estimator {self.name!r}. Its advantages were "
                "computed by a function that was registered later, or without verl's get_adv_estimator_fn. Use verl's "
                "compute_advantage in the trainer."
            )

    def add_metrics(self, metrics: dict[str, Any]) -> None:
        """Add the metrics of the last batch to those of verl, which keep their values.

        Raise if the estimator was not called since the last time: each batch has its own metrics.
        """
        self.require_called()
        self.called = False
        self.logged, self.metrics = self.metrics, {}
        self.logged_at = self.step
        metrics |= self.logged | metrics

    def add_metrics_of_step(self, metrics: dict[str, Any]) -> None:
        """Do the same for a trainer that may ask several times in a step: without a new batch, add the same again.

        At a new step the estimator must have been called, as in `add_metrics`.
        """
        has_new_batch = self.called or bool(self.metrics)
        if has_new_batch or self.logged_at != self.step:
            self.add_metrics(metrics)
        else:
            metrics |= self.logged | metrics

    def warn_once(self, kind: str, text: str) -> None:
        """Log a warning once per run."""
        if kind not in self.warned:
            self.warned.add(kind)
            logger.warning("%s", text)


CURRENT: ContextVar[Run | None] = ContextVar("verl_ext_run", default=None)
"""The run whose batch is being computed."""
