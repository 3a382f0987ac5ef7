"""How weights travel: from the adapter to its server, and with `separate_async` to rollouts in other processes."""

import asyncio
from types import SimpleNamespace

import pytest
import torch

from tests.end_to_end import ray_checkpoint_engine
from tests.end_to_end.ray_checkpoint_engine import RayCheckpointEngine
from verl_ext.cpu.rollout import EmbeddedRollout

FP32_NUMBERS_IN_MEGABYTE = 1 << 18


class LocalQueue(asyncio.Queue):
    """Ray's queue within one process."""

    def __init__(self, maxsize, actor_options):
        super().__init__(maxsize)
        assert actor_options == {"num_cpus": 0}  # it takes no slot that verl waits for
        self.put_async, self.get_async = self.put, self.get


@pytest.fixture
def local_queues(monkeypatch):
    """The queues of the engine, which are in this process."""
    queues = []
    monkeypatch.setattr(ray_checkpoint_engine, "Queue", LocalQueue)
    monkeypatch.setattr(RayCheckpointEngine, "queues_of_run", queues)
    return queues


async def update_weights(senders, receivers, weights):
    """Send weights once, in the order of verl's manager.

    Return what each receiver got, and the senders that have read the weights to their end.
    """
    engines = [*senders, *receivers]
    metadata = [engine.prepare() for engine in engines]
    of_senders, of_receivers = RayCheckpointEngine.build_topology(len(senders), len(receivers), metadata)
    for engine, queues in zip(engines, of_senders["queues"] + of_receivers["queues"], strict=True):
        engine.init_process_group(queues=queues)
    finished_senders = []

    def weights_of(sender):
        yield from weights
        finished_senders.append(sender)

    async def receive(engine):
        return [weight async for weight in engine.receive_weights()]

    sending = [sender.send_weights(weights_of(sender)) for sender in senders]
    receiving = [receive(receiver) for receiver in receivers]
    results = await asyncio.gather(*sending, *receiving)
    for engine in engines:
        engine.finalize()
    return results[len(senders) :], finished_senders


@pytest.mark.parametrize("bucket_size", [1, 4096])
def test_every_rollout_gets_every_weight_exactly_in_each_update(bucket_size, local_queues):
    weights = [(f"w{number}", torch.randn(10 + number, 7)) for number in range(9)]
    weights.append(("half", torch.randn(5).bfloat16()))
    # Two ranks of the trainer, of which the first sends to three rollouts.
    senders = [RayCheckpointEngine(bucket_size, is_master=rank == 0) for rank in range(2)]
    receivers = [RayCheckpointEngine(bucket_size) for _ in range(3)]

    async def update_twice():
        for _ in range(2):
            received_by_rollout, finished_senders = await update_weights(senders, receivers, weights)
            assert set(finished_senders) == set(senders)  # gathering is collective, so no rank may stop early
            for received in received_by_rollout:
                assert_equal(received, weights)

    asyncio.run(asyncio.wait_for(update_twice(), 30))
    assert len(local_queues) == len(receivers)


def assert_equal(received, weights):
    assert [name for name, _ in received] == [name for name, _ in weights]
    for (_, received_tensor), (_, tensor) in zip(received, weights, strict=True):
        assert received_tensor.dtype == tensor.dtype
        assert torch.equal(received_tensor, tensor)


class RecordingServer:
    """A server that records the names of each bucket, and the step."""

    def __init__(self):
        self.calls = []
        self.load_weights = SimpleNamespace(remote=self._load_weights)
        self.finish_weights = SimpleNamespace(remote=self._finish_weights)

    async def _load_weights(self, bucket):
        self.calls.append([name for name, _ in bucket])

    async def _finish_weights(self, global_steps):
        self.calls.append(global_steps)


def test_the_adapter_sends_buckets_of_the_configured_size_and_then_the_step():
    adapter = EmbeddedRollout.__new__(EmbeddedRollout)
    adapter.config = SimpleNamespace(checkpoint_engine=SimpleNamespace(update_weights_bucket_megabytes=2))
    adapter._server = RecordingServer()
    megabytes = {"a": 1, "b": 1, "c": 1, "d": 3, "e": 1, "f": 1}
    weights = [(name, torch.zeros(size * FP32_NUMBERS_IN_MEGABYTE)) for name, size in megabytes.items()]
    asyncio.run(adapter.update_weights(iter(weights), global_steps=4))
    # Buckets of 2 MB; a larger weight has a bucket for itself.
    assert adapter._server.calls == [["a", "b"], ["c"], ["d"], ["e", "f"], 4]
