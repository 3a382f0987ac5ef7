"""Split the rows of a rank's mini-batch into micro-batches: which rows run, and which share a prompt.

With PPO's losses, a row whose advantages are all 0 has loss 0 and gradient 0. verl fixes the divisors of the loss
(tokens and rows of the mini-batch, number of ranks) before it splits the mini-batch. Rows that are skipped in between
change no divisor, so the gradient equals that of the whole mini-batch.

    rows_with_gradient    the rows that must run, and the rows that may be skipped
    fill_micro_batches    micro-batches of the rows that must run, within the limit of tokens
    equalize_number       as many micro-batches as the rank with the most, because FSDP's ranks run in step
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from verl.utils import tensordict_utils as tu

from verl_ext.core.row_index import dense
from verl_ext.update import SHARE_MARK, SKIP_MARK

METRICS_KEY = "verl_ext_metrics"
"""The key in the data of an update under which the split returns its metrics."""


def entry(data: Any, name: str, default: Any = None) -> Any:
    """Return an entry of a batch that has no row for each response."""
    return tu.get_non_tensor_data(data=data, key=name, default=default)


class RowLengths(NamedTuple):
    """The prompt of each row of a batch, and how many tokens its prompt and its response have."""

    prompt_ids: list[int]
    """Rows with the same number can share their prompt."""
    prompt_tokens: list[int]
    response_tokens: list[int]

    @property
    def rows(self) -> range:
        """All rows of the batch."""
        return range(len(self.prompt_ids))

    def group_by_prompt(self, rows: Iterable[int]) -> list[list[int]]:
        """Return the rows of each prompt. Prompts and rows stay in their order."""
        groups: dict[int, list[int]] = {}
        for row in rows:
            groups.setdefault(self.prompt_ids[row], []).append(row)
        return list(groups.values())

    def tokens_unshared(self, rows: Iterable[int]) -> int:
        """Return the tokens of some rows, each with its own prompt."""
        return sum(self.prompt_tokens[row] + self.response_tokens[row] for row in rows)

    def tokens_shared(self, rows: Iterable[int]) -> int:
        """Return the tokens of some rows if each different prompt occurs once."""
        tokens_of_prompt: dict[int, int] = {}
        response_tokens = 0
        for row in rows:
            tokens_of_prompt[self.prompt_ids[row]] = self.prompt_tokens[row]
            response_tokens += self.response_tokens[row]
        return sum(tokens_of_prompt.values()) + response_tokens


def read_lengths(data: Any, *, share: bool) -> RowLengths:
    """Read the lengths of the rows of a batch.

    With `share`, rows with equal tokens before the response have the same prompt. Otherwise each row has its own.
    """
    input_ids = data["input_ids"]  # nested: the tokens of a row are its prompt and its response, without padding
    row_tokens = input_ids.offsets().diff().cpu()
    prompts = data["prompts"]
    if prompts.is_nested:
        prompt_tokens = prompts.offsets().diff().cpu()
    else:  # RayPPOTrainer pads prompts on the left
        prompt_width = prompts.shape[1]
        prompt_tokens = data["attention_mask"][:, :prompt_width].sum(dim=1).cpu()
    response_tokens = row_tokens - prompt_tokens
    prompt_ids = list(range(len(row_tokens)))
    if share:
        id_of_prompt: dict[bytes, int] = {}
        tokens_of_rows = input_ids.values().cpu().split(row_tokens.tolist())
        for row, length in enumerate(prompt_tokens.tolist()):
            prompt = tokens_of_rows[row][:length].numpy().tobytes()
            prompt_ids[row] = id_of_prompt.setdefault(prompt, len(id_of_prompt))
    return RowLengths(prompt_ids, prompt_tokens.tolist(), response_tokens.tolist())


def wrap_prepare(original: Callable[..., Any], data: Any, dp_group: Any = None, **options: Any) -> Any:
    """Wrap `prepare_micro_batches(data, dp_group, ...)`: return the micro-batches, and the places of their rows.

    Passes that compute log-probabilities need all rows, so that only an update skips rows.
    """
    skip = entry(data, SKIP_MARK, False)
    share = entry(data, SHARE_MARK, False)
    is_update = "advantages" in data
    if not share and not (skip and is_update):
        return original(data=data, dp_group=dp_group, **options)
    lengths = read_lengths(data, share=share)
    if is_update:
        rows_to_run, rows_to_skip = rows_with_gradient(data, lengths, skip=skip)
    else:
        rows_to_run, rows_to_skip = [*lengths.rows], []
    micro_batches = fill_micro_batches(data, lengths, rows_to_run)
    equalize_number(micro_batches, rows_to_skip, dp_group)
    tu.assign_non_tensor_data(data, METRICS_KEY, metrics_of(lengths, micro_batches, share=share))
    # verl restores the order of the outputs by the place of each row among the rows that ran.
    rows_that_run = sorted(row for rows in micro_batches for row in rows)
    place_of_row = {row: place for place, row in enumerate(rows_that_run)}
    places = [[place_of_row[row] for row in rows] for rows in micro_batches]
    return [tu.index_select_tensor_dict(data, rows) for rows in micro_batches], places


def rows_with_gradient(data: Any, lengths: RowLengths, *, skip: bool) -> tuple[list[int], list[int]]:
    """Return the rows of an update that have a gradient, and the others.

    A row without a token in the loss has no gradient. With `skip`, a row whose advantages are all 0 has none, either.
    Some of the others fill up micro-batches. Those with tokens in the loss come first, because some losses of verl
    raise an error for a micro-batch without such tokens. Within each of these three kinds, short rows come first.
    """
    in_loss = dense(data["response_mask"]) != 0  # [row, token]
    has_tokens = in_loss.any(dim=-1)
    has_gradient = has_tokens
    if skip:
        # The mask is needed here, too, because verl's gae leaves advantages outside the mask.
        has_advantage = in_loss & (dense(data["advantages"]) != 0)
        has_gradient = has_advantage.any(dim=-1)
    with_gradient, only_tokens, without_tokens = [], [], []
    for row in sorted(lengths.rows, key=lambda row: lengths.tokens_unshared([row])):
        if has_gradient[row]:
            with_gradient.append(row)
        elif has_tokens[row]:
            only_tokens.append(row)
        else:
            without_tokens.append(row)
    return with_gradient, only_tokens + without_tokens


@dataclass
class _MicroBatch:
    rows: list[int]
    tokens_left: int


def fill_micro_batches(data: Any, lengths: RowLengths, rows: Sequence[int]) -> list[list[int]]:
    """Return the rows of each micro-batch. Without a limit of tokens, a micro-batch has a fixed number of rows.

    The prompts with the most tokens come first, each into the first micro-batch with enough tokens left.
    """
    if not entry(data, "use_dynamic_bsz", True):
        size = entry(data, "micro_batch_size_per_gpu")
        return [list(rows[start : start + size]) for start in range(0, len(rows), size)]
    limit = token_limit(data)
    micro_batches: list[_MicroBatch] = []
    prompts = sorted(lengths.group_by_prompt(rows), key=lengths.tokens_shared, reverse=True)
    for rows_of_prompt in prompts:
        for part in divide_prompt(rows_of_prompt, lengths, limit):
            tokens = lengths.tokens_shared(part)
            micro_batch = next((batch for batch in micro_batches if batch.tokens_left >= tokens), None)
            if micro_batch is None:
                micro_batch = _MicroBatch(rows=[], tokens_left=limit)
                micro_batches.append(micro_batch)
            micro_batch.rows += part
            micro_batch.tokens_left -= tokens
    return [micro_batch.rows for micro_batch in micro_batches]


def divide_prompt(rows_of_prompt: Sequence[int], lengths: RowLengths, limit: int) -> list[list[int]]:
    """Divide the rows of a prompt into parts that, each with the prompt, have at most `limit` tokens.

    A single row that exceeds the limit is a part of its own.
    """
    parts: list[list[int]] = []
    part: list[int] = []
    for row in rows_of_prompt:
        if part and lengths.tokens_shared([*part, row]) > limit:
            parts.append(part)
            part = []
        part.append(row)
    parts.append(part)
    return parts


def token_limit(data: Any) -> int:
    """Return the tokens that a micro-batch may have."""
    return int(entry(data, "max_token_len_per_gpu") * entry(data, "sp_size", 1))


def equalize_number(micro_batches: list[list[int]], rows_to_skip: list[int], dp_group: Any) -> None:
    """Bring the number of micro-batches to the largest number of a rank: FSDP's ranks wait for each other.

    The micro-batch with the most rows is halved. If each has only one row, a row that would be skipped is added. There
    is always one left, because all ranks hold equally many rows.
    """
    from verl.utils.device import get_device_name

    number = torch.tensor([max(1, len(micro_batches))], device=get_device_name())
    torch.distributed.all_reduce(number, op=torch.distributed.ReduceOp.MAX, group=dp_group)
    while len(micro_batches) < int(number):
        largest = max(micro_batches, key=len, default=[])
        half = len(largest) // 2
        if half > 0:
            micro_batches.append(largest[:half])
            del largest[:half]
        else:
            micro_batches.append([rows_to_skip.pop(0)])


def metrics_of(lengths: RowLengths, micro_batches: Sequence[Sequence[int]], *, share: bool) -> dict[str, float]:
    """Return which fractions of the rows and tokens run, and with `share` what is computed once and again."""
    rows_that_run = [row for rows in micro_batches for row in rows]
    tokens_unshared = lengths.tokens_unshared(rows_that_run)
    metrics = {
        "rows_kept": len(rows_that_run) / len(lengths.rows),
        "tokens_kept": tokens_unshared / lengths.tokens_unshared(lengths.rows),
    }
    if share:
        tokens_shared = sum(lengths.tokens_shared(rows) for rows in micro_batches)
        computed_prompts = sum(len(lengths.group_by_prompt(rows)) for rows in micro_batches)
        different_prompts = len(lengths.group_by_prompt(rows_that_run))
        metrics["prompt_tokens_saved"] = 1 - tokens_shared / tokens_unshared
        metrics["prompts_recomputed"] = float(computed_prompts - different_prompts)
    return metrics
