"""Try an estimator on a synthetic batch before the run, because a custom step may fail."""

import traceback
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from verl_ext.core.batch import Batch
from verl_ext.core.chain import Chain, plain_state
from verl_ext.core.groups import Array
from verl_ext.core.steps import DropConflicts, WeightByVariation
from verl_ext.errors import Finding, VerlExtError
from verl_ext.registry import BUILT_IN, build
from verl_ext.run_config import RunConfig
from verl_ext.settings import Settings

NO_EFFECT = Finding(
    "error",
    "algorithm.rewards.weights has no effect on this estimator, because none of its steps applies the weights.",
    "Remove algorithm.rewards.weights. In a custom estimator, use WeightedSum(weights) as the sum.",
)
BATCH = "a synthetic batch of 12 responses"


def trial(run: RunConfig) -> Iterator[Finding]:
    """Report a list of steps, or an estimator of another package, that fails on a synthetic batch."""
    written = any(name == "compose" or name not in BUILT_IN for name in run.used)
    if written and run.chain is not None and not (run.chain.per_reward and run.settings.rewards.keys is None):
        yield from try_out(run.name, run.settings)


def try_out(name: str, settings: Settings) -> Iterator[Finding]:
    """Run an estimator on a synthetic batch, because a custom step may fail; yield the problems.

    If weights are set, the estimator also runs with two other sets of weights, whose results must differ.
    """
    keys, weights = settings.rewards.keys or ("score",), settings.rewards.weights
    tilted = (1.0, *(0.1,) * (len(keys) - 1))
    others = (tilted, tilted[::-1]) if len(keys) > 1 else ((1.0,), weights or (1.0,))
    try:
        chain = build(name, settings)
        if chain.needs_fields:  # fields of verl's batch, which a synthetic batch lacks
            if weights and not any(hasattr(step, "weights") for step in chain.steps):
                yield NO_EFFECT
            return
        advantages = _trial(chain, keys)
        tried = [replace(settings.rewards, weights=tilt) for tilt in others if weights]
        results = [_trial(build(name, replace(settings, rewards=other)), keys) for other in tried]
    except Exception as error:  # noqa: BLE001 - user code may raise anything
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"line {place.lineno} of {place.filename}"
        # An error of verl_ext says itself what to do.
        fix = "" if isinstance(error, VerlExtError) else "Remove the step that raises this error, or correct its code."
        text = f"The estimator {name} fails in {where} for {BATCH} ({type(error).__name__}: {error})."
        yield Finding("error", text, fix)
        return
    if not np.isfinite(advantages).all():
        yield Finding(
            "error",
            f"The estimator {name} returns advantages that are not finite for {BATCH}.",
            "Return only finite numbers from each step.",
        )
    matters = len(keys) > 1 or min(weights or (0.0,)) < 0  # one weight above 0 may cancel
    if matters and results and np.allclose(results[0], results[1], rtol=1e-9, atol=1e-12):
        yield NO_EFFECT


def _trial(chain: Chain, keys: tuple[str, ...]) -> Array:
    """Return the advantages of a synthetic batch, without the steps that may drop all of its responses.

    Raise if the chain fails or its state cannot be saved.
    """
    chain = Chain(tuple(step for step in chain.steps if not isinstance(step, DropConflicts)))
    draw = np.random.default_rng(0)
    rewards = draw.random((12, len(keys)))  # where rewards are 0 or 1, two sets of weights may give the same
    rewards[8:] = 0.3
    weighing = (step for step in chain.steps if isinstance(step, WeightByVariation))
    rewards += max((value for step in weighing for value in step.min_values), default=0.0)
    batch = Batch.of(
        rewards,
        list("aaaabbbbcccc"),
        keys=keys,
        lengths=draw.integers(1, 9, 12).astype(np.float64),
        accuracy=draw.integers(0, 2, 12).astype(np.float64) if chain.needs_accuracy else None,
    )
    result = chain(batch)
    plain_state(result.state)
    return result.advantages
