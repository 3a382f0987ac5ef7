from __future__ import annotations

import asyncio

import pytest
import torch

from verl_ext.cpu.weights import SocketCheckpointEngine


def transfer(weights, *, receivers, bucket_size, ranks=2):
    """One update in the order of verl's manager: `ranks` trainers, of which the first sends."""
    senders = [SocketCheckpointEngine(bucket_size, is_master=rank == 0) for rank in range(ranks)]
    takers = [SocketCheckpointEngine(bucket_size) for _ in range(receivers)]
    metadata = [engine.prepare() for engine in senders + takers]
    actor, rollout = SocketCheckpointEngine.build_topology(ranks, receivers, metadata)
    for engine, addresses in zip(senders + takers, actor["receivers"] + rollout["receivers"], strict=True):
        engine.init_process_group(receivers=addresses)
    drained = []

    def generator(rank):
        yield from weights
        drained.append(rank)

    async def take(engine):
        return [item async for item in engine.receive_weights()]

    async def both():
        sending = [engine.send_weights(generator(rank)) for rank, engine in enumerate(senders)]
        return (await asyncio.gather(*sending, *(take(engine) for engine in takers)))[ranks:]

    taken = asyncio.run(asyncio.wait_for(both(), 30))
    for engine in senders + takers:
        engine.finalize()
    assert sorted(drained) == list(range(ranks))  # gathering is collective: no rank may stop early
    return taken


@pytest.mark.parametrize("bucket_size", [1, 4096, 1 << 20])
@pytest.mark.parametrize("receivers", [1, 3])
def test_every_receiver_gets_every_weight_exactly(receivers, bucket_size):
    weights = [(f"w{number}", torch.randn(10 + number, 7)) for number in range(9)]
    weights.append(("half", torch.randn(5).bfloat16()))
    for taken in transfer(weights, receivers=receivers, bucket_size=bucket_size):
        assert [name for name, _ in taken] == [name for name, _ in weights]
        assert all(torch.equal(a, b) and a.dtype == b.dtype for (_, a), (_, b) in zip(taken, weights, strict=True))


def test_a_second_update_works_after_finalize():
    for value in (1.0, 2.0):
        ((taken,),) = transfer([("w", torch.full((2,), value))], receivers=1, bucket_size=64)
        assert taken[1].tolist() == [value, value]


def test_rank_0_gets_the_receivers_and_nobody_else_an_address():
    metadata = [{"address": name} for name in ("rank 0", "rank 1", "receiver 0", "receiver 1")]
    assert SocketCheckpointEngine.build_topology(2, 2, metadata) == (
        {"receivers": [["receiver 0", "receiver 1"], []]},
        {"receivers": [[], []]},
    )


def test_finalize_closes_every_socket():
    taker, sender = SocketCheckpointEngine(64), SocketCheckpointEngine(64, is_master=True)
    address = taker.prepare()["address"]
    sender.prepare()
    sender.init_process_group([address])
    sockets = [*taker._sockets, *sender._sockets]
    for engine in (taker, sender):
        engine.finalize()
    assert [socket.closed for socket in sockets] == [True] * 3
