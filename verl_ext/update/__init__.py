"""A shorter update: `skip_zero_advantage` leaves rows out, `share_prompts` computes a prompt once for its answers.

The part over the trainers puts the rows in order and marks the data of a pass. verl's FSDP engine in the workers, which
do not know the section `algorithm`, reads the marks: the trainer makes it ready before the first pass. A process whose
run does not ask for any of this loads this file at most.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from verl_ext import hooks
from verl_ext.errors import IntegrationError
from verl_ext.settings import VerlExtSettings

SKIP_MARK = "verl_ext_skip"
"""The key in a pass's data that asks to leave out rows whose advantages are all 0."""
SHARE_MARK = "verl_ext_share"
"""The key that asks to compute a prompt once."""
PASSES = ("_balance_batch", "_compute_old_log_prob", "_compute_ref_log_prob", "_update_actor")


def over_trainers(module: ModuleType) -> None:
    """Put our class over the trainers of a module."""
    hooks.put_over(module, UpdateTrainer)


class UpdateTrainer:
    """A trainer whose update may be shorter."""

    SERVES = ("skip_zero_advantage", "share_prompts")
    _verl_ext_verdict: Any = None
    """The settings as the checks have judged them."""
    _verl_ext_marks: tuple[str, ...] = ()
    """What the run asks for; empty: every method does what verl's does."""
    _verl_ext_ready: bool = False
    """Whether the workers' engines have been made ready."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        verl: Any = super()
        judged = self._verl_ext_verdict
        asked = VerlExtSettings() if judged is None else judged.settings.verl_ext
        self._verl_ext_marks = (SKIP_MARK,) * asked.skip_zero_advantage + (SHARE_MARK,) * asked.share_prompts
        if self._verl_ext_marks:
            if problem := make_ready():
                raise IntegrationError(f"verl_ext cannot shorten the update of this verl: {problem}")
            hooks.require_passed_on(type(self), UpdateTrainer, PASSES)
        verl.__init__(config, *args, **kwargs)

    def _balance_batch(self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Put the rows of a prompt together."""
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
    finally:  # the entries may go on to the critic
        for mark in marks:
            entries.pop(mark, None)


def make_workers_ready(trainer: Any) -> None:
    """Make the engine of each worker ready; raise if one cannot be: the others would wait for it for ever."""
    for name in ("actor_rollout_wg", "ref_policy_wg"):
        group = getattr(trainer, name, None)
        problems = [] if group is None else group.execute_all_sync("execute_func_rank_zero", make_ready)
        if broken := {rank: problem for rank, problem in enumerate(problems) if problem}:
            raise IntegrationError(
                f"verl_ext is not at work on ranks {[*broken]} of {name} ({', '.join({*broken.values()})}): mend that "
                "there, or set algorithm.verl_ext.skip_zero_advantage and share_prompts to False"
            )


def make_ready() -> str:
    """Make verl's engine of this process read the marks; return what is wrong, or nothing."""
    try:
        from verl_ext.update import engine

        engine.install()
    except Exception as error:  # noqa: BLE001 - the trainer tells it
        return str(error)
    return ""
