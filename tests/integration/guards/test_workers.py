"""Workers that die."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import ray
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from tests.facts import facts
from tests.integration.guards.test_failures import ON, Buffer, fail
from tests.integration.pipeline import Pipeline, Recording
from tests.integration.trainers.v1_runs import ACC, DRGRPO
from verl_ext.errors import RolloutError
from verl_ext.integration.guards import failures, workers


@ray.remote(num_cpus=0)
class Worker:
    """A worker that may hang, and that dies when it is told to."""

    def hang(self) -> None:
        time.sleep(60)

    def die(self) -> None:
        os._exit(1)


@pytest.fixture
def workers_(pipeline: Pipeline) -> Iterator[list[Any]]:
    found = [Worker.remote() for _ in range(3)]
    ray.get([worker.__ray_ready__.remote() for worker in found])
    yield found
    for worker in found:
        ray.kill(worker)


def managed(kind: str, handles: list[Any]) -> SimpleNamespace:
    manager, attribute = {
        "reward worker": ("reward_loop_manager", "reward_loop_workers"),
        "agent loop worker": ("agent_loop_manager", "agent_loop_workers"),
        "rollout server": ("llm_server_manager", "server_handles"),
        "standalone rollout server": ("standalone_server_manager", "server_handles"),
    }[kind]
    return SimpleNamespace(**{manager: SimpleNamespace(**{attribute: handles})})


def kill(worker: Any) -> None:
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(worker.die.remote())


@pytest.mark.parametrize("kind", ["reward worker", "agent loop worker", "rollout server", "standalone rollout server"])
def test_a_worker_that_died_is_named_and_one_that_is_busy_is_not(
    workers_: list[Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "dead", partial(workers.dead, patience=1.5))  # the busy one never answers
    trainer = managed(kind, workers_)
    workers_[2].hang.remote()
    workers.require_alive(trainer, "step 1: 3 responses are missing")
    kill(workers_[1])
    with pytest.raises(RolloutError, match=facts("step 1: 3 responses are missing", f"and {kind} 1 died")):
        workers.require_alive(trainer, "step 1: 3 responses are missing")


def test_a_trainer_without_workers_of_its_own_has_none_that_died() -> None:
    workers.require_alive(SimpleNamespace(reward_loop_manager=None), "step 1")


def test_a_step_without_a_worker_is_not_trained(pipeline: Pipeline, workers_: list[Any]) -> None:
    kill(workers_[0])

    class WithServers(PPOTrainer):
        llm_server_manager = SimpleNamespace(server_handles=workers_)

    died = pytest.raises(RolloutError, match=facts("step 1", "1 responses", "rollout server 0 died"))
    with mock.patch.object(Recording, "_update_actor") as update, died:
        pipeline.run("raising", *DRGRPO, ACC, cls=WithServers)
    update.assert_not_called()


def test_prompts_that_fail_for_a_dead_worker_end_the_run_at_once(workers_: list[Any]) -> None:
    """verl deals rewards out at random: with one of eight workers dead no 32 prompts in a row fail."""
    buffer = Buffer()
    failures.limit(buffer, 32, ON, managed("reward worker", workers_))
    fail(buffer, 1)
    kill(workers_[1])
    fail(buffer, 1)  # not asked again yet
    told = facts("1 prompts failed", "reward worker 1 died")
    with mock.patch.object(failures, "ASK_EVERY", 0), pytest.raises(RolloutError, match=told):
        fail(buffer, 1)
    assert buffer.evicted == 2
