"""Send weights from the trainer's ranks to rollouts in other processes, through Ray's queues.

verl's own checkpoint engines for a separate rollout (nccl, nixl, ...) all need an accelerator.
"""

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Generator, Iterable
from typing import Any, ClassVar

import torch
from ray.util.queue import Queue
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout.utils import ensure_async_iterator

Weight = tuple[str, torch.Tensor]


async def buckets(weights: Iterable[Weight] | AsyncIterable[Weight], max_bytes: int) -> AsyncIterator[list[Weight]]:
    """Yield lists of weights with at most `max_bytes` bytes each; a larger weight has a list for itself."""
    bucket: list[Weight] = []
    size = 0
    async for name, tensor in ensure_async_iterator(weights):
        if bucket and size + tensor.nbytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor.detach().cpu()))
        size += tensor.nbytes
    yield bucket


@CheckpointEngineRegistry.register("ray")
class RayCheckpointEngine(CheckpointEngine):
    """Rank 0 of the trainer puts buckets of weights, then None, into the queue of each rollout.

    verl calls the methods in the order of `CheckpointEngineManager.update_weights` (verl 0.9.0 and 0.9.1):
    `prepare`, `build_topology` in the driver, `init_process_group`, then sending and receiving at once, `finalize`.
    """

    kept: ClassVar[list[Queue]] = []
    """The driver's queues, which serve every update of the run."""

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self.bucket_size = bucket_size
        self.is_master = is_master
        self.queues: list[Queue] = []

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build_topology(
        cls,
        actor_wg_world_size: int,
        rollout_world_size: int,
        metadata: list[dict[str, Any]],  # noqa: ARG003
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Rank 0 of the trainer gets every queue, its other ranks none, each rollout its own."""
        while len(cls.kept) < rollout_world_size:
            cls.kept.append(Queue(maxsize=2, actor_options={"num_cpus": 0}))
        queues = cls.kept[:rollout_world_size]
        none: list[list[Queue]] = [[] for _ in range(actor_wg_world_size - 1)]
        return {"queues": [queues, *none]}, {"queues": [[queue] for queue in queues]}

    def init_process_group(self, queues: list[Queue]) -> None:  # type: ignore[override]
        self.queues = queues

    def finalize(self) -> None:
        self.queues = []

    async def send_weights(self, weights: Generator[Weight, None, None], global_steps: int | None = None) -> None:
        """Send from rank 0; the other ranks read the generator to its end as well, because gathering is collective."""
        async for bucket in buckets(weights, self.bucket_size):
            for queue in self.queues:
                await queue.put_async(bucket)
        for queue in self.queues:
            await queue.put_async(None)

    async def receive_weights(  # type: ignore[override]
        self, global_steps: int | None = None
    ) -> AsyncGenerator[Weight, None]:
        """Yield the weights that rank 0 sends, until its None."""
        (queue,) = self.queues
        while (bucket := await queue.get_async()) is not None:
            for weight in bucket:
                yield weight
