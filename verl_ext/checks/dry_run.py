"""Compute an estimator on synthetic batches before the run, because a list of steps may fail or do nothing."""

import traceback
from collections.abc import Iterator
from contextlib import suppress

import numpy as np

from verl_ext.checks.rewards import needs_nonnegative_sum, steps_before_sum
from verl_ext.core.batch import SCORE
from verl_ext.core.chain import Chain, plain_state
from verl_ext.core.effects import advantages_of, measure, synthetic_batches_for, weights_matter
from verl_ext.core.step_lists import is_custom
from verl_ext.errors import Finding, VerlExtError
from verl_ext.methods import METHODS
from verl_ext.run import Run

NO_EFFECT = Finding(
    "error",
    "algorithm.rewards.weights has no effect on this estimator, because none of its steps applies the weights.",
    "Remove algorithm.rewards.weights. In a custom step, read `batch.weights`.",
)


def dry_run(run: Run) -> Iterator[Finding]:
    """Report an estimator that fails on synthetic batches, or that contains a step or a setting without effect."""
    chain = run.chain
    keys = run.settings.rewards.keys
    if chain is None or (chain.per_reward and keys is None):  # another rule reports missing keys
        return
    if chain.needs_fields:  # fields of verl's batch, which a synthetic batch lacks
        yield from _measured(run, chain)
        return
    has_negative_weight = any(weight < 0 for weight in run.settings.rewards.weights or ())
    if has_negative_weight and needs_nonnegative_sum(chain):  # another rule reports such weights
        return
    batches = synthetic_batches_for(chain, keys or (SCORE,))
    try:
        advantages = advantages_of(chain, batches)
        plain_state(chain(batches[0]).state)
        ignores_weights = not weights_matter(chain, batches)
    except Exception as error:  # noqa: BLE001 - a custom step may raise anything
        yield _failure(run.name, error)
        return
    if not np.isfinite(advantages).all():
        yield Finding(
            "error",
            f"The estimator {run.name} returns advantages that are not finite for synthetic batches.",
            "Return only finite numbers from each step.",
        )
        return
    if ignores_weights:
        yield NO_EFFECT
    yield from _measured(run, chain)


def _measured(run: Run, chain: Chain) -> Iterator[Finding]:
    """Report steps and settings of a list that have no effect."""
    # A built-in method has been measured with its default settings by the tests of this package.
    if not any(name == "compose" or name not in METHODS for name in run.methods):
        return
    rewards = run.settings.rewards
    if rewards.rubrics and _rejects_rubrics(chain):  # another rule reports such a step
        return
    settings = {"per_turn": bool(rewards.per_turn), "rubric": bool(rewards.rubrics)}
    try:
        findings = measure(chain.steps, **settings)
    except Exception as error:  # noqa: BLE001 - a custom step may raise anything
        if not any(map(is_custom, chain.steps)):
            yield _failure(run.name, error)
            return
        # A custom step may be written for the number of rewards of the run.
        with suppress(Exception):
            yield from measure(chain.steps, rewards=len(rewards.keys or (SCORE,)), **settings)
    else:
        yield from findings


def _rejects_rubrics(chain: Chain) -> bool:
    """Return whether a step before the sum does not support rubrics."""
    return any(step.not_with_rubrics for step in steps_before_sum(chain))


def _failure(name: str, error: Exception) -> Finding:
    """Return the finding for an estimator that raises an error on a synthetic batch."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    # An error of verl_ext says itself what to do.
    fix = "" if isinstance(error, VerlExtError) else "Remove the step that raises this error, or correct its code."
    return Finding(
        "error",
        f"The estimator {name} fails in line {place.lineno} of {place.filename} for synthetic batches "
        f"({type(error).__name__}: {error}).",
        fix,
    )
