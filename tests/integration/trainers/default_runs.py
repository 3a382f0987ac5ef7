"""Settings that the tests of the default trainer share, and a default trainer without workers.

The trainer without workers uses a queue in this process instead of TransferQueue.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import transfer_queue
from tensordict import NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.core_algos import FixedKLController
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from tests.integration.trainers.trainer_batches import PADDING, WIDTH, TrainerBatch, mask_first_prompt
from verl_ext.trainers.default_trainer import DefaultTrainer
from verl_ext.trainers.mixin import with_mixin

DRGRPO = ("algorithm.adv_estimator=drgrpo", "+algorithm.drgrpo.check_loss=False")
HADW = ("algorithm.adv_estimator=hadw", "+algorithm.hadw.eta_min=0")
GDPO = ("algorithm.adv_estimator=gdpo", "+algorithm.rewards.keys=[acc,format]")
ACC = "+algorithm.rewards.keys=[acc]"
# The batch must be a multiple of 16, so that twelve rows get four rows of padding.
PADDED = "actor_rollout_ref.actor.ppo_mini_batch_size=4"
HAS_SESSIONS = True
"""Whether a response may have several outputs."""
PARTITION = "train"


class WithoutWorkers(PPOTrainer):
    """verl's trainer with only the attributes that its advantage step reads."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.global_steps = 1
        self.local_trigger_step = 0
        self.parameter_sync_step = 1
        self.kl_ctrl_in_reward = FixedKLController(1.0)

    def on_step_end(self) -> None: ...

    def on_sample_end(self) -> None: ...


class Queue:
    """The two functions of TransferQueue that the advantage step calls, in this process."""

    def __init__(self) -> None:
        self.rows: defaultdict[str, dict[str, Any]] = defaultdict(dict)

    def kv_batch_put(self, keys: Sequence[str], partition_id: str, fields: TensorDict, **_other: Any) -> KVBatchMeta:
        for name in fields.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
            column = fields[name]
            values = column.unbind() if isinstance(column, torch.Tensor) else list(column)
            for key, value in zip(keys, values, strict=True):
                self.rows[key][name] = value
        return KVBatchMeta(keys=list(keys), tags=[{} for _ in keys], partition_id=partition_id)

    def kv_batch_get(self, keys: Sequence[str], partition_id: str, select_fields: Sequence[str]) -> TensorDict:
        rows = [self.rows[key] for key in keys]
        fields: dict[str, Any] = {}
        for name in select_fields:
            if all(name in row for row in rows):
                values = [row[name] for row in rows]
                is_tensor = isinstance(values[0], torch.Tensor)
                fields[name] = nested(values) if is_tensor else NonTensorStack(*values)
        return TensorDict(fields, batch_size=len(keys))


@contextmanager
def queue_in_this_process() -> Iterator[None]:
    """Replace TransferQueue by an empty queue in this process."""
    queue = Queue()
    with mock.patch.multiple(transfer_queue, kv_batch_put=queue.kv_batch_put, kv_batch_get=queue.kv_batch_get):
        yield


def nested(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a nested tensor of rows of different lengths."""
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def queue_fields(batch: TrainerBatch) -> dict[str, Any]:
    """Return the fields that a batch has in the queue before advantages are computed."""
    old_log_probs = torch.from_numpy(batch.kl).float()[:, None].expand(-1, WIDTH)
    token_fields = {
        "response_mask": batch.mask,
        "rm_scores": batch.on_last_tokens(batch.score),
        "token_level_scores_process": batch.process_field,
        # verl's KL estimate is the difference of the two log-probabilities.
        "old_log_probs": old_log_probs,
        "ref_log_prob": torch.zeros_like(old_log_probs),
    }
    for name, values in batch.token_fields.items():
        token_fields[name] = batch.on_last_tokens(values)
    results = [{"reward_extra_info": result} for result in batch.results]
    fields = {
        "uid": NonTensorStack(*batch.uids),
        "data_source": NonTensorStack(*batch.source),
        "extra_fields": NonTensorStack(*results),
    }
    for name, values in batch.dataset.items():
        fields[name] = NonTensorStack(*values)
    lengths = batch.length.tolist()
    for name, rows in token_fields.items():
        fields[name] = nested([row[:length] for row, length in zip(rows, lengths, strict=True)])
    return fields


def make_trainer(config: Any) -> Any:
    """Return a default trainer without workers, with the methods of verl_ext."""
    return with_mixin(DefaultTrainer, WithoutWorkers)(config)


def run_step(
    trainer: Any, batch: TrainerBatch, *, hooked: bool, empty_queue: Callable[[], Any] = queue_in_this_process
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the advantages and the metrics of a batch that is put into an empty queue.

    With `hooked`, a hook masks the first prompt.
    """
    with empty_queue(), masking_hook() if hooked else nullcontext():
        return compute_from_queue(trainer, batch)


def compute_from_queue(trainer: Any, batch: TrainerBatch) -> tuple[torch.Tensor, dict[str, Any]]:
    """Put a batch into the queue. Return the advantages `[rows, WIDTH]` that the trainer writes, and its metrics."""
    keys = batch.queue_keys
    tags = [{"is_padding": True} if prompt == PADDING else {} for prompt in batch.prompt]
    fields = TensorDict(queue_fields(batch), batch_size=len(keys))
    transfer_queue.kv_batch_put(keys=keys, partition_id=PARTITION, fields=fields, tags=tags)
    metrics: dict[str, Any] = {}
    trainer._compute_advantage(KVBatchMeta(keys=keys, tags=tags, partition_id=PARTITION), metrics)
    written = transfer_queue.kv_batch_get(keys=keys, partition_id=PARTITION, select_fields=["advantages"])
    advantages = written["advantages"].to_padded_tensor(0.0)
    missing_columns = WIDTH - advantages.shape[1]
    return torch.nn.functional.pad(advantages, (0, missing_columns)), metrics


def masking_hook(original: Any = trainer_base.compute_advantage_for_multi_trajectories) -> Any:
    """Patch verl to mask the first prompt before advantages, as a hook of `trainer.pre_advantage_hooks` may."""

    def compute_after_hook(data: Any, **options: Any) -> Any:
        return original(mask_first_prompt(data), **options)

    return mock.patch.object(trainer_base, "compute_advantage_for_multi_trajectories", compute_after_hook)
