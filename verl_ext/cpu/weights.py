"""Send weights from the trainer's ranks to rollout servers in other processes, over plain sockets.

verl's own checkpoint engines for a separate rollout (nccl, nixl, ...) all need an accelerator.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from typing import Any

import ray
import torch
import zmq
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

BACKEND = "socket"
"""The value of `actor_rollout_ref.rollout.checkpoint_engine.backend` for this engine."""


@CheckpointEngineRegistry.register(BACKEND)
class SocketCheckpointEngine(CheckpointEngine):
    """Every receiver listens; the trainer's rank 0 connects to all of them and sends buckets, then None.

    verl calls the methods in the order of `CheckpointEngineManager.update_weights` (verl 0.9.0 and 0.9.1):
    `prepare`, `build_topology`, `init_process_group`, then sending and receiving at once, and `finalize`.
    """

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self.bucket_size = bucket_size
        self.is_master = is_master
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []

    def prepare(self) -> dict[str, Any]:
        """Listen, and return the address. The trainer's ranks listen too: they do not know their role yet."""
        address = ray.util.get_node_ip_address().strip("[]")
        socket = self._context.socket(zmq.PULL)
        socket.setsockopt(zmq.LINGER, 0)
        if ":" in address:
            socket.setsockopt(zmq.IPV6, 1)
            address = f"[{address}]"
        port = socket.bind_to_random_port(f"tcp://{address}")
        self._sockets = [socket]
        return {"address": f"tcp://{address}:{port}"}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Rank 0 of the trainer gets every receiver's address, all others none."""
        receivers = [entry["address"] for entry in metadata[actor_wg_world_size:]]
        none: list[list[str]] = [[] for _ in range(actor_wg_world_size - 1)]
        return {"receivers": [receivers, *none]}, {"receivers": [[] for _ in range(rollout_world_size)]}

    def init_process_group(self, receivers: list[str]) -> None:  # type: ignore[override]
        """Connect the sender."""
        for address in receivers:
            socket = self._context.socket(zmq.PUSH)
            socket.setsockopt(zmq.SNDHWM, 2)
            if "[" in address:
                socket.setsockopt(zmq.IPV6, 1)
            socket.connect(address)
            self._sockets.append(socket)

    def finalize(self) -> None:
        """Close what `prepare` and `init_process_group` opened."""
        for socket in self._sockets:
            socket.close()
        self._sockets = []

    async def send_weights(
        self,
        weights: Generator[tuple[str, torch.Tensor], None, None],
        global_steps: int | None = None,
    ) -> None:
        """Send from rank 0; every other rank runs through the generator as well, because gathering is collective."""
        _, *receivers = self._sockets
        bucket: list[tuple[str, torch.Tensor]] = []
        size = 0
        for name, tensor in weights:
            if not receivers:
                continue
            if bucket and size + tensor.nbytes > self.bucket_size:
                await self._send(receivers, bucket)
                bucket, size = [], 0
            bucket.append((name, tensor.detach().cpu()))
            size += tensor.nbytes
        await self._send(receivers, bucket)
        await self._send(receivers, None)

    @staticmethod
    async def _send(receivers: list[zmq.Socket[bytes]], bucket: list[tuple[str, torch.Tensor]] | None) -> None:
        for socket in receivers:
            await asyncio.to_thread(socket.send_pyobj, bucket)

    async def receive_weights(  # type: ignore[override]
        self,
        global_steps: int | None = None,
    ) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield what rank 0 sends, until its None."""
        (socket,) = self._sockets
        while (bucket := await asyncio.to_thread(socket.recv_pyobj)) is not None:
            for name, tensor in bucket:
                yield name, tensor
