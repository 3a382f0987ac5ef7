"""What becomes of a run when something around the estimators goes wrong."""

from __future__ import annotations

import asyncio
import errno
import inspect
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import ray
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from tests.integration.hadw_runs import HADW, saved, state, train
from tests.integration.pipeline import Pipeline, Recording, answers_to, recording
from verl_ext.core.state import RunState
from verl_ext.errors import CheckpointError, DataError, RolloutError
from verl_ext.integration.compat import hooks
from verl_ext.integration.guards import failures, guard, workers
from verl_ext.integration.trainers import checkpoint
from verl_ext.settings import VerlExtSettings

DRGRPO = ("algorithm.adv_estimator=drgrpo", "+algorithm.drgrpo.check_loss=False", "+algorithm.rewards.keys=[acc]")
MISSING = "advantage/missing_responses"

# -- responses that do not come --------------------------------------------------------------------------------------


def test_all_responses_there_is_none_missing(pipeline: Pipeline, caplog: pytest.LogCaptureFixture) -> None:
    result = pipeline.run("worked", *DRGRPO)
    assert result.metrics[1][MISSING] == 0
    assert "missing" not in caplog.text


def test_several_outputs_of_a_session_are_one_response(pipeline: Pipeline) -> None:
    result = pipeline.run("several", *DRGRPO)
    assert len(result.updates[0].keys) > 12
    assert result.metrics[1][MISSING] == 0


LOST: dict[str, tuple[int, int, dict[str, list[float]]]] = {
    # Groups of 4, 2 and 1.
    "uneven": (5, 12, {"A": [0.75, -0.25, -0.25, -0.25], "B": [0.5, -0.5], "C": [0.0]}),
    # A prompt without any response.
    "gone": (4, 8, {"A": [0.75, -0.25, -0.25, -0.25], "B": []}),
    # The reward function raises for one response.
    "raising": (1, 8, {"A": [2 / 3, -1 / 3, -1 / 3], "B": [0.5, 0.5, -0.5, -0.5]}),
}


@pytest.mark.parametrize("scene", LOST)
def test_responses_that_did_not_come_are_left_out_counted_and_said(
    pipeline: Pipeline, scene: str, caplog: pytest.LogCaptureFixture
) -> None:
    missing, expected, advantages = LOST[scene]
    with caplog.at_level(logging.WARNING, "verl_ext"):
        result = pipeline.run(scene, *DRGRPO)
    (update,) = result.updates
    assert len(update.rows()) == expected - missing
    found = {
        name: sorted(update.advantage(row) for row in update.rows() if update.prompts[row] == name)
        for name in advantages
    }
    assert found == {name: pytest.approx(sorted(values)) for name, values in advantages.items()}
    assert result.metrics[1][MISSING] == missing
    assert f"step 1: {missing} of {expected} responses are missing" in caplog.text
    assert MISSING in caplog.text
    assert "sync_refill_failed_groups=True" in caplog.text


def test_where_nothing_came_verl_stops(pipeline: Pipeline) -> None:
    with pytest.raises(RuntimeError, match="no materializable trajectories.*sync_refill_failed_groups"):
        pipeline.run("nothing", *DRGRPO)


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
    with pytest.raises(RolloutError, match="step 7: the last 35 prompts all failed.*after 'Error in _run_prompt'"):
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
    monkeypatch.setattr(workers.dead, "__defaults__", (1.5,))  # the busy one never answers
    trainer = managed(kind, workers_)
    workers_[2].hang.remote()
    workers.require_alive(trainer, "step 1: 3 responses are missing")
    kill(workers_[1])
    with pytest.raises(RolloutError, match=f"^step 1: 3 responses are missing, and {kind} 1 died: "):
        workers.require_alive(trainer, "step 1: 3 responses are missing")


def test_a_trainer_without_workers_of_its_own_has_none_that_died() -> None:
    workers.require_alive(SimpleNamespace(reward_loop_manager=None), "step 1")


def test_a_step_without_a_worker_is_not_trained(pipeline: Pipeline, workers_: list[Any]) -> None:
    kill(workers_[0])

    class WithServers(PPOTrainer):
        llm_server_manager = SimpleNamespace(server_handles=workers_)

    died = pytest.raises(RolloutError, match="step 1: 1 responses are missing, and rollout server 0 died")
    with mock.patch.object(Recording, "_update_actor") as update, died:
        pipeline.run("raising", *DRGRPO, cls=WithServers)
    update.assert_not_called()


def test_prompts_that_fail_for_a_dead_worker_end_the_run_at_once(workers_: list[Any]) -> None:
    """verl deals rewards out at random: with one of eight workers dead no 32 prompts in a row fail."""
    buffer = Buffer()
    failures.limit(buffer, 32, ON, managed("reward worker", workers_))
    fail(buffer, 1)
    kill(workers_[1])
    fail(buffer, 1)  # not asked again yet
    with mock.patch.object(failures, "ASK_EVERY", 0), pytest.raises(RolloutError, match="1 prompts failed, and reward"):
        fail(buffer, 1)
    assert buffer.evicted == 2


def test_a_trainer_that_extends_verls_is_guarded_once(pipeline: Pipeline) -> None:
    class Mine(PPOTrainer):
        def _build_replay_buffer(self) -> Any:
            return super()._build_replay_buffer()

    buffer = recording(Mine)(pipeline.config("worked", *DRGRPO)).replay_buffer
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
    with pytest.raises(RolloutError, match="ended before its last prompt: ValueError: on purpose"):
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
    assert (
        "no response has come for 2400 s (partition train: 0 pending, 1 running, 2 finished, 3 failed prompts)" in text
    )


def test_a_response_that_comes_begins_the_wait_anew(caplog: pytest.LogCaptureFixture) -> None:
    buffer, now = Waiting(), 0.0
    failures.watch(buffer, ON, clock=lambda: now)
    for now in range(0, 3000, 290):
        buffer._wait_for_next_poll("train", 0.0)
        buffer.partitions["train"][f"running0_{now}_0"] = {}
    assert not caplog.records


# -- rewards that are not as they should be --------------------------------------------------------------------------


def test_a_reward_of_nan_is_not_scored_and_the_others_are(pipeline: Pipeline) -> None:
    result = pipeline.run("unscored", *DRGRPO)
    (update,) = result.updates
    expected = answers_to("unscored", [2 / 3, -1 / 3, -1 / 3, 0.0], [0.5, 0.5, -0.5, -0.5])
    assert update.by_answer() == pytest.approx(expected)
    assert result.metrics[1]["reward/acc/unscored"] == 1
    assert result.metrics[1][MISSING] == 0
    assert all(np.isfinite(update.advantages[row]).all() for row in range(len(update.keys)))


def test_a_reward_function_that_hangs_is_said_in_the_log(
    pipeline: Pipeline, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "QUIET", 1.0)
    with caplog.at_level(logging.WARNING, "verl_ext"):
        result = pipeline.run("hanging", *DRGRPO)
    assert "s (partition train: 0 pending, 1 running, 1 finished, 0 failed prompts)" in caplog.text
    assert "no response has come" in caplog.text
    (update,) = result.updates
    assert update.by_answer() == pytest.approx(answers_to("hanging", [0.5, -0.5, -0.5, 0.5], [0.5, 0.5, -0.5, -0.5]))


def test_a_reward_of_nan_does_not_enter_the_history(pipeline: Pipeline) -> None:
    result = pipeline.run("unscored", *HADW)
    assert result.metrics[1]["hadw/batch_accuracy"] == pytest.approx(3 / 7)


def test_a_key_that_one_sample_lacks_stops_the_run_and_names_it(pipeline: Pipeline) -> None:
    with pytest.raises(
        DataError,
        match="reward 'acc' .* is missing from 1 of 8 samples, first of uid .* has 'format', 'registered', 'score'",
    ):
        pipeline.run("other keys", *DRGRPO)


# -- a disk that is full ---------------------------------------------------------------------------------------------


def test_a_state_that_does_not_fit_leaves_the_old_one_and_says_where(tmp_path: Path) -> None:
    """A real limit of the kernel's: the file is cut off in the middle."""
    checkpoint.save(tmp_path, state(2), step=1)
    code = f"""
import resource
from verl_ext.core.history import Capability
from verl_ext.core.state import RunState
from verl_ext.integration.trainers import checkpoint
resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
run = RunState({{"hadw": {{"weigh_by_history": Capability("soft", 0.5, (0.25, 0.5), 3)}}}})
checkpoint.save({str(tmp_path)!r}, run, step=2)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert (
        f"CheckpointError: the estimators' state of step 2 cannot be saved to {tmp_path}/verl_ext.json" in done.stderr
    )
    assert [path.name for path in tmp_path.iterdir()] == ["verl_ext.json"]
    found = RunState()
    assert checkpoint.load(tmp_path, found, step=1) is True
    assert found.states == state(2).states


@pytest.mark.parametrize("call", ["pathlib.Path.write_text", "os.fsync", "os.replace"])
def test_a_disk_that_is_full_leaves_the_old_state_whichever_call_finds_out(tmp_path: Path, call: str) -> None:
    checkpoint.save(tmp_path, state(2), step=1)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with mock.patch(call, side_effect=full), pytest.raises(CheckpointError, match=f"of step 2 .*{tmp_path}.*No space"):
        checkpoint.save(tmp_path, state(3), step=2)
    assert [path.name for path in tmp_path.iterdir()] == ["verl_ext.json"]
    found = RunState()
    assert checkpoint.load(tmp_path, found, step=1) is True
    assert found.states == state(2).states


def test_a_full_disk_stops_the_run_before_verl_marks_the_checkpoint(pipeline: Pipeline, tmp_path: Path) -> None:
    replace, saves = os.replace, []

    def fail_the_second_time(*args: Any) -> None:
        saves.append(args)
        if len(saves) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(*args)

    with (
        mock.patch("verl_ext.files.os.replace", fail_the_second_time),
        pytest.raises(
            CheckpointError, match=f"of step 2 cannot be saved to {tmp_path}/global_step_2/verl_ext.json: .*No space"
        ),
    ):
        train(pipeline, tmp_path, 3)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1"
    assert saved(tmp_path, 1)["estimators"]["hadw"]["weigh_by_history"]["ticks"] == 1
    assert not list((tmp_path / "global_step_2").iterdir())
    resumed = train(pipeline, tmp_path, 3, "trainer.resume_mode=auto")
    assert sorted(resumed.metrics) == [2, 3]
    assert saved(tmp_path, 3)["estimators"]["hadw"]["weigh_by_history"]["ticks"] == 3
