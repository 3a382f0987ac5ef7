"""What verl_ext adds to every trainer of verl: a run, and its state in checkpoints.

For the default trainer, our class inherits from the class that verl chose. `RayPPOTrainer` is replaced in its module,
so that subclasses in other packages inherit from our class.
"""

from dataclasses import fields
from pathlib import Path
from typing import Any

from verl_ext import hooks
from verl_ext.advantages import checkpoint
from verl_ext.advantages.run import Run
from verl_ext.errors import listed
from verl_ext.run_config import RunConfig


class WithEstimators:
    """A trainer with this package's part; `verl` is the trainer without it."""

    SERVES = ("dump_dir",)
    """The settings of `algorithm.verl_ext` that this part obeys. Other rooms put classes with more over a trainer."""
    _verl_ext_verdict: RunConfig | None = None
    """The settings as the checks have judged them."""
    _verl_ext: Run | None = None
    """None for a run that uses nothing of this package.

    Every method then does what verl's does. A save also removes the state of an earlier run that it overwrites.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        verl: Any = super()
        self._verl_ext = start(self, config)
        verl.__init__(config, *args, **kwargs)

    def _save_checkpoint(self) -> Any:
        """Save our state first, so that the current checkpoint always has it; without one remove an earlier run's."""
        verl: Any = super()
        if self._verl_ext is None or self._verl_ext.chain is None:
            checkpoint.remove_earlier_state(self)
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


def start(trainer: WithEstimators, config: Any) -> Run | None:
    """Return the run of a trainer; None if it uses nothing of this package. Raise if it lacks a part."""
    verdict, unjudged = trainer._verl_ext_verdict, RunConfig.of(config)
    if verdict is None and unjudged is not None and unjudged.ours:
        raise hooks.lacking("its configuration was not checked")
    if verdict is None or not verdict.ours:
        return None
    settings, chain = verdict.settings, verdict.chain
    given = settings.verl_ext
    served = {name for base in type(trainer).__mro__ for name in vars(base).get("SERVES", ())}
    asked = {item.name for item in fields(given) if getattr(given, item.name) != item.default}
    if asked - served:
        raise hooks.lacking(f"it does not implement the settings {listed(asked - served)} of algorithm.verl_ext")
    if chain is not None:
        needed = ("_save_checkpoint", "_load_checkpoint") if chain.stateful else ()
        hooks.require_passed_on(type(trainer), WithEstimators, needed)
    if given.dump_dir is not None:
        Path(given.dump_dir).mkdir(parents=True, exist_ok=True)  # raise now, not at the first step
    return Run(verdict.name, settings, chain, trainer)
