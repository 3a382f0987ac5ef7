"""`algorithm.filter_groups.metric=any_reward`: dynamic sampling that keeps a group if any of its rewards varies.

verl's own rule looks at one number per response, so it drops a group whose rewards vary while their sum does not. This
rule replaces it in verl's replay buffers and counts the groups that each rule drops. verl still refills the batch. If
all groups are dropped, verl refills forever and logs nothing; this module then logs a warning.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from verl_ext.core.batch import Batch
from verl_ext.core.chain import Chain
from verl_ext.core.groups import Bools
from verl_ext.core.metrics import metric_names
from verl_ext.core.rows import Rows
from verl_ext.errors import IntegrationError
from verl_ext.integration.compat import contract
from verl_ext.integration.compat.names import REPLAY_BUFFER
from verl_ext.integration.trainers import rollout_data
from verl_ext.integration.trainers.attach import TrainerRun, required_run
from verl_ext.settings import ANY_REWARD

logger = logging.getLogger("verl_ext")


def wrap_build(original: Callable[..., Any]) -> Callable[..., Any]:
    """`PPOTrainer._build_replay_buffer(self)`: install our rule in the buffer if the configuration asks for it."""

    def _build_replay_buffer(self: Any, *args: Any, **kwargs: Any) -> Any:
        buffer = original(self, *args, **kwargs)
        if getattr(buffer, "filter_groups_metric", None) == ANY_REWARD:
            run = required_run(self)
            if run is None:
                raise IntegrationError(f"{type(self).__qualname__} filters groups by {ANY_REWARD}, but was not checked")
            GroupFilter(buffer, run).install()
        return buffer

    return _build_replay_buffer


class GroupFilter:
    """Decides once for each finished group of a replay buffer whether to keep it."""

    def __init__(self, buffer: Any, run: TrainerRun) -> None:
        self.buffer, self.run = buffer, run
        self.decided: dict[str, float | None] = {}
        """By uid: None for a group that is kept, its mean score for one that is dropped."""
        self.counts: Counter[str] = Counter()
        self.dropped_in_a_row = 0
        self.warn_at = self._first_warning()
        """The number of groups dropped in a row at which the next warning is logged."""

    def install(self) -> None:
        """Replace the buffer's rule, and add the counts to the metrics that `sample` returns."""
        contract.require_members(REPLAY_BUFFER, "ReplayBuffer", type(self.buffer), "_dapo_filtered_keys", "sample")
        sample = self.buffer.sample

        def sample_and_count(global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
            batch, metrics = sample(global_steps=global_steps, partition_id=partition_id, batch_size=batch_size)
            return batch, metrics if partition_id == "val" else {**metrics, **self.take_counts()}

        self.buffer._dapo_filtered_keys = self.filtered
        self.buffer.sample = sample_and_count

    def filtered(self, partition_id: str) -> tuple[set[str], Counter[float]]:
        """The uids of the groups to drop, and a count per score, as verl's own method returns them."""
        if partition_id == "val":
            return set(), Counter()
        finished = self.buffer.finished_keys[partition_id]
        for uid in self.decided.keys() - finished:
            del self.decided[uid]
        if new := finished - self.decided.keys():
            self._decide(partition_id, new)
        dropped = {uid: score for uid, score in self.decided.items() if score is not None}
        return set(dropped), Counter(dropped.values())

    def take_counts(self) -> dict[str, float]:
        """The counts since the last call."""
        counts, self.counts = self.counts, Counter()
        # verl sums metrics whose names end in _total over the updates of a step.
        return {f"filter_groups/{name}_total": float(counts[name]) for name in self._names()}

    def _first_warning(self) -> int:
        return 4 * (getattr(self.buffer, "train_batch_size", None) or 16)

    def _warn_if_all_dropped(self, kept: Bools) -> None:
        if kept.any():
            self.dropped_in_a_row, self.warn_at = 0, self._first_warning()
            return
        self.dropped_in_a_row += len(kept)
        if self.dropped_in_a_row >= self.warn_at:
            self.warn_at = 2 * self.dropped_in_a_row
            logger.warning(
                "algorithm.filter_groups has dropped %d groups in a row: %s did not vary in any of them. verl "
                "draws prompts until a batch is full, so it keeps waiting: the prompts are too easy or too hard, or "
                "the rewards never vary",
                self.dropped_in_a_row,
                " and ".join(repr(key) for key in self.run.settings.rewards.keys or ()),
            )

    def _names(self) -> list[str]:
        keys = metric_names(self.run.settings.rewards.keys or ()).values()
        return ["finished", "dropped", "score_constant", "kept_with_constant_score", *(f"{k}_constant" for k in keys)]

    def _decide(self, partition_id: str, uids: set[str]) -> None:
        keys = [key for key in self.buffer.partitions[partition_id] if key.rsplit("_", 2)[0] in uids]
        if missing := uids - {key.rsplit("_", 2)[0] for key in keys}:
            raise IntegrationError(f"finished groups without a trajectory: {sorted(missing)[:5]}")
        rows = Rows.of_sessions(keys, np.zeros(len(keys), dtype=bool))
        named = SimpleNamespace(keys=keys, partition_id=partition_id)
        components = rollout_data.fetch_components(named, rows, self.run)
        names = self.run.settings.rewards.keys or ()
        columns = [components.column(name, "algorithm.rewards.keys") for name in names]
        batch = Batch.of(np.stack(columns, axis=1), components.labels, keys=names)
        varies = live(batch, self.run.chain, self.run.settings.rewards.weights)
        scores = self._scores(partition_id, [keys[row] for row in rows.scored.tolist()])
        # A group of one response cannot vary; verl keeps it as well.
        several = batch.groups.sizes > 1
        score_varies, kept = batch.groups.varies(scores), varies.any(axis=1) | ~several
        mean = batch.groups.mean(scores)
        for uid, keep, score in zip(batch.groups.labels, kept.tolist(), mean.tolist(), strict=True):
            self.decided[str(uid)] = None if keep else score
        self._warn_if_all_dropped(kept)
        self.counts["finished"] += len(batch.groups)
        self.counts["dropped"] += int((~kept).sum())
        self.counts["score_constant"] += int((~score_varies & several).sum())
        self.counts["kept_with_constant_score"] += int((~score_varies & several & kept).sum())
        for at, name in enumerate(metric_names(names).values()):
            self.counts[f"{name}_constant"] += int((~batch.groups.varies(batch.rewards)[:, at] & several).sum())

    def _scores(self, partition_id: str, keys: list[str]) -> Any:
        """`[N]` scores, which verl's rule looks at."""
        field = rollout_data.read(keys, partition_id, ["rm_scores"])["rm_scores"]
        return np.array([float(row.sum()) for row in field.unbind()])


def live(batch: Batch, chain: Chain | None, weights: tuple[float, ...] | None) -> Bools:
    """`[G, K]` whether each reward varies after the conditions; False for a reward of weight 0."""
    values = batch.rewards
    for step in chain.steps if chain is not None else ():
        if step.name != "condition":
            break
        values = step.update(values, batch, None).values
    counts = np.ones(len(batch.keys), dtype=bool) if weights is None else np.asarray(weights) != 0
    return np.asarray(batch.groups.varies(values) & counts)
