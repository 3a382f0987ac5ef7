"""Summarize what verl_ext does in a run: for `check`, and for the log of a training."""

from __future__ import annotations

from collections.abc import Iterator

from verl_ext import __version__
from verl_ext.checks.rewards import accuracy_of
from verl_ext.names import owner
from verl_ext.registry import ADDED_ESTIMATORS
from verl_ext.run import Run
from verl_ext.run_config import ACTOR
from verl_ext.settings import ACCURACY


def describe(run: Run) -> Iterator[str]:
    """Yield a line for each part of the run that verl_ext determines."""
    import verl

    rewards, chain = run.settings.rewards, run.chain
    steps = () if chain is None else chain.steps
    yield f"version    verl_ext {__version__}, verl {verl.__version__}"
    other = owner(run.name) if run.name in ADDED_ESTIMATORS else None
    yield f"estimator  {run.name}" + (f" (registered by {other}, so verl_ext does not compute it)" if other else "")
    if steps:
        names = (f"{step.name} over {step.over}" if hasattr(step, "over") else step.name for step in steps)
        yield f"steps      {', '.join(names)}"
    conditions = {
        key: f" where {needed.reward} is at least {needed.at_least:g}"
        for key, needed in (rewards.conditions or {}).items()
    }
    keys = rewards.keys or ()
    weights = dict(zip(keys, rewards.weights or [1.0] * len(keys), strict=True))
    lists = dict.fromkeys(rewards.per_turn or (), " per turn") | dict.fromkeys(rewards.rubrics or (), " (rubric)")
    named = [f"{weights[key]:g} {key}{lists.get(key, '')}{conditions.get(key, '')}" for key in keys]
    only = "" if run.computes_advantages else f" (logged only, because verl's {run.name} uses the score)"
    if named or not run.select("algorithm.rewards.keys"):  # else an error says why they cannot be read
        yield f"rewards    {', '.join(named) + only if named else 'the score'}"
    if chain is not None and chain.needs_accuracy:
        bound = rewards.accuracy_threshold
        key = accuracy_of(run.settings)
        other = "" if key in (rewards.accuracy_key, ACCURACY) else ", or `acc` if the reward function returns it"
        yield f"accuracy   {key}{other}{'' if bound is None else f' above {bound:g}'}"
    loss = [f"loss_agg_mode={run.select(f'{ACTOR}.loss_agg_mode')}"]
    factor = run.select(f"{ACTOR}.loss_scale_factor")
    loss += [] if factor is None else [f"loss_scale_factor={factor}"]
    yield f"loss       {run.select(f'{ACTOR}.policy_loss.loss_mode')}, {', '.join(loss)}"
    if run.filter_metric and rewards.accuracy_between:
        yield "filter     groups whose mean accuracy is outside {:g} to {:g} are dropped".format(
            *rewards.accuracy_between
        )
