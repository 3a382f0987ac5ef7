"""A faster actor update: `skip_zero_advantage` and `share_prompts`.

`skip_zero_advantage` skips responses that contribute no gradient. `share_prompts` computes each prompt once for all its
responses. A pass is one call of the workers, for the old log-probabilities, for those of the reference, or for the
actor update. The trainer orders the rows and marks the data of each pass. verl's FSDP engine in the workers reads the
marks, because the workers do not know the section `algorithm`. The trainer prepares the engine before the first pass.
If a run uses neither setting, its workers load nothing of this folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from verl_ext.errors import IntegrationError
from verl_ext.hooks import member

if TYPE_CHECKING:
    from verl_ext.run import Run

SKIP_MARK = "verl_ext_skip"
"""The key in a pass's data that asks to skip rows whose advantages are all 0."""
SHARE_MARK = "verl_ext_share"
"""The key in a pass's data that asks to compute each prompt once."""
SET_BOTH_FALSE = (
    "Set algorithm.verl_ext.skip_zero_advantage=False and algorithm.verl_ext.share_prompts=False to train without "
    "these settings."
)
METHODS = ("_balance_batch", "_compute_old_log_prob", "_compute_ref_log_prob", "_update_actor")
"""The methods of a trainer that order the rows of a batch, or start a pass."""


def marks(run: Run | None) -> list[str]:
    """Return the marks of the passes of a run: an empty list if the run uses neither setting."""
    found = []
    if run is not None and run.settings.verl_ext.skip_zero_advantage:
        found.append(SKIP_MARK)
    if run is not None and run.settings.verl_ext.share_prompts:
        found.append(SHARE_MARK)
    return found


def require_engine() -> None:
    """Raise unless the engine of the installed verl can read the marks."""
    problem = install_engine()
    if problem:
        raise IntegrationError(f"The actor update of this verl cannot be made faster ({problem}). {SET_BOTH_FALSE}")


def order_rows(run: Run | None, batch: Any, metrics: dict[str, Any]) -> None:
    """Order the rows of a batch so that the rows of a prompt come together, if the run shares prompts."""
    if run is not None and run.settings.verl_ext.share_prompts:
        from verl_ext.update.order import reorder

        reorder(run.trainer, batch, metrics)


@contextmanager
def marked(run: Run | None, batch: Any) -> Iterator[None]:
    """Mark the batch of a pass of the actor or the reference. Before the first pass, prepare the workers."""
    marks_of_run = marks(run)
    if run is None or not marks_of_run:
        yield
        return
    if not run.workers_prepared:
        install_engine_on_workers(run.trainer)
        run.workers_prepared = True
    # The batch of the default trainer has `extra_info`, that of `RayPPOTrainer` has `meta_info`.
    entries = batch.extra_info if hasattr(batch, "extra_info") else batch.meta_info
    entries.update(dict.fromkeys(marks_of_run, True))
    try:
        yield
    finally:  # the critic may read the same entries
        for mark in marks_of_run:
            entries.pop(mark, None)


def install_engine_on_workers(trainer: Any) -> None:
    """Prepare the engine of each worker. Raise if one fails, because the others would wait for it forever."""
    groups = {"actor_rollout_wg": member(trainer, "actor_rollout_wg")}
    if getattr(trainer, "ref_policy_wg", None) is not None:
        groups["ref_policy_wg"] = trainer.ref_policy_wg
    for name, group in groups.items():
        # Called on every rank, although verl names the method `execute_func_rank_zero`.
        problems = group.execute_all_sync("execute_func_rank_zero", install_engine)
        problem_of_rank = {rank: problem for rank, problem in enumerate(problems) if problem}
        if problem_of_rank:
            distinct_problems = ", ".join(set(problem_of_rank.values()))
            raise IntegrationError(
                f"verl_ext is not active on ranks {list(problem_of_rank)} of {name} ({distinct_problems}). Install the "
                f"same versions of verl and verl_ext there as in the trainer's process. {SET_BOTH_FALSE}"
            )


def install_engine() -> str:
    """Make verl's engine of this process read the marks; return the problem, or an empty string."""
    try:
        from verl_ext.update import engine

        engine.install()
    except Exception as error:  # noqa: BLE001 - the trainer raises it
        return str(error)
    return ""
