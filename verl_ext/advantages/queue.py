"""verl's TransferQueue, the store of the default trainer: read the named rewards of a batch, and write fields.

Only this module calls TransferQueue. The names of its rows are taken apart here and in `core/row_index.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from verl_ext.advantages.table import TOKEN_FIELD, Needs, Table
from verl_ext.core.batch import SCORE
from verl_ext.core.row_index import RowIndex, dense, scores, uids_of
from verl_ext.core.turn_spans import TurnSpans
from verl_ext.settings import ACCURACY


def table_of(
    keys: Sequence[str], partition_id: str, needs: Needs, *, tags: Sequence[Mapping[str, Any]] | None = None
) -> Table:
    """Read what a run needs from TransferQueue; `keys` name the rows: `{uid}_{session}_{part}`.

    A reward function's result is in `extra_fields["reward_extra_info"]`, what the agent loop wrote
    (`tool_rewards`) beside it; a colocated reward model's entries are fields. TransferQueue leaves out fields that no
    row has.
    """
    padding = [bool(tag.get("is_padding", False)) for tag in tags or ()] or [False] * len(keys)
    rows = RowIndex.of_sessions(keys, np.array(padding, dtype=bool))
    scored = [keys[row] for row in rows.scored.tolist()]
    labels = uids_of(scored)
    if not scored:
        return Table(settings=needs.settings, rows=rows, labels=labels)
    names = dict.fromkeys(needs.names)
    per_token = [TOKEN_FIELD + name for name in names] + ["rm_scores"] * needs.score
    wanted = ["extra_fields", *names, *per_token] if names or needs.returned else per_token
    data = fetch(scored, partition_id, wanted) if wanted else {}
    present = set(data.keys())
    totals, spans, cut = {}, None, None
    if not present.isdisjoint(per_token):
        mask = dense(fetch(scored, partition_id, ["response_mask"])["response_mask"])
        totals = {name: scores(dense(data[name]), mask) for name in per_token if name in present}
    if needs.turns:
        masks = fetch(keys, partition_id, ["response_mask"])["response_mask"]
        spans = TurnSpans.of(dense(masks), rows)
        cut = rows.total(masks.offsets().diff().cpu().numpy() >= needs.longest) > 0
    fields = {name: data.pop(name) for name in names if name in present}
    fields = {name: x if isinstance(x, torch.Tensor) else x.tolist() for name, x in fields.items()}
    extra = data.pop("extra_fields").tolist() if "extra_fields" in present else []
    fields |= {name: [entry.get(name) for entry in extra] for name in names if any(name in entry for entry in extra)}
    infos = [entry.get("reward_extra_info") or {} for entry in extra]
    returned = _returned_names(infos)
    return Table(
        settings=needs.settings,
        rows=rows,
        spans=spans,
        labels=labels,
        token_scores={name: totals[TOKEN_FIELD + name] for name in names if TOKEN_FIELD + name in totals},
        fields=fields | {name: [info.get(name) for info in infos] for name in returned},
        returned=returned,
        score=totals.get("rm_scores"),
        cut=cut,
    )


def _returned_names(infos: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of what the reward function returned for any response.

    A dictionary of the reward function has a `score`. One without it is the reward manager's, of a response whose
    scoring failed. The `acc` of such a response says nothing about what the function returns.
    """
    names = list(dict.fromkeys(name for info in infos for name in info))
    with_score = [info for info in infos if SCORE in info]
    if with_score and ACCURACY in names and not any(ACCURACY in info for info in with_score):
        names.remove(ACCURACY)
    return names


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
