"""One run of verl: its configuration, what the checks found about it, and the state of its estimator.

The checks make a `Run` of verl's configuration. A trainer keeps the `Run`, and each advantage step advances its state.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from verl_ext.core.chain import Chain, State
from verl_ext.core.metrics import Metrics
from verl_ext.errors import Finding, IntegrationError
from verl_ext.hooks import member
from verl_ext.registry import method_and_base
from verl_ext.run_config import FILTER, computed_by_verl_ext, require_same_settings, select, uses_verl_ext
from verl_ext.settings import Settings

logger = logging.getLogger("verl_ext")


@dataclass(eq=False)
class Run:
    """A run, from its check to the end of its training.

    There are two kinds of fields. `checks.judge` sets the fields up to `findings`, which then stay the same. The other
    fields are the progress of a training, which `trainers`, `advantages` and `update` change.
    """

    name: str
    """The estimator: verl's `algorithm.adv_estimator`."""
    settings: Settings = field(default_factory=Settings)
    """The settings of verl_ext, or the defaults if they cannot be read."""
    chain: Chain | None = None
    """The steps of the estimator. None if verl_ext does not compute the advantages, or if the steps cannot be built."""
    config: Any = None
    """verl's whole configuration."""
    findings: tuple[Finding, ...] = ()
    """What the rules report about the configuration."""

    trainer: Any = None
    """The trainer, or None in the driver and in `check`. `trainers.mixin` sets it."""
    after_step: int = 0
    """The step after which this start or resume begins. `advantages.checkpoint` sets it when a run resumes."""

    # `advantages.estimator` changes the next four fields in every batch. `advantages.checkpoint` restores the first
    # three when a run resumes.
    state: State | None = None
    """The state of the estimator before the next batch, or None before the first batch."""
    accuracy: dict[str, Any] | None = None
    """Key and threshold of the accuracy from which the state was computed."""
    computed_at: int = 0
    """The step of the last batch."""
    estimator_called: bool = False
    """Whether verl has called the estimator since the metrics of the last batch were logged."""

    metrics: Metrics = field(default_factory=dict)
    """Metrics that the trainer has not logged yet. The modules of `advantages` add metrics."""
    logged: Metrics = field(default_factory=dict)
    """The metrics that the trainer logged last, for trainers that ask for them several times in a step."""
    logged_at: int | None = None
    """The step of `logged`, or None before the first batch."""
    compared_algorithm: str = ""
    """The section `algorithm` of the configuration, as text, when it was last compared with the settings."""
    warned: set[str] = field(default_factory=set)
    """Keys of the warnings that were already logged."""
    zero_batches: int = 0
    """The number of consecutive batches, up to the last one, in which every advantage was 0. `advantages.log` counts
    them."""
    dumps: Any = None
    """The `advantages.dump.DumpFolder` of this start or resume, or None before its first dump."""
    workers_prepared: bool = False
    """Whether the workers are prepared for the faster actor update."""

    @cached_property
    def uses_verl_ext(self) -> bool:
        """Whether the run uses verl_ext: see `run_config.entries_in_use`. If not, it trains as if without verl_ext."""
        return uses_verl_ext(self.config)

    @cached_property
    def computes_advantages(self) -> bool:
        """Whether verl_ext computes the estimator of this name.

        If it does, but the steps cannot be built, `chain` is None nevertheless.
        """
        return computed_by_verl_ext(self.name)

    @property
    def methods(self) -> tuple[str, ...]:
        """The method that verl_ext computes and, if it has one, the method on which it is based."""
        return method_and_base(self.name, self.settings) if self.computes_advantages else ()

    @property
    def errors(self) -> list[Finding]:
        """The findings for which the run is rejected."""
        return [finding for finding in self.findings if finding.severity == "error"]

    @property
    def filter_metric(self) -> str | None:
        """The metric by which verl filters groups, or None if verl does not filter."""
        return self.select(f"{FILTER}.metric") if self.select(f"{FILTER}.enable") else None

    @property
    def only_validates(self) -> bool:
        """Whether the run validates once without training. verl reads `val_only` only if `val_before_train` is set."""
        return bool(self.select("trainer.val_only") and self.select("trainer.val_before_train"))

    @property
    def logged_rewards(self) -> str:
        """Which rewards have metrics: `all`, `keys` or `none`."""
        default = "keys" if self.chain is None else "all"
        return self.settings.rewards.log or default

    @property
    def step(self) -> int:
        """The step that verl logs for this update, or 0 without a trainer."""
        return int(getattr(self.trainer, "global_steps", 0))

    @property
    def update(self) -> int:
        """The number of the update within its step. verl's asynchronous trainers make several updates per step."""
        return 0 if self.trainer is None else int(member(self.trainer, "local_trigger_step"))

    def select(self, path: str) -> Any:
        """Return an entry of the configuration, or None."""
        return select(self.config, path)

    def warn_once(self, kind: str, text: str) -> None:
        """Log a warning once per run."""
        if kind not in self.warned:
            self.warned.add(kind)
            logger.warning("%s", text)

    def require_unchanged(self) -> None:
        """Raise if the settings in the trainer's configuration have changed since the run read them."""
        if self.trainer is None:
            return
        config = self.trainer.config
        # Writing the section as text is much faster than reading its entries. Without interpolations it says all.
        text = repr(config.algorithm)
        if text != self.compared_algorithm or "${" in text:
            require_same_settings(config, self.name, self.settings, computes=self.chain is not None)
            self.compared_algorithm = text

    def require_estimator_called(self) -> None:
        """Raise if the trainer computed the last advantages without the estimator of the run."""
        if self.chain is not None and not self.estimator_called:
            raise IntegrationError(
                f"{type(self.trainer).__qualname__} did not call the estimator {self.name!r}. Its advantages were "
                "computed by a function that was registered later, or without verl's get_adv_estimator_fn. Use verl's "
                "compute_advantage in the trainer."
            )

    def add_metrics(self, metrics: dict[str, Any]) -> None:
        """Add the metrics of the last batch to verl's metrics, which keep their values.

        Raise if the estimator was not called since the last batch.
        """
        self.require_estimator_called()
        self.estimator_called = False
        self.logged, self.metrics = self.metrics, {}
        self.logged_at = self.step
        metrics |= self.logged | metrics

    def add_metrics_of_step(self, metrics: dict[str, Any]) -> None:
        """Add the metrics of the last batch, and the same metrics again until the next batch.

        Some trainers ask several times in a step. Raise if the estimator was not called since the last step.
        """
        if self.metrics or self.logged_at != self.step:
            self.add_metrics(metrics)
        else:
            metrics |= self.logged | metrics
