"""Order the rows of a batch in the trainer, so that the rows of a prompt come together."""

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from verl_ext.core.row_index import uids_of
from verl_ext.errors import IntegrationError

Row = tuple[Hashable, int, int]
"""The uid of a row, and the tokens of its prompt and its response. In a session, a uid may have several prompts."""


def reorder(trainer: Any, batch: Any, metrics: dict[str, Any]) -> None:
    """Reorder a batch that verl has balanced, of the default trainer or of `RayPPOTrainer`."""
    if hasattr(batch, "tags"):
        lengths = [(tag["prompt_len"], tag["seq_len"] - tag["prompt_len"]) for tag in batch.tags]
        rows = [(uid, *pair) for uid, pair in zip(uids_of(batch.keys), lengths, strict=True)]
        batch.reorder(in_order(trainer, rows, metrics))
    else:
        mask, width = batch.batch["attention_mask"], batch.batch["prompts"].shape[1]
        before, answers = (part.sum(dim=1).tolist() for part in (mask[:, :width], mask[:, width:]))
        rows = [*zip(batch.non_tensor_batch["uid"].tolist(), before, answers, strict=True)]
        batch.reorder(torch.tensor(in_order(trainer, rows, metrics)))


def in_order(trainer: Any, rows: Sequence[Row], metrics: dict[str, Any]) -> list[int]:
    """Return the order of a batch that verl has balanced, and compute the metrics of its balance again."""
    from verl.utils.seqlen_balancing import log_seqlen_unbalance

    config = trainer.config.actor_rollout_ref
    ranks, divided = order(
        rows,
        ranks=max(trainer.actor_rollout_wg._dispatch_info["actor"]) + 1,
        mini_batch=config.actor.ppo_mini_batch_size * config.rollout.n,
    )
    lengths = [before + answer for _, before, answer in rows]
    metrics |= log_seqlen_unbalance(seqlen_list=lengths, partitions=ranks, prefix="global_seqlen")
    metrics["actor/prompts_divided"] = float(divided)
    return [row for rank in ranks for row in rank]


def order(rows: Sequence[Row], *, ranks: int, mini_batch: int) -> tuple[list[list[int]], int]:
    """Divide rows among ranks and mini-batches: whole prompts, equal numbers of rows, and about equal tokens.

    Return the rows of each rank, and how often a prompt was divided because no mini-batch could hold all its rows.
    A `mini_batch` has that many rows on all ranks together; the next rows of each rank are its next one.

    >>> a, b = ("a", 5, 1), ("b", 9, 1)
    >>> order([a, b, a, b], ranks=2, mini_batch=4)
    ([[1, 3], [0, 2]], 0)
    >>> order([a, a, a, b], ranks=2, mini_batch=4)
    ([[0, 1], [2, 3]], 1)
    """
    if len(rows) % ranks:
        raise IntegrationError(
            f"algorithm.verl_ext.share_prompts=True needs the same number of rows on each rank, but {len(rows)} rows "
            f"cannot be divided equally among {ranks} ranks. Set algorithm.verl_ext.share_prompts=False."
        )
    per_rank, size = len(rows) // ranks, mini_batch // ranks
    # One place for each mini-batch of each rank. The ranks of a mini-batch wait for each other.
    room = [min(size, per_rank - start) for start in range(0, per_rank, size) for _ in range(ranks)]
    places: list[list[int]] = [[] for _ in room]
    cost, of_rank, divided = [0] * len(room), [0] * ranks, 0
    groups: dict[Hashable, list[int]] = {}
    for number, (uid, before, _) in enumerate(rows):
        groups.setdefault((uid, before), []).append(number)

    def tokens(group: list[int]) -> int:
        return rows[group[0]][1] + sum(rows[number][2] for number in group)

    # The prompts with the most rows come first, and stay whole if a place has the capacity.
    for group in sorted(groups.values(), key=lambda group: (len(group), tokens(group)), reverse=True):
        left = group
        while left:
            fits = [place for place, free in enumerate(room) if free >= len(left)]
            place = max(range(len(room)), key=room.__getitem__)
            place = min(fits, key=lambda place: (cost[place], of_rank[place % ranks]), default=place)
            part, left = left[: room[place]], left[room[place] :]
            places[place] += part
            room[place] -= len(part)
            cost[place] += tokens(part)
            of_rank[place % ranks] += tokens(part)
            divided += bool(left)
    return [[number for part in places[rank::ranks] for number in part] for rank in range(ranks)], divided
