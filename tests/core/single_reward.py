"""A batch with one reward per trajectory, and the values of a step on such a batch."""

import numpy as np

from verl_ext.core.batch import Batch


def single_reward_batch(rewards, uids=None, **options) -> Batch:
    """Return the batch of one reward per trajectory, by default in one group."""
    if uids is None:
        uids = ["g"] * len(rewards)
    return Batch.of([[reward] for reward in rewards], uids, **options)


def transformed(step, rewards, uids=None, **options):
    """Return the result of a step on rewards without conditions, in the state before the first batch."""
    batch = single_reward_batch(rewards, uids, **options)
    return step.transform(batch.rewards, batch, step.init())


def values_after(step, rewards, uids=None, **options) -> np.ndarray:
    """Return the value of each trajectory after a step."""
    return transformed(step, rewards, uids, **options).values[:, 0]
