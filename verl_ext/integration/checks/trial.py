"""Run an estimator on a made-up batch before the run: a step of the user's may fail."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from verl_ext.core.batch import Batch
from verl_ext.core.chain import Chain, plain_state
from verl_ext.core.groups import Array
from verl_ext.core.steps import DropConflicts, WeighByVariation
from verl_ext.errors import Complaint, listed
from verl_ext.estimators import build
from verl_ext.integration.checks.read import RunConfig
from verl_ext.registry import BUILT_IN
from verl_ext.settings import Settings


def trial(run: RunConfig) -> Iterator[Complaint]:
    """A step of the user, or an estimator of another package, that fails on a made-up batch."""
    written = run.name == "compose" or run.name not in BUILT_IN
    if written and run.chain is not None and not (run.chain.per_reward and run.settings.rewards.keys is None):
        text = try_out(partial(build, run.name), run.settings)
        if text is not None:
            yield Complaint(text)


def try_out(build: Callable[[Settings], Chain], settings: Settings) -> str | None:
    """Run an estimator on a made-up batch, because a step of the user may fail; return what is wrong, or None.

    If weights are set, it runs with two other sets of them, whose results must differ. A step that centres must leave
    exactly 0 in a group without variance.
    """
    keys, weights = settings.rewards.keys or ("score",), settings.rewards.weights
    tilted = (1.0, *(0.1,) * (len(keys) - 1))
    try:
        chain = build(settings)
        if chain.needs_fields:  # nobody can make them up
            return None
        advantages, rounding = _trial(chain, keys)
        others = [replace(settings.rewards, weights=tilt) for tilt in (tilted, tilted[::-1]) if weights]
        results = [_trial(build(replace(settings, rewards=other)), keys)[0] for other in others]
    except Exception as error:  # noqa: BLE001 - user code may raise anything
        place = traceback.extract_tb(error.__traceback__)[-1]
        return (
            f"the estimator, tried on a made-up batch of 12 responses, raises {type(error).__name__}: {error} "
            f"({place.filename}, line {place.lineno})"
        )
    if not np.isfinite(advantages).all():
        return "the estimator, tried on a made-up batch of 12 responses, returns advantages that are not finite"
    if rounding:
        return (
            f"{listed(rounding)} with `centres = True` must give exactly 0 in a group without variance: return "
            "centred * batch.groups.broadcast(batch.groups.varies(values))"
        )
    if len(keys) > 1 and results and np.allclose(results[0], results[1], rtol=1e-9, atol=1e-12):
        return "algorithm.rewards.weights has no effect on this estimator: sum the rewards with WeighAndSum(weights)"
    return None


def _trial(chain: Chain, keys: tuple[str, ...]) -> tuple[Array, list[str]]:
    """Advantages on a made-up batch, and the steps that centre a group without variance but for rounding.

    Raise if the chain fails or its state cannot be saved. Without the steps that may leave nothing of the batch.
    """
    chain = Chain(tuple(step for step in chain.steps if not isinstance(step, DropConflicts)))
    draw = np.random.default_rng(0)
    rewards = draw.integers(0, 2, (12, len(keys))).astype(np.float64)
    rewards[8:] = np.array([[0.3], [np.float32(0.3)]] * 2)
    weighing = (step for step in chain.steps if isinstance(step, WeighByVariation))
    rewards += max((value for step in weighing for value in step.lowest or ()), default=0.0)
    batch = Batch.of(
        rewards,
        list("aaaabbbbcccc"),
        keys=keys,
        lengths=draw.integers(1, 9, 12).astype(np.float64),
        accuracy=draw.integers(0, 2, 12).astype(np.float64) if chain.needs_accuracy else None,
    )
    result = chain(batch)
    plain_state(result.state)
    rounding, values = [], batch.rewards
    for step in chain.steps:
        dead = ~batch.groups.broadcast(batch.groups.varies(values))
        values = step.update(values, batch, step.init()).values
        if step.centres and values[dead].any():
            rounding.append(step.name)
    return result.advantages, rounding
