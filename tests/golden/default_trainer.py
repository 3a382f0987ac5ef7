"""The advantages of verl's default trainer: `PPOTrainer._compute_advantage` of a trainer without workers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import transfer_queue
from tensordict import NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.core_algos import FixedKLController
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from tests.golden.cases import WIDTH, Case, Outcome, Rows, checksum, per_row
from tests.golden.configs import config_for
from verl_ext.integration import hooks
from verl_ext.integration.default_trainer import DefaultTrainer

PARTITION = "train"
OF_VERL = "actor/"


class Light(PPOTrainer):
    """verl's trainer, with what its advantage step reads."""

    def __init__(self, config: Any) -> None:
        self.config, self.global_steps = config, 1
        self.kl_ctrl_in_reward = FixedKLController(1.0)

    def on_step_end(self) -> None: ...

    def on_sample_end(self) -> None: ...


Trainer: Any = hooks.under(DefaultTrainer, Light)


class Queue:
    """The two functions of TransferQueue that the advantage step calls, in this process."""

    def __init__(self) -> None:
        self.rows: defaultdict[tuple[str, str], dict[str, Any]] = defaultdict(dict)

    def kv_batch_put(self, keys: Sequence[str], partition_id: str, fields: TensorDict, **_other: Any) -> KVBatchMeta:
        for name in fields.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
            column = fields[name]
            values = column.unbind() if isinstance(column, torch.Tensor) else list(column)
            for key, value in zip(keys, values, strict=True):
                self.rows[partition_id, key][name] = value
        return KVBatchMeta(keys=list(keys), tags=[{} for _ in keys], partition_id=partition_id)

    def kv_batch_get(self, keys: Sequence[str], partition_id: str, select_fields: Sequence[str]) -> TensorDict:
        rows = [self.rows[partition_id, key] for key in keys]
        found = {}
        for name in select_fields:
            if all(name in row for row in rows):
                values = [row[name] for row in rows]
                tensors = isinstance(values[0], torch.Tensor)
                found[name] = nested(values) if tensors else NonTensorStack(*values)
        return TensorDict(found, batch_size=len(keys))


@contextmanager
def queue() -> Iterator[None]:
    """No Ray: rows are kept in this process."""
    own = Queue()
    with mock.patch.multiple(transfer_queue, kv_batch_put=own.kv_batch_put, kv_batch_get=own.kv_batch_get):
        yield


def through_default_trainer(case: Case, queue: Callable[[], Any] = queue) -> list[Outcome]:
    """Advantages and metrics; the outputs of a session are one trajectory."""
    trainer, found = Trainer(config_for(case)), []
    for rows in case.batches:
        with queue():
            found.append(step(trainer, case, rows))
    return found


def step(trainer: Any, case: Case, rows: Rows) -> Outcome:
    tags = [{"is_padding": True} if padding else {} for padding in rows.padding]
    batch = KVBatchMeta(keys=rows.keys, tags=tags, partition_id=PARTITION)
    fields = TensorDict(fields_of(case, rows), batch_size=len(rows))
    transfer_queue.kv_batch_put(keys=rows.keys, partition_id=PARTITION, fields=fields, tags=tags)
    metrics: dict[str, Any] = {}
    trainer._compute_advantage(batch, metrics)
    names = ["advantages", *(f"token_level_scores_{key}" for key in case.keys or ())]
    after = transfer_queue.kv_batch_get(keys=rows.keys, partition_id=PARTITION, select_fields=names)
    ours = {name: float(value) for name, value in metrics.items() if not name.startswith(OF_VERL)}
    written = {name: checksum(padded(after[name])) for name in names[1:] if name in set(after.keys())}
    return Outcome(per_row(padded(after["advantages"]), rows.mask), ours | written)


def fields_of(case: Case, rows: Rows) -> dict[str, Any]:
    infos = case.infos(rows)
    extra = [
        {"reward_extra_info": {key: float(column[row]) for key, column in infos.items()}} for row in range(len(rows))
    ]
    kl = rows.kl_tokens
    tokens = {
        "response_mask": rows.mask,
        "rm_scores": rows.scores,
        "old_log_probs": kl,
        "ref_log_prob": torch.zeros_like(kl),
        **case.token_fields(rows),
    }
    return {
        "uid": NonTensorStack(*rows.uids),
        "extra_fields": NonTensorStack(*extra),
        **{name: jagged(field, rows) for name, field in tokens.items()},
    }


def jagged(field: torch.Tensor, rows: Rows) -> torch.Tensor:
    return nested([row[:length] for row, length in zip(field, rows.length.tolist(), strict=True)])


def nested(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def padded(field: torch.Tensor) -> torch.Tensor:
    """A field of the queue, as wide as the longest response."""
    dense = field.to_padded_tensor(0) if field.is_nested else field
    return torch.nn.functional.pad(dense, (0, WIDTH - dense.shape[1]))
