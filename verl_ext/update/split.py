"""Split the rows of a rank's mini-batch into micro-batches: which rows are included, and which share a prompt.

With PPO's losses, a row whose advantages are all 0 has loss 0 and gradient 0. verl fixes the divisors of the loss
(tokens and rows of the mini-batch, number of ranks) before it splits the mini-batch. Rows that are skipped in between
change no divisor, so the gradient equals that of the whole mini-batch.

All ranks run the same number of micro-batches: one all-reduce takes the largest number that a rank needs.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from verl.utils import tensordict_utils as tu

from verl_ext.core.row_index import dense
from verl_ext.update import SHARE_MARK, SKIP_MARK

FIGURES = "verl_ext_figures"
"""The key under which the split of an update returns its metrics."""


def entry(data: Any, name: str, default: Any = None) -> Any:
    """Return an entry of a batch that has no row for each response."""
    return tu.get_non_tensor_data(data=data, key=name, default=default)


class Lengths(NamedTuple):
    """The rows of a batch in tokens: an entry for each."""

    number: list[int]
    """The number of its prompt."""
    prompt: list[int]
    """Tokens of its prompt."""
    answer: list[int]
    """Tokens of its response."""

    def by_prompt(self, rows: Iterable[int] | None = None) -> list[list[int]]:
        """Collect some rows, by default all, by prompt."""
        groups: dict[int, list[int]] = {}
        for row in range(len(self.number)) if rows is None else rows:
            groups.setdefault(self.number[row], []).append(row)
        return list(groups.values())

    def apart(self, rows: Iterable[int]) -> int:
        """Return the tokens of some rows, each with its prompt."""
        return sum(self.prompt[row] + self.answer[row] for row in rows)

    def packed(self, rows: Iterable[int]) -> int:
        """Return the tokens of some rows, each prompt once."""
        prompts = {self.number[row]: self.prompt[row] for row in rows}
        return sum(prompts.values()) + sum(self.answer[row] for row in rows)


def row_lengths(data: Any, *, share: bool) -> Lengths:
    """Read the rows of a batch; with `share`, rows with equal tokens before the response have the same prompt."""
    whole, prompts = data["input_ids"].offsets().diff().cpu(), data["prompts"]
    if prompts.is_nested:
        prompt = prompts.offsets().diff().cpu()
    else:
        prompt = data["attention_mask"][:, : prompts.shape[1]].sum(dim=1).cpu()
    numbers = list(range(len(whole)))
    if share:
        known: dict[bytes, int] = {}
        tokens = data["input_ids"].values().cpu().split(whole.tolist())
        texts = (row[:length].numpy().tobytes() for row, length in zip(tokens, prompt.tolist(), strict=True))
        numbers = [known.setdefault(text, len(known)) for text in texts]
    return Lengths(numbers, prompt.tolist(), (whole - prompt).tolist())


def wrap_prepare(original: Callable[..., Any], data: Any, dp_group: Any = None, **options: Any) -> Any:
    """`prepare_micro_batches(data, dp_group, ...)`: return the micro-batches, and the rows of each."""
    skip, share = entry(data, SKIP_MARK, False), entry(data, SHARE_MARK, False)
    if not (share or (skip and "advantages" in data)):
        return original(data=data, dp_group=dp_group, **options)
    lengths = row_lengths(data, share=share)
    everything = range(len(lengths.number))
    live, others = live_rows(data, lengths, skip=skip) if "advantages" in data else (everything, [])
    batches = same_number(fill(data, lengths, live), others, dp_group)
    kept = sorted(row for batch in batches for row in batch)
    tokens = lengths.apart(kept)
    figures = {"rows_kept": len(kept) / len(everything), "tokens_kept": tokens / lengths.apart(everything)}
    if share:
        computed = sum(len(lengths.by_prompt(batch)) for batch in batches)
        figures["prompt_tokens_saved"] = 1 - sum(map(lengths.packed, batches)) / tokens
        figures["prompts_recomputed"] = float(computed - len(lengths.by_prompt(kept)))
    tu.assign_non_tensor_data(data, FIGURES, figures)
    place = {row: number for number, row in enumerate(kept)}  # verl restores the order of the rows by these
    return [tu.index_select_tensor_dict(data, batch) for batch in batches], [[place[row] for row in b] for b in batches]


def live_rows(data: Any, lengths: Lengths, *, skip: bool) -> tuple[list[int], list[int]]:
    """Split the rows of an update into those with a gradient and the others; the others fill up micro-batches.

    A row without a token in the loss has no gradient. With `skip`, a row whose advantages are all 0 has no gradient,
    either. Among the others, rows with tokens in the loss come first, because some losses of verl raise an error for a
    micro-batch without such tokens.
    """
    in_loss = dense(data["response_mask"]) != 0
    counts = in_loss.any(dim=-1).tolist()
    # verl's gae leaves advantages outside the mask.
    live = (in_loss & (dense(data["advantages"]) != 0)).any(dim=-1).tolist() if skip else counts
    best = sorted(range(len(live)), key=lambda row: (not live[row], not counts[row], lengths.apart([row])))
    return best[: sum(live)], best[sum(live) :]


def fill(data: Any, lengths: Lengths, live: Sequence[int]) -> list[list[int]]:
    """Fill micro-batches with prompts, the largest first, each into the first micro-batch with enough capacity.

    A prompt that exceeds the limit is divided.
    """
    if not entry(data, "use_dynamic_bsz", True):
        size = entry(data, "micro_batch_size_per_gpu")
        return [[*live[start : start + size]] for start in range(0, len(live), size)]
    limit = token_limit(data)
    batches: list[list[int]] = []
    room: list[int] = []
    for group in sorted(lengths.by_prompt(live), key=lengths.packed, reverse=True):
        left = group
        while left:
            size = max(1, sum(lengths.packed(left[: end + 1]) <= limit for end in range(len(left))))
            part, left = left[:size], left[size:]
            place = next((place for place, free in enumerate(room) if free >= lengths.packed(part)), len(room))
            if place == len(room):
                batches.append([])
                room.append(limit)
            batches[place] += part
            room[place] -= lengths.packed(part)
    return batches


def token_limit(data: Any) -> int:
    """Return the tokens that a micro-batch may have."""
    return int(entry(data, "max_token_len_per_gpu") * entry(data, "sp_size", 1))


def same_number(batches: list[list[int]], others: list[int], dp_group: Any) -> list[list[int]]:
    """Halve micro-batches, and add rows that would be skipped, up to the largest number of a rank."""
    from verl.utils.device import get_device_name

    number = torch.tensor([max(1, len(batches))], device=get_device_name())
    torch.distributed.all_reduce(number, op=torch.distributed.ReduceOp.MAX, group=dp_group)
    while len(batches) < int(number):
        longest = max(batches, key=len, default=[])
        half = len(longest) // 2
        batches.append(longest[:half] or [others.pop(0)])
        del longest[:half]
    return batches
