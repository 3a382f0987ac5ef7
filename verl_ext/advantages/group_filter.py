"""Dynamic sampling, `algorithm.filter_groups.metric=any_reward` and `accuracy_between`.

verl's own filter reads one number per response, which need not be the sum from which the estimator learns.
`any_reward` keeps a group if that sum varies in it. `accuracy_between` keeps a group if its mean accuracy lies within
two bounds. The filter replaces verl's filter in the replay buffer and counts the groups that it drops. verl refills the
batch.
"""

from collections import Counter
from typing import Any

import numpy as np

from verl_ext import hooks
from verl_ext.advantages import queue
from verl_ext.advantages.table import Request, Table
from verl_ext.core.batch import Batch
from verl_ext.core.chain import Chain, Step
from verl_ext.core.groups import TOLERANCE, Bools, Groups
from verl_ext.core.metrics import metric_name
from verl_ext.core.row_index import uids_of
from verl_ext.core.step_lists import is_built_in
from verl_ext.core.steps import Center
from verl_ext.errors import IntegrationError
from verl_ext.run import Run
from verl_ext.settings import ACCURACY_BETWEEN, ANY_REWARD

METHOD = "_dapo_filtered_keys"
"""The method of verl's replay buffer that returns the finished groups to drop."""


def replace_filter(trainer: Any, run: Run) -> None:
    """Replace the filter of a trainer's replay buffer if the configuration asks for one of ours."""
    chosen = trainer.config.algorithm.get("filter_groups")
    metric = chosen.metric if chosen is not None and chosen.enable else None
    if metric in (ANY_REWARD, ACCURACY_BETWEEN):
        groups = GroupFilter(trainer.replay_buffer, run, metric)
        hooks.wrap(trainer.replay_buffer, METHOD, lambda _, partition_id: groups.dropped(partition_id))


class GroupFilter:
    """Decides once for each finished group of a replay buffer whether to keep it."""

    def __init__(self, buffer: Any, run: Run, metric: str) -> None:
        self.buffer, self.run, self.metric = buffer, run, metric
        self.decided: dict[str, float | None] = {}
        """By uid: None for a group that is kept, its mean score for one that is dropped."""

    def dropped(self, partition_id: str) -> tuple[set[str], Counter[float]]:
        """Return the uids of the groups to drop, and a count per score, as verl's own method returns them."""
        if partition_id == "val":
            return set(), Counter()
        finished = self.buffer.finished_keys[partition_id]
        for uid in self.decided.keys() - finished:
            del self.decided[uid]
        if new := finished - self.decided.keys():
            self._decide(partition_id, new)
        dropped = {uid: score for uid, score in self.decided.items() if score is not None}
        return set(dropped), Counter(dropped.values())

    def _decide(self, partition_id: str, uids: set[str]) -> None:
        every = list(self.buffer.partitions[partition_id])
        keys = [key for key, uid in zip(every, uids_of(every), strict=True) if uid in uids]
        settings = self.run.settings.rewards
        accuracy = () if settings.accuracy_key is None else (settings.accuracy_key,)
        table = queue.read_table(keys, partition_id, Request(settings, (*(settings.keys or ()), *accuracy), score=True))
        missing = uids - set(map(str, table.labels))
        if missing or table.score is None:
            raise IntegrationError(
                f"The replay buffer has finished groups without a trajectory or without scores: {sorted(missing)[:5]}. "
                f"Set algorithm.filter_groups.enable=False to train without verl_ext's filter."
            )
        lists = (*(settings.per_turn or ()), *(settings.rubrics or ()))
        named = tuple(key for key in settings.keys or () if key not in lists)
        batch = table.batch(named or None)
        counts: dict[str, Bools] = {}
        groups = batch.groups
        several = groups.sizes > 1  # a group of one response cannot vary; verl keeps it as well
        if self.metric == ANY_REWARD:
            dropped = ~has_signal(batch, self.run.chain, settings.weights) & several
        else:
            too_hard, too_easy = (part & several for part in outside(groups, table))
            dropped = too_hard | too_easy
            counts |= {"too_hard": too_hard, "too_easy": too_easy}
        score, varies = groups.variation(table.score)
        constant = ~varies & several
        for uid, drop, mean in zip(groups.labels, dropped, score.tolist(), strict=True):
            self.decided[str(uid)] = mean if drop else None
        varies = groups.varies(batch.raw)
        counts |= {
            f"{metric_name(key)}_zero_variance": ~varies[:, column] & several for column, key in enumerate(named)
        }
        counts |= {"finished": groups.sizes > 0, "dropped": dropped}
        counts |= {"score_zero_variance": constant, "kept_with_zero_variance_score": constant & ~dropped}
        for name, counted in counts.items():  # until the trainer logs its next metrics
            metric = f"filter_groups/{name}_total"  # verl adds up what ends in _total over the updates of a step
            self.run.metrics[metric] = self.run.metrics.get(metric, 0.0) + float(np.count_nonzero(counted))


def has_signal(batch: Batch, chain: Chain | None, weights: tuple[float, ...] | None) -> Bools:
    """Return `[G]` whether the centered sum of the rewards, as the estimator forms it, varies.

    With another step before the sum, and with verl's estimators: whether a reward with a weight varies after the
    conditions. If another step stands between the sum and `center`, it may make equal sums differ: in that case whether
    the sum or a reward with a weight varies.
    """
    steps = _steps_within_groups(chain)
    if weights is not None:
        batch = batch.with_weights(weights)
    has_sum = any(step.sums for step in steps)
    if has_sum and any(step.centers or step.compares for step in steps):
        return batch.groups.varies(Chain(steps)(batch).advantages)
    has_weight = batch.reward_weights != 0
    varies = np.asarray((batch.groups.varies(batch.rewards) & has_weight).any(axis=1))
    if has_sum:  # the sum varies also where one of two constant rewards is not scored for some of the responses
        centered_sum = Chain((*steps, Center()))(batch).advantages
        varies |= batch.groups.varies(centered_sum)
    return varies


def _steps_within_groups(chain: Chain | None) -> tuple[Step, ...]:
    """Return the steps of a chain up to the first that may read more than the rewards of one group.

    After the sum a division by the batch's standard deviation is left out: it multiplies all sums by one number.
    """
    steps: list[Step] = []
    has_sum = False
    for step in () if chain is None else chain.steps:
        if not is_built_in(step):
            break
        if step.rescales_batch and has_sum:
            continue
        if not step.reads_one_group:
            break
        has_sum = has_sum or step.sums
        steps.append(step)
    return tuple(steps)


def outside(groups: Groups, table: Table) -> tuple[Bools, Bools]:
    """Return `[G]` whether the mean accuracy of a group lies below and above the bounds of `accuracy_between`.

    A group without any scored accuracy counts as below.
    """
    low, high = table.settings.accuracy_between or ()
    means = groups.mean(table.accuracy())
    return ~(means >= low - TOLERANCE), means > high + TOLERANCE
