"""Order the rows of a batch in the trainer, so that the rows of a prompt come together.

verl gives each rank an equal, consecutive part of the batch, and each rank splits its part into mini-batches. With 2
ranks and 2 mini-batches of 4 rows on both ranks together:

    place of a row   0  1 | 2  3 | 4  5 | 6  7
    rank             0    | 0    | 1    | 1
    mini-batch       0    | 1    | 0    | 1
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from verl_ext.core.row_index import uids_of
from verl_ext.errors import IntegrationError


class Row(NamedTuple):
    """A row of the batch. In a session, rows with one uid may have prompts of different lengths."""

    uid: Hashable
    prompt_tokens: int
    response_tokens: int


def reorder(trainer: Any, batch: Any, metrics: dict[str, Any]) -> None:
    """Reorder a batch that verl has balanced, and compute verl's metrics of its balance again."""
    from verl.utils.seqlen_balancing import log_seqlen_unbalance

    is_of_default_trainer = hasattr(batch, "tags")
    rows = rows_of_queue(batch) if is_of_default_trainer else rows_of_data_proto(batch)
    config = trainer.config.actor_rollout_ref
    last_rank = max(trainer.actor_rollout_wg._dispatch_info["actor"])
    rows_of_ranks, divided = order(
        rows, ranks=last_rank + 1, mini_batch=config.actor.ppo_mini_batch_size * config.rollout.n
    )
    lengths = [row.prompt_tokens + row.response_tokens for row in rows]
    metrics |= log_seqlen_unbalance(seqlen_list=lengths, partitions=rows_of_ranks, prefix="global_seqlen")
    metrics["actor/prompts_divided"] = float(divided)
    new_order = [row for rows_of_rank in rows_of_ranks for row in rows_of_rank]
    batch.reorder(new_order if is_of_default_trainer else torch.tensor(new_order))


def rows_of_queue(batch: Any) -> list[Row]:
    """Return the rows of a batch of the default trainer, from its keys and tags."""
    rows = []
    for uid, tag in zip(uids_of(batch.keys), batch.tags, strict=True):
        rows.append(Row(uid, tag["prompt_len"], tag["seq_len"] - tag["prompt_len"]))
    return rows


def rows_of_data_proto(data: Any) -> list[Row]:
    """Return the rows of a batch of `RayPPOTrainer`, from its attention mask."""
    mask = data.batch["attention_mask"]
    prompt_width = data.batch["prompts"].shape[1]
    uids = data.non_tensor_batch["uid"].tolist()
    prompt_tokens = mask[:, :prompt_width].sum(dim=1).tolist()
    response_tokens = mask[:, prompt_width:].sum(dim=1).tolist()
    return [Row(*values) for values in zip(uids, prompt_tokens, response_tokens, strict=True)]


@dataclass
class Slot:
    """A mini-batch of one rank, while rows are added to it."""

    rank: int
    capacity: int
    """How many more rows the slot can hold."""
    rows: list[int] = field(default_factory=list)
    tokens: int = 0


def order(rows: Sequence[Row], *, ranks: int, mini_batch: int) -> tuple[list[list[int]], int]:
    """Divide rows among ranks and mini-batches: whole prompts, equal numbers of rows, and about equal tokens.

    Return the rows of each rank, and how often a prompt was divided because no mini-batch had room for all its rows.
    A `mini_batch` has that many rows on all ranks together.

    >>> a, b = Row("a", 5, 1), Row("b", 9, 1)
    >>> order([a, b, a, b], ranks=2, mini_batch=4)
    ([[1, 3], [0, 2]], 0)
    >>> order([a, a, a, b], ranks=2, mini_batch=4)
    ([[0, 1], [2, 3]], 1)
    """
    slots = empty_slots(len(rows), ranks, mini_batch // ranks)
    tokens_of_rank = [0] * ranks
    divided = 0
    for rows_of_prompt in prompts_in_order(rows):
        remaining = rows_of_prompt
        while remaining:
            slot = choose_slot(slots, tokens_of_rank, len(remaining))
            part, remaining = remaining[: slot.capacity], remaining[slot.capacity :]
            tokens = tokens_shared(rows, part)
            slot.rows += part
            slot.capacity -= len(part)
            slot.tokens += tokens
            tokens_of_rank[slot.rank] += tokens
            if remaining:
                divided += 1
    rows_of_ranks: list[list[int]] = [[] for _ in range(ranks)]
    for slot in slots:
        rows_of_ranks[slot.rank] += slot.rows
    return rows_of_ranks, divided


def empty_slots(count: int, ranks: int, mini_batch_of_rank: int) -> list[Slot]:
    """Return the slots for `count` rows, the first mini-batch of each rank first.

    Of slots with equally few tokens the first is filled, so that the ranks of a mini-batch, which run together, fill up
    evenly.
    """
    if count % ranks:
        raise IntegrationError(
            f"algorithm.verl_ext.share_prompts=True needs the same number of rows on each rank, but {count} rows "
            f"cannot be divided equally among {ranks} ranks. Set algorithm.verl_ext.share_prompts=False."
        )
    rows_of_rank = count // ranks
    slots = []
    for start in range(0, rows_of_rank, mini_batch_of_rank):
        capacity = min(mini_batch_of_rank, rows_of_rank - start)  # the last mini-batch may be smaller
        slots += [Slot(rank, capacity) for rank in range(ranks)]
    return slots


def prompts_in_order(rows: Sequence[Row]) -> list[list[int]]:
    """Return the rows of each prompt: the prompts with the most rows come first, then those with the most tokens."""
    groups: dict[Hashable, list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault((row.uid, row.prompt_tokens), []).append(number)
    return sorted(groups.values(), key=lambda group: (len(group), tokens_shared(rows, group)), reverse=True)


def choose_slot(slots: Sequence[Slot], tokens_of_rank: Sequence[int], count: int) -> Slot:
    """Return the slot for `count` rows of a prompt: among those that hold all of them, the one with the fewest tokens.

    If no slot holds all of them, return the one with the largest capacity.
    """
    large_enough = [slot for slot in slots if slot.capacity >= count]
    if large_enough:
        return min(large_enough, key=lambda slot: (slot.tokens, tokens_of_rank[slot.rank]))
    return max(slots, key=lambda slot: slot.capacity)


def tokens_shared(rows: Sequence[Row], numbers: Sequence[int]) -> int:
    """Return the tokens of some rows of one prompt: the prompt once, and each response."""
    prompt_tokens = rows[numbers[0]].prompt_tokens
    return prompt_tokens + sum(rows[number].response_tokens for number in numbers)
