"""A faster actor update: `skip_zero_advantage` and `share_prompts`.

`skip_zero_advantage` skips responses that contribute no gradient. `share_prompts` computes each prompt once for all its
responses. The class over the trainers orders the rows and marks the data of a pass. verl's FSDP engine in the workers
reads the marks, because the workers do not know the section `algorithm`. The trainer prepares the engine before the
first pass. If a run uses neither setting, its processes load at most this file.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from verl_ext import hooks
from verl_ext.errors import IntegrationError
from verl_ext.settings import VerlExtSettings

SKIP_MARK = "verl_ext_skip"
"""The key in a pass's data that asks to skip rows whose advantages are all 0."""
SHARE_MARK = "verl_ext_share"
"""The key in a pass's data that asks to compute each prompt once."""
SET_BOTH_FALSE = (
    "Set algorithm.verl_ext.skip_zero_advantage=False and algorithm.verl_ext.share_prompts=False to train without "
    "these settings."
)
PASSES = ("_balance_batch", "_compute_old_log_prob", "_compute_ref_log_prob", "_update_actor")


def over_trainers(module: ModuleType) -> None:
    """Put the class of verl_ext over the trainers of a module."""
    hooks.put_over(module, UpdateTrainer)


class UpdateTrainer:
    """A trainer whose actor update may be faster."""

    SERVES = ("skip_zero_advantage", "share_prompts")
    _verl_ext_verdict: Any = None
    """The checked settings of the run."""
    _verl_ext_marks: tuple[str, ...] = ()
    """The marks of a pass; if empty, every method does what verl's method does."""
    _verl_ext_ready: bool = False
    """Whether the engines of the workers are prepared."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        verl: Any = super()
        judged = self._verl_ext_verdict
        asked = VerlExtSettings() if judged is None else judged.settings.verl_ext
        self._verl_ext_marks = (SKIP_MARK,) * asked.skip_zero_advantage + (SHARE_MARK,) * asked.share_prompts
        if self._verl_ext_marks:
            if problem := make_ready():
                raise IntegrationError(
                    f"The actor update of this verl cannot be made faster ({problem}). {SET_BOTH_FALSE}"
                )
            hooks.require_passed_on(type(self), UpdateTrainer, PASSES)
        verl.__init__(config, *args, **kwargs)

    def _balance_batch(self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Order the rows, so that those of a prompt come together."""
        verl: Any = super()
        balanced = verl._balance_batch(batch, metrics, *args, **kwargs)  # RayPPOTrainer's returns nothing
        if SHARE_MARK in self._verl_ext_marks:
            from verl_ext.update.order import reorder

            reorder(self, batch if balanced is None else balanced, metrics)
        return balanced

    def _compute_old_log_prob(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        verl: Any = super()
        with marked(self, batch):
            return verl._compute_old_log_prob(batch, *args, **kwargs)

    def _compute_ref_log_prob(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        verl: Any = super()
        with marked(self, batch):
            return verl._compute_ref_log_prob(batch, *args, **kwargs)

    def _update_actor(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        verl: Any = super()
        with marked(self, batch):
            return verl._update_actor(batch, *args, **kwargs)


@contextmanager
def marked(trainer: UpdateTrainer, batch: Any) -> Iterator[None]:
    """Mark the batch of a pass of the actor or the reference, of the default trainer or `RayPPOTrainer`."""
    marks = trainer._verl_ext_marks
    if marks and not trainer._verl_ext_ready:
        make_workers_ready(trainer)
        trainer._verl_ext_ready = True
    entries = batch.extra_info if hasattr(batch, "extra_info") else batch.meta_info
    entries.update(dict.fromkeys(marks, True))
    try:
        yield
    finally:  # the critic may read the same entries
        for mark in marks:
            entries.pop(mark, None)


def make_workers_ready(trainer: Any) -> None:
    """Prepare the engine of each worker. Raise if one fails, because the others would wait for it forever."""
    for name in ("actor_rollout_wg", "ref_policy_wg"):
        group = getattr(trainer, name, None)
        problems = [] if group is None else group.execute_all_sync("execute_func_rank_zero", make_ready)
        if broken := {rank: problem for rank, problem in enumerate(problems) if problem}:
            raise IntegrationError(
                f"verl_ext is not active on ranks {[*broken]} of {name} ({', '.join({*broken.values()})}). Install the "
                f"same versions of verl and verl_ext there as in the trainer's process. {SET_BOTH_FALSE}"
            )


def make_ready() -> str:
    """Make verl's engine of this process read the marks; return the problem, or an empty string."""
    try:
        from verl_ext.update import engine

        engine.install()
    except Exception as error:  # noqa: BLE001 - the trainer raises it
        return str(error)
    return ""
