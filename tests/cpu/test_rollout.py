"""The adapter in the trainer's ranks, with a server that only writes down what it is sent."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import torch
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica

from tests.facts import facts
from verl_ext.cpu.rollout import EmbeddedReplica, EmbeddedRollout
from verl_ext.errors import ConfigurationError

MEGABYTE = 1 << 18
"""Numbers in fp32."""


class Server:
    def __init__(self):
        self.buckets = []
        self.finished = []
        self.load_weights = SimpleNamespace(remote=self._load)
        self.finish_weights = SimpleNamespace(remote=self._finish)

    async def _load(self, bucket):
        self.buckets.append([name for name, _ in bucket])

    async def _finish(self, global_steps):
        self.finished.append((global_steps, len(self.buckets)))


def send(weights, **given):
    rollout = EmbeddedRollout.__new__(EmbeddedRollout)
    rollout.config = SimpleNamespace(checkpoint_engine=SimpleNamespace(update_weights_bucket_megabytes=2))
    rollout._server = Server()
    asyncio.run(rollout.update_weights(iter(weights), **given))
    return rollout._server


def test_weights_go_in_buckets_of_the_configured_size_and_the_last_is_followed_by_the_end():
    sizes = [1, 1, 1, 3, 1, 1]  # megabytes, in buckets of 2; one that is larger goes by itself
    server = send([(f"w{n}", torch.zeros(size * MEGABYTE)) for n, size in enumerate(sizes)], global_steps=4)
    assert server.buckets == [["w0", "w1"], ["w2"], ["w3"], ["w4", "w5"]]
    assert server.finished == [(4, 4)]


def test_another_format_and_unmerged_lora_are_refused():
    with pytest.raises(ConfigurationError, match=facts("'named_tensors'", "'flattened'")):
        send([], wire_format="flattened")
    with pytest.raises(ConfigurationError, match=facts("model.lora.merge=True")):
        send([], peft_config={"r": 8})


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ({"world_size": 2}, ("size 2", "tensor_model_parallel_size=1")),
        ({"is_reward_model": True}, ("only the policy",)),
        ({"is_teacher_model": True}, ("only the policy",)),
    ],
)
def test_a_replica_of_several_processes_or_of_another_model_is_refused(found, told, monkeypatch):
    members = {"world_size": 1, "is_reward_model": False, "is_teacher_model": False, **found}
    monkeypatch.setattr(RolloutReplica, "__init__", lambda self: vars(self).update(members))
    with pytest.raises(ConfigurationError, match=facts(*told)):
        EmbeddedReplica()


def test_a_rank_sends_to_the_server_of_its_own_rank_unless_told_another(monkeypatch):
    monkeypatch.setattr(BaseRollout, "__init__", lambda self, *rest: None)
    monkeypatch.setenv("RANK", "3")
    assert EmbeddedRollout(None, None, None).replica_rank == 3
    assert EmbeddedRollout(None, None, None, replica_rank=1).replica_rank == 1
