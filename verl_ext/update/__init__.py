"""A shorter update: `skip_zero_advantage` leaves rows out, `share_prompts` computes a prompt once for its answers.

The part over the trainers puts the rows in order and marks the data of a pass. The engine in the workers, which do not
know the section `algorithm`, reads the marks. So every process loads this file, and the others where a run asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from verl_ext import hooks
from verl_ext.errors import IntegrationError

SKIP_MARK = "verl_ext_skip"
"""The key in a pass's data that asks to leave out rows whose advantages are all 0."""
SHARE_MARK = "verl_ext_share"
"""The key that asks to compute a prompt once."""
PASSES = ("_balance_batch", "_compute_old_log_prob", "_compute_ref_log_prob", "_update_actor")


def over_trainers(module: ModuleType) -> None:
    """Put our class over the trainers of a module."""
    hooks.put_over(module, UpdateTrainer)


def over_engine(transformer_impl: ModuleType) -> None:
    """Wrap a pass of the FSDP engine; `engine.install` wraps the rest of it where a run has marks."""
    hooks.wrap(hooks.member(transformer_impl, "FSDPEngine"), "forward_backward_batch", wrap_pass)


def wrap_pass(
    original: Callable[..., Any], self: Any, data: Any, loss_function: Any, forward_only: bool = False
) -> Any:
    """`forward_backward_batch(self, data, ...)`: a pass with marks is this package's."""
    if not (entry(data, SKIP_MARK, False) or entry(data, SHARE_MARK, False)):
        return original(self, data, loss_function, forward_only)
    from verl_ext.update import engine

    engine.install()
    return engine.marked_pass(original, self, data, loss_function, forward_only)


def entry(data: Any, name: str, default: Any = None) -> Any:
    """Return an entry of a batch that has no row for each response."""
    from verl.utils import tensordict_utils as tu

    return tu.get_non_tensor_data(data=data, key=name, default=default)


class UpdateTrainer:
    """A trainer whose update may be shorter."""

    SERVES = ("skip_zero_advantage", "share_prompts")
    _verl_ext_marks: tuple[str, ...] = ()
    """What the run asks for; empty: every method does what verl's does."""
    _verl_ext_asked_ranks: bool = False

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        verl: Any = super()
        self._verl_ext_marks = marks_of(config)
        if self._verl_ext_marks:
            hooks.require_hooked(hooks.ENGINE)
            if (state := state_of_engine()) != "holds":
                raise IntegrationError(f"verl_ext cannot shorten the update of this verl: {state}")
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
    if marks and not trainer._verl_ext_asked_ranks:
        require_ranks(trainer)
        trainer._verl_ext_asked_ranks = True
    entries = batch.extra_info if hasattr(batch, "extra_info") else batch.meta_info
    entries.update(dict.fromkeys(marks, True))
    try:
        yield
    finally:  # the entries may go on to the critic
        for mark in marks:
            entries.pop(mark, None)


def marks_of(config: Any) -> tuple[str, ...]:
    """Return the marks that a run asks for."""
    from verl_ext.run_config import RunConfig, read_settings

    run = RunConfig.of(config)
    if run is None or not run.ours:
        return ()
    asked = read_settings(config).verl_ext
    return (SKIP_MARK,) * asked.skip_zero_advantage + (SHARE_MARK,) * asked.share_prompts


def require_ranks(trainer: Any) -> None:
    """Raise if a worker runs verl's engine without this package: the others would wait for it for ever."""
    for name in ("actor_rollout_wg", "ref_policy_wg"):
        group = getattr(trainer, name, None)
        states = [] if group is None else group.execute_all_sync("execute_func_rank_zero", state_of_engine)
        if broken := {rank: state for rank, state in enumerate(states) if state != "holds"}:
            raise IntegrationError(
                f"verl_ext is not at work on ranks {[*broken]} of {name} ({', '.join({*broken.values()})}): install it "
                "there (doctor says whether it holds), or set algorithm.verl_ext.skip_zero_advantage and share_prompts "
                "to False"
            )


def state_of_engine() -> str:
    """Make verl's engine of this process ready for marks; return `holds`, else what is wrong."""
    hook = next((hook for hook in hooks.HOOKS if hook.module == hooks.ENGINE), None)
    if hook is None or hook.state != "holds":
        return "not installed" if hook is None else str(hook.error or hook.state)
    try:
        from verl_ext.update import engine

        engine.install()
    except Exception as error:  # noqa: BLE001 - it is told in the trainer
        return str(error)
    return hook.state
