"""The embedded rollout's classes for verl: a replica that launches the server, an adapter that sends it weights."""

import os
from collections.abc import Generator
from typing import Any

import ray
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica

from verl_ext.cpu.weights import Weight, buckets


def server_name(replica_rank: int) -> str:
    """The name of a replica's Ray actor."""
    return f"embedded_server_{replica_rank}"


class EmbeddedReplica(RolloutReplica):
    """One rank, one server. Follows `vLLMReplica.launch_servers` (verl 0.9.0 and 0.9.1)."""

    async def launch_servers(self) -> None:
        """Start the server on the node of its rank and wait until it has built its model."""
        from verl_ext.cpu.server import EmbeddedServer

        node_id = await self.workers[0].__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id())
        server: Any = (
            ray.remote(EmbeddedServer)
            .options(
                name=server_name(self.replica_rank),
                num_cpus=0,
                max_concurrency=self.max_concurrency,
                scheduling_strategy=ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id, soft=False),
            )
            .remote(config=self.config, model_config=self.model_config, replica_rank=self.replica_rank)
        )
        await server.__ray_ready__.remote()
        self.servers = [server]
        self._server_handle = server
        self._server_address = server_name(self.replica_rank)


class EmbeddedRollout(BaseRollout):
    """The adapter in each of the trainer's ranks, which sends the weights to the server of the same rank."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        self.is_leader_rank = True
        self._server: Any = None

    async def update_weights(
        self,
        weights: Generator[Weight, None, None],
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        **_others: Any,
    ) -> None:
        """Send all weights in buckets. Each rank reads the generator to its end, because gathering is collective."""
        if self._server is None:
            self._server = ray.get_actor(server_name(self.replica_rank))
        async for bucket in buckets(weights, self.config.checkpoint_engine.update_weights_bucket_megabytes << 20):
            await self._server.load_weights.remote(bucket)
        await self._server.finish_weights.remote(global_steps)

    async def resume(self, tags: list[str] | None = None) -> None:
        """Do nothing: the server never sleeps."""

    release = resume
