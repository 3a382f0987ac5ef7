"""Read and write the rollouts of verl's default trainer; only this module calls TransferQueue."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from verl_ext.core.rows import Rows
from verl_ext.integration.advantage.components import Components, token_totals
from verl_ext.integration.compat.names import SCORE, TOKEN_FIELD
from verl_ext.integration.trainers.attach import TrainerRun


def read(keys: Sequence[str], partition_id: str, fields: Sequence[str]) -> Any:
    """A TensorDict with one row per key; fields that no row has are left out."""
    import transfer_queue

    return transfer_queue.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=fields)


def write(keys: Sequence[str], partition_id: str, fields: Mapping[str, Any]) -> None:
    """Add fields to the rows, or replace them."""
    import transfer_queue
    from tensordict import TensorDict

    transfer_queue.kv_batch_put(
        keys=keys, partition_id=partition_id, fields=TensorDict(dict(fields), batch_size=len(keys))
    )


def fetch_components(batch: Any, rows: Rows, run: TrainerRun) -> Components:
    """Read the components of the scored rows from TransferQueue; nothing for a run that needs only the score.

    A reward function's result is in `extra_fields["reward_extra_info"]`; a colocated reward model's entries are fields.
    TransferQueue leaves out fields that no row has.
    """
    names, keys = list(run.settings.rewards.keys or ()), [batch.keys[row] for row in rows.scored.tolist()]
    if run.chain is not None and run.chain.needs_accuracy:
        names.append(run.settings.rewards.accuracy_key or "acc")
    labels = [key.rsplit("_", 2)[0] for key in keys]
    if not names or not keys:
        return Components(labels=labels)
    names = list(dict.fromkeys(names))
    fields = ["extra_fields", *names, *(TOKEN_FIELD + name for name in names)]
    if SCORE in names:
        fields.append("rm_scores")
    data = read(keys, batch.partition_id, fields)
    present = set(data.keys())
    extra = data.pop("extra_fields").tolist() if "extra_fields" in present else []
    infos = [entry.get("reward_extra_info") or {} for entry in extra if isinstance(entry, dict)]
    per_token = {name: data[TOKEN_FIELD + name] for name in names if TOKEN_FIELD + name in present}
    own = {name: _listed(data.pop(name)) for name in names if name in present}
    score = data["rm_scores"] if SCORE in names and SCORE not in own else None
    if not per_token and score is None:
        return Components(labels=labels, infos=infos, fields=own)
    mask = dense(read(keys, batch.partition_id, ["response_mask"])["response_mask"])
    totals = {
        name: functools.partial(token_totals, TOKEN_FIELD + name, dense(field), mask)
        for name, field in per_token.items()
    }
    if score is not None:  # the reward function returns no component of that name
        own[SCORE] = token_totals("rm_scores", dense(score), mask)
    return Components(labels=labels, token_scores=totals, infos=infos, fields=own)


def dense(field: torch.Tensor) -> torch.Tensor:
    """A field with one value per token, padded with 0."""
    return field.to_padded_tensor(0) if field.is_nested else field


def _listed(field: Any) -> Any:
    return field if isinstance(field, torch.Tensor) else field.tolist()
