"""What every trainer of verl gets: a check of its configuration before anything is built, and its state in checkpoints.

verl's default trainers get it over their class, `RayPPOTrainer` under its subclasses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl_ext.integration import checkpoint, hooks
from verl_ext.integration.run import Run
from verl_ext.integration.update import mark


class WithEstimators:
    """A trainer with this package's part; `verl` is the trainer without it."""

    _verl_ext: Run | None = None
    """None for a run that uses nothing of this package: every method then does what verl's does."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        verl: Any = super()
        self._verl_ext = start(self, config)
        verl.__init__(config, *args, **kwargs)

    def _save_checkpoint(self) -> Any:
        """Save our state first, so that the current checkpoint always has it."""
        verl: Any = super()
        if self._verl_ext is None or self._verl_ext.chain is None:
            return verl._save_checkpoint()
        with checkpoint.saving(self._verl_ext):
            return verl._save_checkpoint()

    def _load_checkpoint(self) -> Any:
        """Load our state once verl knows the step from which it resumes."""
        verl: Any = super()
        if self._verl_ext is None:
            return verl._load_checkpoint()
        checkpoint.check_tracker(self._verl_ext)
        result = verl._load_checkpoint()
        checkpoint.load(self._verl_ext)
        return result

    def _compute_old_log_prob(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        verl: Any = super()
        with mark.marked(self._verl_ext, batch):
            return verl._compute_old_log_prob(batch, *args, **kwargs)

    def _compute_ref_log_prob(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        verl: Any = super()
        with mark.marked(self._verl_ext, batch):
            return verl._compute_ref_log_prob(batch, *args, **kwargs)

    def _update_actor(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        verl: Any = super()
        with mark.marked(self._verl_ext, batch):
            return verl._update_actor(batch, *args, **kwargs)


def start(trainer: Any, config: Any) -> Run | None:
    """Check the configuration of a trainer and return its run; None if it uses nothing of this package."""
    from verl_ext.integration.checks import check_run, log_run

    verdict = check_run(config)
    if verdict is None:
        return None
    log_run(verdict)
    if not verdict.ours:
        return None
    settings, chain = verdict.settings, verdict.chain
    if chain is not None:
        needed = ("_save_checkpoint", "_load_checkpoint") if chain.stateful else ()
        hooks.require_passed_on(type(trainer), WithEstimators, needed)
    passes = ("_balance_batch", "_compute_old_log_prob", "_compute_ref_log_prob", "_update_actor")
    if settings.verl_ext.skip_zero_advantage or settings.verl_ext.share_prompts:
        hooks.require(mark.ENGINE)
        hooks.require_passed_on(type(trainer), WithEstimators, passes)
    if settings.verl_ext.dump_dir is not None:
        Path(settings.verl_ext.dump_dir).mkdir(parents=True, exist_ok=True)  # raise now, not at the first step
    return Run(verdict.name, settings, chain, trainer)
