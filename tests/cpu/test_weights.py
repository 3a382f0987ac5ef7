"""The ways of the weights: from the trainer's ranks to a rollout elsewhere, and from the adapter to its server."""

import asyncio
from types import SimpleNamespace

import pytest
import torch

from verl_ext.cpu import weights as module
from verl_ext.cpu.rollout import EmbeddedRollout
from verl_ext.cpu.weights import RayCheckpointEngine

MEGABYTE = 1 << 18
"""Numbers in fp32."""


class Queue(asyncio.Queue):
    """Ray's queue within one process."""

    def __init__(self, maxsize, actor_options):
        super().__init__(maxsize)
        assert actor_options == {"num_cpus": 0}  # it takes no slot that verl waits for
        self.put_async, self.get_async = self.put, self.get


@pytest.mark.parametrize("bucket_size", [1, 4096])
def test_every_rollout_gets_every_weight_exactly_in_each_update(bucket_size, monkeypatch):
    monkeypatch.setattr(module, "Queue", Queue)
    monkeypatch.setattr(RayCheckpointEngine, "kept", [])
    weights = [(f"w{number}", torch.randn(10 + number, 7)) for number in range(9)]
    weights.append(("half", torch.randn(5).bfloat16()))
    ranks, receivers = 2, 3
    senders = [RayCheckpointEngine(bucket_size, is_master=rank == 0) for rank in range(ranks)]
    takers = [RayCheckpointEngine(bucket_size) for _ in range(receivers)]

    async def update():
        """In the order of verl's manager: two trainers, of which the first sends."""
        metadata = [engine.prepare() for engine in senders + takers]
        actor, rollout = RayCheckpointEngine.build_topology(ranks, receivers, metadata)
        for engine, queues in zip(senders + takers, actor["queues"] + rollout["queues"], strict=True):
            engine.init_process_group(queues=queues)
        drained = []

        def generator(rank):
            yield from weights
            drained.append(rank)

        async def take(engine):
            return [item async for item in engine.receive_weights()]

        sending = [engine.send_weights(generator(rank)) for rank, engine in enumerate(senders)]
        taken = (await asyncio.gather(*sending, *(take(engine) for engine in takers)))[ranks:]
        for engine in senders + takers:
            engine.finalize()
        assert sorted(drained) == list(range(ranks))  # gathering is collective: no rank may stop early
        for found in taken:
            assert [name for name, _ in found] == [name for name, _ in weights]
            assert all(torch.equal(a, b) and a.dtype == b.dtype for (_, a), (_, b) in zip(found, weights, strict=True))

    async def twice():
        await update()
        await update()

    asyncio.run(asyncio.wait_for(twice(), 30))
    assert len(RayCheckpointEngine.kept) == receivers


def test_the_adapter_sends_buckets_of_the_configured_size_and_then_the_end():
    rollout = EmbeddedRollout.__new__(EmbeddedRollout)
    rollout.config = SimpleNamespace(checkpoint_engine=SimpleNamespace(update_weights_bucket_megabytes=2))
    sent = []

    async def load(bucket):
        sent.append([name for name, _ in bucket])

    async def finish(global_steps):
        sent.append(global_steps)

    methods = {"load_weights": load, "finish_weights": finish}
    rollout._server = SimpleNamespace(**{name: SimpleNamespace(remote=method) for name, method in methods.items()})
    megabytes = [1, 1, 1, 3, 1, 1]  # in buckets of 2; one that is larger goes by itself
    weights = [(f"w{number}", torch.zeros(size * MEGABYTE)) for number, size in enumerate(megabytes)]
    asyncio.run(rollout.update_weights(iter(weights), global_steps=4))
    assert sent == [["w0", "w1"], ["w2"], ["w3"], ["w4", "w5"], 4]
