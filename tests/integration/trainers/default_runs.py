"""Settings that the tests of the default trainer share, and one without workers, over a queue in this process."""

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

from tests.integration.trainers.drawn import WIDTH, Drawn, mask_first_prompt
from verl_ext.trainers.default_trainer import DefaultTrainer
from verl_ext.trainers.mixin import with_mixin

DRGRPO = ("algorithm.adv_estimator=drgrpo", "+algorithm.drgrpo.check_loss=False")
HADW = ("algorithm.adv_estimator=hadw", "+algorithm.hadw.eta_min=0")
GDPO = ("algorithm.adv_estimator=gdpo", "+algorithm.rewards.keys=[acc,format]")
ACC = "+algorithm.rewards.keys=[acc]"
# Twelve rows, and a batch that must be a multiple of 16: four rows of padding.
PADDED = "actor_rollout_ref.actor.ppo_mini_batch_size=4"
SESSIONS = True
"""Whether responses may have several outputs."""
PARTITION = "train"


class Light(PPOTrainer):
    """verl's trainer, with what its advantage step reads."""

    def __init__(self, config: Any) -> None:
        self.config, self.global_steps, self.local_trigger_step, self.parameter_sync_step = config, 1, 0, 1
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
        found = {}
        for name in select_fields:
            if all(name in row for row in rows):
                values = [row[name] for row in rows]
                found[name] = nested(values) if isinstance(values[0], torch.Tensor) else NonTensorStack(*values)
        return TensorDict(found, batch_size=len(keys))


@contextmanager
def in_this_process() -> Iterator[None]:
    own = Queue()
    with mock.patch.multiple(transfer_queue, kv_batch_put=own.kv_batch_put, kv_batch_get=own.kv_batch_get):
        yield


def nested(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def fields_of(drawn: Drawn) -> dict[str, Any]:
    extra = [{"reward_extra_info": result} for result in drawn.results]
    kl = torch.from_numpy(drawn.kl).float()[:, None].expand(-1, WIDTH)
    tokens = {
        "response_mask": drawn.mask,
        "rm_scores": drawn.ends(drawn.score),
        "token_level_scores_process": drawn.process_field,
        "old_log_probs": kl,
        "ref_log_prob": torch.zeros_like(kl),
        **{name: drawn.ends(values) for name, values in drawn.token_fields.items()},
    }
    lengths = drawn.length.tolist()
    return {
        "uid": NonTensorStack(*drawn.uids),
        "data_source": NonTensorStack(*drawn.source),
        "extra_fields": NonTensorStack(*extra),
        **{name: NonTensorStack(*values) for name, values in drawn.dataset.items()},
        **{
            name: nested([row[:length] for row, length in zip(field, lengths, strict=True)])
            for name, field in tokens.items()
        },
    }


def made(config: Any) -> Any:
    return with_mixin(DefaultTrainer, Light)(config)


def step(
    trainer: Any, drawn: Drawn, *, hooked: bool, empty: Callable[[], Any] = in_this_process
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The advantages and the metrics of a batch that is put into an empty queue."""
    with empty(), hook() if hooked else nullcontext():
        return computed(trainer, drawn)


def computed(trainer: Any, drawn: Drawn) -> tuple[torch.Tensor, dict[str, Any]]:
    tags = [{"is_padding": True} if prompt < 0 else {} for prompt in drawn.prompt]
    batch = KVBatchMeta(keys=drawn.names, tags=tags, partition_id=PARTITION)
    fields = TensorDict(fields_of(drawn), batch_size=len(drawn.prompt))
    transfer_queue.kv_batch_put(keys=drawn.names, partition_id=PARTITION, fields=fields, tags=tags)
    metrics: dict[str, Any] = {}
    trainer._compute_advantage(batch, metrics)
    after = transfer_queue.kv_batch_get(keys=drawn.names, partition_id=PARTITION, select_fields=["advantages"])
    padded = after["advantages"].to_padded_tensor(0.0)
    return torch.nn.functional.pad(padded, (0, WIDTH - padded.shape[1])), metrics


def hook(original: Any = trainer_base.compute_advantage_for_multi_trajectories) -> Any:
    """Run a hook of `trainer.pre_advantage_hooks` in the place of verl's next releases."""
    return mock.patch.object(
        trainer_base,
        "compute_advantage_for_multi_trajectories",
        lambda data, **more: original(mask_first_prompt(data), **more),
    )
