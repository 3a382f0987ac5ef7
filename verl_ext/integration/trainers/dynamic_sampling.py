"""`algorithm.filter_groups.metric=any_reward`: dynamic sampling which keeps a group while any of its rewards varies.

verl's own rule looks at one number, and drops a group whose rewards differ although their sum does not. This one takes
its place in verl's replay buffers, whose refilling it leaves alone, and counts what each rule would have dropped. verl
refills without end, and without a word, while every group is dropped: this says so.
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
from verl_ext.core.observe import metric_names
from verl_ext.core.rows import Rows
from verl_ext.errors import IntegrationError
from verl_ext.integration.advantage.components import Components
from verl_ext.integration.compat import contract
from verl_ext.integration.compat.names import REPLAY_BUFFER
from verl_ext.integration.trainers import rollout_data
from verl_ext.integration.trainers.attach import TrainerRun, required_run
from verl_ext.settings import ANY_REWARD

logger = logging.getLogger("verl_ext")

Fetch = Callable[[Any, Rows, TrainerRun], Components]


def wrap_build(original: Callable[..., Any], *, fetch: Fetch) -> Callable[..., Any]:
    """`PPOTrainer._build_replay_buffer(self)`, with our rule in the buffer where the configuration names it."""

    def _build_replay_buffer(self: Any, *args: Any, **kwargs: Any) -> Any:
        buffer = original(self, *args, **kwargs)
        if getattr(buffer, "filter_groups_metric", None) == ANY_REWARD:
            run = required_run(self)
            if run is None:
                raise IntegrationError(f"{type(self).__qualname__} filters groups by {ANY_REWARD}, but was not checked")
            GroupFilter(buffer, fetch, run).install()
        return buffer

    return _build_replay_buffer


class GroupFilter:
    """Judges every finished group of a replay buffer once."""

    def __init__(self, buffer: Any, fetch: Fetch, run: TrainerRun) -> None:
        self.buffer, self.fetch, self.run = buffer, fetch, run
        self.judged: dict[str, float | None] = {}
        """uid to None for a group that is kept, else to its score."""
        self.counts: Counter[str] = Counter()
        self.barren, self.said_at = 0, self._first_said_at()
        """Groups dropped since one was kept, and at how many the log says so next."""

    def install(self) -> None:
        """Take the place of the buffer's rule, and add the counts to what sampling reports."""
        contract.require_members(REPLAY_BUFFER, "ReplayBuffer", type(self.buffer), "_dapo_filtered_keys", "sample")
        sample = self.buffer.sample

        def sample_and_count(global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
            batch, metrics = sample(global_steps=global_steps, partition_id=partition_id, batch_size=batch_size)
            return batch, metrics if partition_id == "val" else {**metrics, **self.take_counts()}

        self.buffer._dapo_filtered_keys = self.filtered
        self.buffer.sample = sample_and_count

    def filtered(self, partition_id: str) -> tuple[set[str], Counter[float]]:
        """Groups to drop, and how many of them have which score: what verl's own method returns."""
        if partition_id == "val":
            return set(), Counter()
        finished = self.buffer.finished_keys[partition_id]
        for uid in self.judged.keys() - finished:
            del self.judged[uid]
        if new := finished - self.judged.keys():
            self._judge(partition_id, new)
        dropped = {uid: score for uid, score in self.judged.items() if score is not None}
        return set(dropped), Counter(dropped.values())

    def take_counts(self) -> dict[str, float]:
        """The counts since the last call."""
        counts, self.counts = self.counts, Counter()
        # verl adds up metrics named so over the updates of a step.
        return {f"filter_groups/{name}_total": float(counts[name]) for name in self._names()}

    def _first_said_at(self) -> int:
        return 4 * (getattr(self.buffer, "train_batch_size", None) or 16)

    def _say_if_barren(self, kept: Bools) -> None:
        if kept.any():
            self.barren, self.said_at = 0, self._first_said_at()
            return
        self.barren += len(kept)
        if self.barren >= self.said_at:
            self.said_at = 2 * self.barren
            logger.warning(
                "algorithm.filter_groups has dropped %d groups in a row: within none of them does %s vary. verl draws "
                "prompts until a batch is full; prompts that are too easy or too hard, or a reward that is always the "
                "same, keep it waiting",
                self.barren,
                " or ".join(repr(key) for key in self.run.settings.rewards.keys or ()),
            )

    def _names(self) -> list[str]:
        keys = metric_names(self.run.settings.rewards.keys or ()).values()
        return ["finished", "dropped", "score_constant", "kept_with_constant_score", *(f"{k}_constant" for k in keys)]

    def _judge(self, partition_id: str, uids: set[str]) -> None:
        keys = [key for key in self.buffer.partitions[partition_id] if key.rsplit("_", 2)[0] in uids]
        if missing := uids - {key.rsplit("_", 2)[0] for key in keys}:
            raise IntegrationError(f"finished groups without a trajectory: {sorted(missing)[:5]}")
        rows = Rows.of_sessions(keys, np.zeros(len(keys), dtype=bool))
        named = SimpleNamespace(keys=keys, partition_id=partition_id)
        components = self.fetch(named, rows, self.run)
        names = self.run.settings.rewards.keys or ()
        columns = [components.column(name, "algorithm.rewards.keys") for name in names]
        batch = Batch.of(np.stack(columns, axis=1), components.labels, keys=names)
        varies = live(batch, self.run.chain, self.run.settings.rewards.weights)
        scores = self._scores(partition_id, [keys[row] for row in rows.scored.tolist()])
        # A group of one has nothing to compare; verl keeps it as well.
        several = batch.groups.sizes > 1
        score_varies, kept = batch.groups.varies(scores), varies.any(axis=1) | ~several
        mean = batch.groups.mean(scores)
        order = [components.labels[row] for row in batch.groups.order[batch.groups.starts].tolist()]
        for uid, keep, score in zip(order, kept.tolist(), mean.tolist(), strict=True):
            self.judged[str(uid)] = None if keep else score
        self._say_if_barren(kept)
        self.counts["finished"] += len(order)
        self.counts["dropped"] += int((~kept).sum())
        self.counts["score_constant"] += int((~score_varies & several).sum())
        self.counts["kept_with_constant_score"] += int((~score_varies & several & kept).sum())
        for at, name in enumerate(metric_names(names).values()):
            self.counts[f"{name}_constant"] += int((~batch.variation[1][:, at] & several).sum())

    def _scores(self, partition_id: str, keys: list[str]) -> Any:
        """`[N]` what verl's rule looks at."""
        field = rollout_data.read(keys, partition_id, ["rm_scores"])["rm_scores"]
        return np.array([float(row.sum()) for row in field.unbind()])


def live(batch: Batch, chain: Chain | None, weights: tuple[float, ...] | None) -> Bools:
    """`[G, K]` whether a reward that counts varies: conditions applied, rewards of weight 0 left out."""
    values = batch.rewards
    for step in chain.steps if chain is not None else ():
        if step.name != "condition":
            break
        values = step.update(values, batch, None).values
    counts = np.ones(len(batch.keys), dtype=bool) if weights is None else np.asarray(weights) != 0
    return np.asarray(batch.groups.varies(values) & counts)
