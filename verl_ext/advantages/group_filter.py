"""Dynamic sampling, `algorithm.filter_groups.metric=any_reward` and `accuracy_between`.

verl's own filter reads one number per response, which need not be the sum from which the estimator learns.
`any_reward` keeps a group if that sum varies in it. `accuracy_between` keeps a group if its mean accuracy lies within
two bounds. The filter replaces verl's filter in the replay buffer and counts the groups that it drops. verl refills the
batch.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl_ext import hooks
from verl_ext.advantages import queue
from verl_ext.advantages.table import Request
from verl_ext.core.batch import Batch
from verl_ext.core.chain import Chain, Step
from verl_ext.core.groups import TOLERANCE, Array, Bools, Groups
from verl_ext.core.metrics import metric_name
from verl_ext.core.row_index import uids_of
from verl_ext.core.step_lists import is_custom
from verl_ext.core.steps import Center
from verl_ext.errors import IntegrationError
from verl_ext.run import Run
from verl_ext.settings import ACCURACY_BETWEEN, ANY_REWARD, RewardsSettings

METHOD = "_dapo_filtered_keys"
"""The method of verl's replay buffer that returns the finished groups to drop."""


def replace_filter(trainer: Any, run: Run) -> None:
    """Replace the filter of a trainer's replay buffer if `filter_groups.metric` is one of the two metrics above."""
    filter_groups = trainer.config.algorithm.get("filter_groups")
    if filter_groups is None or not filter_groups.enable:
        return
    if filter_groups.metric not in (ANY_REWARD, ACCURACY_BETWEEN):
        return
    group_filter = GroupFilter(trainer.replay_buffer, run, filter_groups.metric)

    def filtered_keys(_original: Callable[..., Any], partition_id: str) -> tuple[set[str], Counter[float]]:
        return group_filter.filtered_keys(partition_id)  # instead of verl's decision

    hooks.wrap(trainer.replay_buffer, METHOD, filtered_keys)


class GroupFilter:
    """Decides once for each finished group of a replay buffer whether to keep it."""

    def __init__(self, buffer: Any, run: Run, metric: str) -> None:
        self.buffer = buffer
        self.run = run
        self.metric = metric
        self.kept: set[str] = set()
        """The uids of the finished groups that are kept."""
        self.dropped: dict[str, float] = {}
        """The mean scores of the finished groups that are dropped, by uid."""

    def filtered_keys(self, partition_id: str) -> tuple[set[str], Counter[float]]:
        """Return the uids of the groups to drop, and how many of them have each mean score, as verl's method does."""
        if partition_id == "val":
            return set(), Counter()
        finished = self.buffer.finished_keys[partition_id]
        self.kept &= finished
        self.dropped = {uid: score for uid, score in self.dropped.items() if uid in finished}
        new = finished - self.kept - self.dropped.keys()
        if new:
            self._decide(partition_id, new)
        return set(self.dropped), Counter(self.dropped.values())

    def _decide(self, partition_id: str, uids: set[str]) -> None:
        """Decide about new groups: remember the decisions, and add to the metrics of the run."""
        settings = self.run.settings.rewards
        finished = read_groups(self.buffer, partition_id, uids, settings, self.metric)
        groups = finished.batch.groups
        counters: dict[str, Bools] = {}
        if self.metric == ANY_REWARD:
            kept = any_reward(finished.batch, self.run.chain)
            dropped = ~kept & finished.several
        else:
            lower, upper = settings.accuracy_between or ()  # the checks require that both bounds are set
            too_hard, too_easy = accuracy_between(groups, finished.accuracy, lower, upper)
            counters["too_hard"] = too_hard & finished.several
            counters["too_easy"] = too_easy & finished.several
            dropped = counters["too_hard"] | counters["too_easy"]
        counters |= count_groups(finished, dropped)
        mean_scores = groups.mean(finished.score)
        for uid, is_dropped, mean_score in zip(groups.labels, dropped, mean_scores.tolist(), strict=True):
            if is_dropped:
                self.dropped[str(uid)] = mean_score
            else:
                self.kept.add(str(uid))
        add_counts(self.run.metrics, counters)


@dataclass(frozen=True)
class FinishedGroups:
    """The finished groups of a replay buffer about which a filter decides."""

    batch: Batch
    """The rewards with one number per response, or the trainer's score if the configuration names no such reward."""
    score: Array
    """`[T]` the trainer's score."""
    accuracy: Array
    """`[T]` the accuracy in [0, 1], NaN if it is not scored. Only `accuracy_between` reads it, so it is NaN for
    `any_reward`."""

    @property
    def several(self) -> Bools:
        """`[G]` whether a group has several responses. A single response cannot vary, and verl keeps its group too."""
        return self.batch.groups.sizes > 1


def read_groups(
    buffer: Any, partition_id: str, uids: set[str], settings: RewardsSettings, metric: str
) -> FinishedGroups:
    """Read the rewards of groups from TransferQueue. Raise if a group has no trajectory or no score."""
    keys = keys_of_groups(buffer.partitions[partition_id], uids)
    names = [*(settings.keys or ())]
    if settings.accuracy_key is not None:
        names.append(settings.accuracy_key)
    table = queue.read_table(keys, partition_id, Request(settings, tuple(names), score=True))
    missing = uids - {str(label) for label in table.labels}
    if missing or table.score is None:
        raise IntegrationError(
            f"The replay buffer has finished groups without a trajectory or without scores: {sorted(missing)[:5]}. "
            f"Set algorithm.filter_groups.enable=False to train without verl_ext's filter."
        )
    lists = {*(settings.per_turn or ()), *(settings.rubrics or ())}
    single_numbers = [key for key in settings.keys or () if key not in lists]
    batch = table.batch(single_numbers or None)
    accuracy = np.full(len(table.labels), np.nan)
    if metric == ACCURACY_BETWEEN:
        accuracy = table.accuracy()
    return FinishedGroups(batch, table.score, accuracy)


def keys_of_groups(partition: Mapping[str, Any], uids: set[str]) -> list[str]:
    """Return the keys of a partition, one per output of the model, that belong to these groups."""
    all_keys = list(partition)
    keys: list[str] = []
    for key, uid in zip(all_keys, uids_of(all_keys), strict=True):
        if uid in uids:
            keys.append(key)
    return keys


def any_reward(batch: Batch, chain: Chain | None) -> Bools:
    """Return `[G]` whether a group has a learning signal: whether the estimator's centered sum of the rewards varies.

    Here only single groups are known, so the steps that can be computed end before the first step that reads the whole
    batch. The answer depends on where that step is:

    - after the step that centers the sum, or there is none: whether the centered sum varies, which is exact;
    - between the sum and the step that centers it: whether the sum varies, or a reward with a nonzero weight, because
      equal sums may differ later. The sum of two rewards with zero variance varies if one of them is not scored for
      some of the responses;
    - before the sum: whether a reward with a nonzero weight varies after the conditions. An estimator of verl is
      treated in the same way, because its steps are not known.
    """
    steps = _steps_within_groups(chain)
    has_sum = any(step.sums for step in steps)
    has_center = any(step.centers or step.compares for step in steps)
    if has_sum and has_center:
        return _results_vary(steps, batch)
    if has_sum:
        return _weighted_rewards_vary(batch) | _results_vary((*steps, Center()), batch)
    return _weighted_rewards_vary(batch)


def _results_vary(steps: tuple[Step, ...], batch: Batch) -> Bools:
    """Return `[G]` whether the values after the steps, which end with one value per trajectory, vary."""
    values = Chain(steps)(batch).advantages
    return batch.groups.varies(values)


def _weighted_rewards_vary(batch: Batch) -> Bools:
    """Return `[G]` whether a reward with a nonzero weight varies."""
    varies = batch.groups.varies(batch.returns) & (batch.group_weights != 0)  # [G, K]
    any_varies: Bools = varies.any(axis=1)
    return any_varies


def _steps_within_groups(chain: Chain | None) -> tuple[Step, ...]:
    """Return the steps of a chain up to the first that may read more than the rewards of one group.

    After the sum, a division by the batch's standard deviation is left out, because it multiplies all sums by one
    number.
    """
    if chain is None:
        return ()
    steps: list[Step] = []
    has_sum = False
    for step in chain.steps:
        if is_custom(step):  # a custom step may inherit `reads_one_group` and not keep to it
            break
        if step.rescales_batch and has_sum:
            continue
        if not step.reads_one_group:
            break
        has_sum = has_sum or step.sums
        steps.append(step)
    return tuple(steps)


def accuracy_between(groups: Groups, accuracy: Array, lower: float, upper: float) -> tuple[Bools, Bools]:
    """Return `[G]` whether the mean accuracy of a group is below `lower`, and whether it is above `upper`.

    A group without any scored accuracy counts as below.
    """
    mean_accuracy = groups.mean(accuracy)
    reaches_lower = mean_accuracy >= lower - TOLERANCE  # False for NaN
    exceeds_upper = mean_accuracy > upper + TOLERANCE
    return ~reaches_lower, exceeds_upper


def count_groups(finished: FinishedGroups, dropped: Bools) -> dict[str, Bools]:
    """Return the counters of both filters. A counter is the `[G]` mask of the groups that a metric counts."""
    batch, several = finished.batch, finished.several
    counters: dict[str, Bools] = {}
    reward_varies = batch.groups.varies(batch.raw)
    for column, key in enumerate(batch.keys):
        counters[f"{metric_name(key)}_zero_variance"] = ~reward_varies[:, column] & several
    # The trainer's score comes after the rewards, because a reward may be called `score` as well.
    score_zero_variance = ~batch.groups.varies(finished.score) & several
    counters["score_zero_variance"] = score_zero_variance
    counters["kept_with_zero_variance_score"] = score_zero_variance & ~dropped
    counters["dropped"] = dropped
    counters["finished"] = np.full(len(batch.groups), True)
    return counters


def add_counts(metrics: dict[str, float], counters: Mapping[str, Bools]) -> None:
    """Add the number of groups of each counter to metrics. They add up until the trainer logs its next metrics."""
    for name, mask in counters.items():
        metric = f"filter_groups/{name}_total"  # verl sums metrics with this ending over the updates of a step
        count = float(np.count_nonzero(mask))
        metrics[metric] = metrics.get(metric, 0.0) + count
