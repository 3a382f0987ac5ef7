"""One reward a trajectory, as a step takes it."""

from verl_ext.core.batch import Batch


def column(values, uids=None, **given):
    batch = Batch.of([[value] for value in values], uids or ["g"] * len(values), **given)
    return batch.rewards, batch


def apply(step, values, uids=None, **given):
    return step.transform(*column(values, uids, **given), step.init()).values[:, 0]
