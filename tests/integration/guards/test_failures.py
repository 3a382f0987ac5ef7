"""Prompts that fail, and responses that do not come, by verl's replay buffer and rollouter."""

from __future__ import annotations

import asyncio
import inspect
import logging
from typing import Any

import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from tests.facts import a_line_says, facts
from tests.integration.pipeline import Pipeline, recording
from tests.integration.trainers.v1_runs import ACC, DRGRPO
from verl_ext.errors import RolloutError
from verl_ext.integration.compat import hooks
from verl_ext.integration.guards import failures, guard
from verl_ext.settings import VerlExtSettings


class Buffer:
    """As much of verl's asynchronous replay buffer as decides on failures."""

    def __init__(self) -> None:
        self.finished_keys: dict[str, set[str]] = {"train": set(), "val": set()}
        self.evicted = 0

    def _evict_terminal_groups(self, global_steps: int, partition_id: str, eviction_reasons: Any) -> int:
        self.evicted += len(eviction_reasons[2])
        return self.evicted


def fail(buffer: Buffer, count: int, partition: str = "train") -> None:
    buffer._evict_terminal_groups(7, partition, (set(), set(), {f"u{number}" for number in range(count)}, {}))


ON = VerlExtSettings()


def test_prompts_that_all_fail_end_the_run() -> None:
    buffer = Buffer()
    buffer.finished_keys["train"] = {"early"}  # it waits for the rest of its batch
    failures.limit(buffer, 32, ON)
    for _ in range(5):  # the first finds a finished one that it had not seen, and counts none
        fail(buffer, 7)
    with pytest.raises(RolloutError, match=facts("step 7", "35 prompts", "'Error in _run_prompt'")):
        fail(buffer, 7)
    assert buffer.evicted == 35


def test_a_prompt_that_comes_through_begins_the_count_anew() -> None:
    buffer = Buffer()
    failures.limit(buffer, 32, ON)
    for number in range(10):
        fail(buffer, 31)
        buffer.finished_keys["train"] = {f"finished {number}"}
    assert buffer.evicted == 310


def test_failures_beside_prompts_that_came_through_are_no_row() -> None:
    """In one look at the buffer there is no order: half of the prompts may fail for ever."""
    buffer = Buffer()
    failures.limit(buffer, 32, ON)
    for number in range(5):
        buffer.finished_keys["train"] = {f"finished {number}"}
        fail(buffer, 40)
    assert buffer.evicted == 200


def test_a_buffer_that_lacks_what_is_counted_turns_the_guard_off_with_one_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "_off", set())
    buffer = Buffer()
    failures.limit(buffer, 32, ON)
    del buffer.finished_keys
    for _ in range(3):
        fail(buffer, 40)
    assert buffer.evicted == 120
    (record,) = (record for record in caplog.records if "watch_rollouts" in record.getMessage())
    assert "finished_keys" in record.getMessage()


def test_the_guard_can_be_switched_off() -> None:
    buffer = Buffer()
    failures.limit(buffer, 32, VerlExtSettings(watch_rollouts=False))
    for _ in range(3):
        fail(buffer, 40)
    assert buffer.evicted == 120


def test_validation_is_not_counted() -> None:
    buffer = Buffer()
    failures.limit(buffer, 32, ON)
    fail(buffer, 100, "val")
    assert buffer.evicted == 100


def test_a_trainer_that_extends_verls_is_guarded_once(pipeline: Pipeline) -> None:
    class Mine(PPOTrainer):
        def _build_replay_buffer(self) -> Any:
            return super()._build_replay_buffer()

    buffer = recording(Mine)(pipeline.config("worked", *DRGRPO, ACC)).replay_buffer
    assert buffer._evict_terminal_groups.__name__ == "evict_and_count"
    inside = inspect.getclosurevars(buffer._evict_terminal_groups).nonlocals
    assert inside["evict"].__name__ == "_evict_terminal_groups"
    counting = inspect.getclosurevars(inside["count"]).nonlocals
    assert counting["most"] == 32


def test_a_buffer_of_the_users_own_is_said_not_to_be_watched(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "verl_ext"):
        failures.watch_buffer(Buffer(), None, ON)
    assert f"{Buffer.__module__}.Buffer" in caplog.text


def test_a_failed_rollout_ends_the_fully_asynchronous_trainer_with_an_error() -> None:
    class Rollouter:
        """As much of verl's as runs and swallows."""

        config = OmegaConf.create({"algorithm": {"adv_estimator": "hadw"}})
        fails = True

        async def _streaming_generation_main(self) -> None:
            if self.fails:
                raise ValueError("on purpose")

        async def fit(self) -> None:
            await asyncio.gather(self._streaming_generation_main(), return_exceptions=True)

    hooks.wrap(Rollouter, "_streaming_generation_main", failures.wrap_generation)
    hooks.wrap(Rollouter, "fit", failures.wrap_rollouter_fit)
    with pytest.raises(RolloutError, match=facts("ValueError: on purpose")):
        asyncio.run(Rollouter().fit())
    well, other = Rollouter(), Rollouter()
    well.fails = False
    asyncio.run(well.fit())
    other.config = OmegaConf.create({"algorithm": {"adv_estimator": "grpo"}})
    asyncio.run(other.fit())


class Waiting(Buffer):
    """One of two prompts' responses are there."""

    def __init__(self) -> None:
        super().__init__()
        states = ("pending", "running", "finished", "failure")
        self.pending_keys, self.running_keys, self.finished_keys, self.failure_keys = (
            {"train": {f"{state}{number}" for number in range(count)}} for count, state in enumerate(states)
        )
        self.partitions: dict[str, dict[str, Any]] = {"train": {}}

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        return last_debug_time + 1


def test_a_long_wait_is_said_less_and_less_often(caplog: pytest.LogCaptureFixture) -> None:
    buffer, now = Waiting(), 0.0
    failures.watch(buffer, ON, clock=lambda: now)
    said = []
    for now in range(0, 3000, 10):
        assert buffer._wait_for_next_poll("train", 5.0) == 6.0
        if caplog.records:
            said.append(now)
            text = caplog.text
            caplog.clear()
    assert said == [300, 600, 1200, 2400]
    assert a_line_says(text, "2400 s", "partition train", "0 pending", "1 running", "2 finished", "3 failed")


def test_a_response_that_comes_begins_the_wait_anew(caplog: pytest.LogCaptureFixture) -> None:
    buffer, now = Waiting(), 0.0
    failures.watch(buffer, ON, clock=lambda: now)
    for now in range(0, 3000, 290):
        buffer._wait_for_next_poll("train", 0.0)
        buffer.partitions["train"][f"running0_{now}_0"] = {}
    assert not caplog.records
