"""TransferQueue in this process: the functions that verl's default trainer and its replay buffer call."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import transfer_queue
from tensordict import NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta


class Store:
    """Rows by partition and key, and their tags."""

    def __init__(self) -> None:
        self.rows: defaultdict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
        self.tags: defaultdict[str, dict[str, dict[str, Any]]] = defaultdict(dict)

    def kv_batch_put(
        self, keys: Sequence[str], partition_id: str, fields: Any = None, tags: Any = None, **_other: Any
    ) -> KVBatchMeta:
        for at, key in enumerate(keys):
            self.rows[partition_id].setdefault(key, {})
            self.tags[partition_id].setdefault(key, {})
            if tags is not None:
                self.tags[partition_id][key].update(tags[at])
        for name in list(fields.keys()) if fields is not None else ():
            for key, value in zip(keys, plain(fields[name]), strict=True):
                self.rows[partition_id][key][name] = value
        return KVBatchMeta(keys=list(keys), tags=[{} for _ in keys], partition_id=partition_id)

    def put(self, keys: Sequence[str], partition_id: str, rows: list[dict[str, Any]], tags: list[Any]) -> None:
        """Add rows, each with its own fields."""
        for key, row, tag in zip(keys, rows, tags, strict=True):
            self.rows[partition_id][key] = dict(row)
            self.tags[partition_id][key] = dict(tag)

    def kv_batch_get(
        self, keys: Sequence[str], partition_id: str, select_fields: Sequence[str] | None = None, **_other: Any
    ) -> TensorDict:
        rows = [self.rows[partition_id][key] for key in keys]
        names = list(dict.fromkeys(select_fields if select_fields is not None else (n for row in rows for n in row)))
        found = {name: stacked([row[name] for row in rows]) for name in names if all(name in row for row in rows)}
        return TensorDict(found, batch_size=len(keys))

    def kv_list(self, *_args: Any, **_other: Any) -> dict[str, dict[str, dict[str, Any]]]:
        return {partition: {key: dict(tag) for key, tag in tags.items()} for partition, tags in self.tags.items()}

    def kv_clear(self, partition_id: str, keys: Sequence[str], **_other: Any) -> None:
        for key in keys:
            self.rows[partition_id].pop(key, None)
            self.tags[partition_id].pop(key, None)


def plain(column: Any) -> list[Any]:
    """Return the entries of a column."""
    if isinstance(column, torch.Tensor) and column.is_nested:
        return list(column.values().split(column.offsets().diff().tolist()))
    if isinstance(column, torch.Tensor):
        return list(column.unbind())
    entries = column.tolist() if hasattr(column, "tolist") else list(column)
    return [getattr(entry, "data", entry) for entry in entries]


def stacked(values: list[Any]) -> Any:
    """Return the column of these values, as TransferQueue returns it."""
    if not isinstance(values[0], torch.Tensor):
        return NonTensorStack(*values)
    if values[0].ndim == 0:
        return torch.stack(values)
    lengths = torch.tensor([len(value) for value in values])
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    return torch.nested.nested_tensor_from_jagged(torch.cat(values), offsets)


@contextmanager
def in_this_process() -> Iterator[Store]:
    """Let the functions of TransferQueue use a store of this process."""
    store = Store()
    names = ("kv_batch_put", "kv_batch_get", "kv_list", "kv_clear")
    with mock.patch.multiple(transfer_queue, **{name: getattr(store, name) for name in names}):
        yield store
