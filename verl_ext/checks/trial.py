"""Run an estimator on a made-up batch before the run: a step of the user's may fail."""

import traceback
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from verl_ext.core.batch import Batch
from verl_ext.core.chain import Chain, plain_state
from verl_ext.core.groups import Array
from verl_ext.core.steps import DropConflicts, WeightByVariation
from verl_ext.errors import Finding
from verl_ext.registry import BUILT_IN, build
from verl_ext.run_config import RunConfig
from verl_ext.settings import Settings

NO_EFFECT = (
    "algorithm.rewards.weights has no effect on this estimator: remove it; an estimator of your own sums with "
    "WeightedSum(weights)"
)


def trial(run: RunConfig) -> Iterator[Finding]:
    """A list of steps, or an estimator of another package, that fails on a made-up batch."""
    written = any(name == "compose" or name not in BUILT_IN for name in run.used)
    if written and run.chain is not None and not (run.chain.per_reward and run.settings.rewards.keys is None):
        yield from map(Finding, try_out(run.name, run.settings))


def try_out(name: str, settings: Settings) -> Iterator[str]:
    """Run an estimator on a made-up batch, because a step of the user may fail; yield what is wrong.

    If weights are set, it runs with two other sets of them, whose results must differ.
    """
    keys, weights = settings.rewards.keys or ("score",), settings.rewards.weights
    tilted = (1.0, *(0.1,) * (len(keys) - 1))
    others = (tilted, tilted[::-1]) if len(keys) > 1 else ((1.0,), weights or (1.0,))
    try:
        chain = build(name, settings)
        if chain.needs_fields:  # nobody can make them up
            if weights and not any(hasattr(step, "weights") for step in chain.steps):
                yield NO_EFFECT
            return
        advantages = _trial(chain, keys)
        tried = [replace(settings.rewards, weights=tilt) for tilt in others if weights]
        results = [_trial(build(name, replace(settings, rewards=other)), keys) for other in tried]
    except Exception as error:  # noqa: BLE001 - user code may raise anything
        place = traceback.extract_tb(error.__traceback__)[-1]
        yield (
            f"the estimator, tried on a made-up batch of 12 responses, raises {type(error).__name__}: {error} "
            f"({place.filename}, line {place.lineno})"
        )
        return
    if not np.isfinite(advantages).all():
        yield "the estimator, tried on a made-up batch of 12 responses, returns advantages that are not finite"
    matters = len(keys) > 1 or min(weights or (0.0,)) < 0  # one weight above 0 may cancel
    if matters and results and np.allclose(results[0], results[1], rtol=1e-9, atol=1e-12):
        yield NO_EFFECT


def _trial(chain: Chain, keys: tuple[str, ...]) -> Array:
    """Advantages on a made-up batch, without the steps that may leave nothing of it.

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
