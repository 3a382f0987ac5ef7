"""A checkpoint engine that works on the CPU, with which `separate_async` trains in tests.

verl's own checkpoint engines for a separate rollout (nccl, nixl, ...) all need an accelerator. This one sends weights
from the trainer's ranks to rollouts in other processes through Ray's queues. verl imports the module because
`SEPARATE_ASYNC` names it.
"""

from collections.abc import AsyncGenerator, Generator
from typing import Any, ClassVar

from ray.util.queue import Queue
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from verl_ext.cpu.rollout import Weight, buckets

ENGINE = "actor_rollout_ref.rollout.checkpoint_engine"
SEPARATE_ASYNC = (
    "trainer.v1.trainer_mode=separate_async",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    f"{ENGINE}.backend=ray",
    f"{ENGINE}.custom_backend_module={__name__}",
)
"""Overrides of the preset `cpu`: one rank trains, and another process generates."""


@CheckpointEngineRegistry.register("ray")
class RayCheckpointEngine(CheckpointEngine):
    """Rank 0 of the trainer puts buckets of weights, then None, into the queue of each rollout.

    verl calls the methods in the order of `CheckpointEngineManager.update_weights` (verl 0.9.0 and 0.9.1):
    `prepare`, `build_topology` in the driver, `init_process_group`, then sending and receiving at once, `finalize`.
    """

    queues_of_run: ClassVar[list[Queue]] = []
    """The driver's queues, which serve every update of the run."""

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self.bucket_size = bucket_size
        self.is_master = is_master
        self.queues: list[Queue] = []

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Rank 0 of the trainer gets every queue, its other ranks none, each rollout its own."""
        while len(cls.queues_of_run) < rollout_world_size:
            cls.queues_of_run.append(Queue(maxsize=2, actor_options={"num_cpus": 0}))
        queues = cls.queues_of_run[:rollout_world_size]
        of_other_ranks: list[list[Queue]] = [[] for _ in range(actor_wg_world_size - 1)]
        return {"queues": [queues, *of_other_ranks]}, {"queues": [[queue] for queue in queues]}

    def init_process_group(self, queues: list[Queue]) -> None:
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

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[Weight, None]:
        """Yield the weights that rank 0 sends, until its None."""
        (queue,) = self.queues
        while (bucket := await queue.get_async()) is not None:
            for weight in bucket:
                yield weight
