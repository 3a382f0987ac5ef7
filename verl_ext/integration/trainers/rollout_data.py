"""Read and write the rollouts of verl's default trainer; only this module calls TransferQueue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


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
