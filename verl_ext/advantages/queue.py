"""Read the rewards of a batch from verl's TransferQueue, the store of the default trainer, and write fields to it.

Only this module calls TransferQueue. A row of the queue is one output of a response. Its name is
`{uid}_{session}_{number of the output}`, and a session is one trajectory, whose last output has the rewards. A reward
is in one of these places:

- a field `token_level_scores_<key>` with a value per token, of a process reward model;
- the field `extra_fields`, a dictionary. Its entry `reward_extra_info` is what the reward function returned. Other
  entries are what the agent loop wrote, for example `tool_rewards`;
- a field of its own, of a colocated reward model.

The trainer's score is the sum of the field `rm_scores`, which has a value per token.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from verl_ext.advantages.table import TOKEN_FIELD, Request, Table
from verl_ext.core.batch import SCORE
from verl_ext.core.groups import Array
from verl_ext.core.row_index import RowIndex, TurnSpans, dense, scores, uids_of
from verl_ext.settings import ACCURACY

TRAINER_SCORE = "rm_scores"
EXTRA = "extra_fields"
MASK = "response_mask"


def read_table(
    row_keys: Sequence[str], partition_id: str, request: Request, *, tags: Sequence[Mapping[str, Any]] | None = None
) -> Table:
    """Read what a run needs of these rows of the queue. `tags` has the tags of each row, which mark the padding."""
    is_padding = [bool(tag.get("is_padding", False)) for tag in tags or [{}] * len(row_keys)]
    rows = RowIndex.of_sessions(row_keys, np.array(is_padding, dtype=bool))
    scored_row_keys = [row_keys[row] for row in rows.scored.tolist()]  # the last output of each session
    table = Table(settings=request.settings, row_index=rows, labels=uids_of(scored_row_keys))
    if not scored_row_keys:
        return table
    _add_rewards(table, scored_row_keys, partition_id, request)
    if request.turns:
        _add_turns(table, row_keys, partition_id, request.max_response_length)
    return table


def _add_rewards(table: Table, scored_row_keys: Sequence[str], partition_id: str, request: Request) -> None:
    """Read the rewards and fields that a run needs from the rows that carry the scores."""
    names = list(dict.fromkeys(request.names))
    token_names = [TOKEN_FIELD + name for name in names]
    if request.score:
        token_names.append(TRAINER_SCORE)
    wanted = list(token_names)
    if names or request.all_results:
        wanted += [EXTRA, *names]
    fields = fetch(scored_row_keys, partition_id, wanted) if wanted else {}  # without the fields that no row has

    present = set(fields.keys())
    token_level = {name: fields[name] for name in token_names if name in present}
    if token_level:
        sums = _sums_of_token_fields(token_level, scored_row_keys, partition_id)
        table.score = sums.pop(TRAINER_SCORE, None)
        table.token_scores = {name.removeprefix(TOKEN_FIELD): values for name, values in sums.items()}

    extra_fields = _values_of(fields, EXTRA) if EXTRA in present else []
    columns = {name: _values_of(fields, name) for name in names if name in present and name != EXTRA}
    table.fields = columns | _from_agent_loop(extra_fields, names)
    table.results = _from_reward_function(extra_fields)


def _add_turns(table: Table, row_keys: Sequence[str], partition_id: str, max_response_length: int) -> None:
    """Read where the turns are in these rows of the queue. A trajectory is truncated if one of its outputs is."""
    masks = fetch(row_keys, partition_id, [MASK])[MASK]
    table.spans = TurnSpans.of(dense(masks), table.row_index)
    tokens_of_row = masks.offsets().diff().cpu().numpy()
    truncated_outputs = table.row_index.total(tokens_of_row >= max_response_length)
    table.truncated = truncated_outputs > 0


def _sums_of_token_fields(
    token_level: Mapping[str, torch.Tensor], row_keys: Sequence[str], partition_id: str
) -> dict[str, Array]:
    """Return `[T]` the sum of each field with a value per token."""
    mask = dense(fetch(row_keys, partition_id, [MASK])[MASK])
    return {name: scores(dense(values), mask) for name, values in token_level.items()}


def _from_agent_loop(extra_fields: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, list[Any]]:
    """Return what the agent loop wrote under these names, None for a response without the entry."""
    written = {name for entries in extra_fields for name in entries}
    return {name: [entries.get(name) for entries in extra_fields] for name in names if name in written}


def _from_reward_function(extra_fields: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return what the reward function returned, None for a response without the entry.

    A dictionary of the reward function has a `score`. A dictionary without `score` is the reward manager's, of a
    response whose scoring failed. Its `acc` does not mean that the reward function returns an accuracy:

    >>> scored = {"reward_extra_info": {"score": 1.0, "format": 0.5}}
    >>> failed = {"reward_extra_info": {"acc": 0.0, "timeout": True}}
    >>> _from_reward_function([scored, failed])
    {'score': [1.0, None], 'format': [0.5, None], 'timeout': [None, True]}
    """
    results = [entries.get("reward_extra_info") or {} for entries in extra_fields]
    names = list(dict.fromkeys(name for result in results for name in result))
    names_with_score = {name for result in results if SCORE in result for name in result}
    if names_with_score and ACCURACY in names and ACCURACY not in names_with_score:
        names.remove(ACCURACY)
    return {name: [result.get(name) for result in results] for name in names}


def _values_of(fields: Any, name: str) -> Any:
    """Return the values of a field: a tensor as it is, and objects as a list."""
    values = fields.pop(name)  # unlike `[]`, `pop` returns objects with `tolist`
    return values if isinstance(values, torch.Tensor) else values.tolist()


def fetch(keys: Sequence[str], partition_id: str, fields: Sequence[str]) -> Any:
    """Read a TensorDict with one row per key."""
    import transfer_queue

    return transfer_queue.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=fields)


def write(keys: Sequence[str], partition_id: str, fields: Mapping[str, Any]) -> None:
    """Add fields to the rows, or replace them."""
    import transfer_queue
    from tensordict import TensorDict

    transfer_queue.kv_batch_put(
        keys=keys, partition_id=partition_id, fields=TensorDict(dict(fields), batch_size=len(keys))
    )
