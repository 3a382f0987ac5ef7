"""verl's asynchronous trainers on the CPU: each estimator, and hadw's history over a restart.

What a step trains on depends on which answers were ready, so no two runs are alike; the history is checked by its
count and by the values that a resumed run carries on.
"""

from __future__ import annotations

import pytest

from tests.end_to_end.test_training import TIMEOUT, state

pytestmark = [pytest.mark.end_to_end, pytest.mark.slow]

ESTIMATORS = {
    "gdpo": ("algorithm.rewards.keys=[score,length]",),
    "dgpo": ("algorithm.rewards.accuracy_threshold=0",),
    "hadw": ("algorithm.rewards.accuracy_threshold=0",),
    "drgrpo": (),
}
# Preset, overrides, and the updates of one step.
MODES = {
    "colocate": ("cpu", ("trainer.v1.trainer_mode=colocate_async",), 1),
    "separate, 2": ("cpu,separate_async", ("trainer.v1.separate_async.parameter_sync_step=2",), 2),
    "separate, 4": ("cpu,separate_async", ("trainer.v1.separate_async.parameter_sync_step=4",), 4),
}


def settings(mode, estimator):
    preset, overrides, updates = MODES[mode]
    name = f"algorithm.adv_estimator={estimator}"
    batch = f"data.train_batch_size={8 * updates}"
    return f"[{preset},{estimator}]", (name, batch, *overrides, *ESTIMATORS[estimator]), updates


@pytest.mark.parametrize("mode", ["colocate", "separate, 2"])
@pytest.mark.parametrize("estimator", ["gdpo", "dgpo", "drgrpo"])
def test_each_estimator_trains(start, mode, estimator):
    preset, overrides, _ = settings(mode, estimator)
    run = start("run", *overrides, steps=3, configuration=preset)
    assert run.wait(TIMEOUT) == 0, run.tail()
    assert len(run.column("advantage/std")) == 3
    assert min(run.column("advantage/std")) > 0
    assert run.column("advantage/missing_responses") == [0, 0, 0]


@pytest.mark.parametrize("mode", list(MODES))
def test_the_history_ticks_once_an_update_and_goes_on_after_a_restart(start, mode):
    preset, overrides, updates = settings(mode, "hadw")
    first = start("run", *overrides, "trainer.save_freq=1", steps=1, configuration=preset)
    assert first.wait(TIMEOUT) == 0, first.tail()
    before = history(first, 1)
    assert before["ticks"] == updates
    again = start("run", *overrides, "trainer.save_freq=1", steps=2, configuration=preset)
    assert again.wait(TIMEOUT) == 0, again.tail()
    assert sorted(again.metrics) == [2]
    after = history(again, 2)
    assert after["ticks"] == 2 * updates
    assert after["window"][: len(before["window"])] == before["window"]
    # verl logs the mean over the updates of a step.
    assert again.column("hadw/tick") == [updates + (1 + updates) / 2]


def history(run, step):
    return state(run, step)["hadw"]["weigh_by_history"]


# -- verl/experimental -----------------------------------------------------------------------------------------------

APART = (
    "rollout.nnodes=1",
    "rollout.n_gpus_per_node=1",
    "actor_rollout_ref.hybrid_engine=False",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=ray",
)
EXPERIMENTAL = {
    # verl's own search path is relative to a clone of its repository.
    "one_step_off": ("one_step_off_policy.main_ppo", ("hydra.searchpath=[pkg://verl.trainer.config]", *APART)),
    "fully_async": (
        "fully_async_policy.fully_async_main",
        (
            *APART,
            "data.train_batch_size=0",
            "rollout.n=4",
            "async_training.trigger_parameter_sync_step=2",
            "async_training.staleness_threshold=0.5",
            "trainer.test_freq=-1",
        ),
    ),
}
# Prompts of one update, and updates between two versions of the weights.
PROMPTS, UPDATES = 8, 2


def begin(start, mode, estimator, *more, steps):
    program, overrides = EXPERIMENTAL[mode]
    if mode == "fully_async":  # it counts prompts, not steps
        more += (f"rollout.total_rollout_steps={steps * UPDATES * PROMPTS}",)
    return start(
        "run",
        *overrides,
        f"algorithm.adv_estimator={estimator}",
        *ESTIMATORS[estimator],
        *more,
        steps=steps,
        configuration=f"[cpu,{estimator}]",
        program=f"verl.experimental.{program}",
    )


@pytest.mark.parametrize("estimator", ["gdpo", "dgpo", "drgrpo"])
@pytest.mark.parametrize(("mode", "steps"), [("one_step_off", 3), ("fully_async", 2)])
def test_the_experimental_trainers_train(start, mode, steps, estimator):
    run = begin(start, mode, estimator, steps=steps)
    assert run.wait(TIMEOUT) == 0, run.tail()
    assert len(run.column("advantage/std")) == steps
    assert min(run.column("advantage/std")) > 0


@pytest.mark.parametrize(("mode", "updates"), [("one_step_off", 1), ("fully_async", UPDATES)])
def test_the_experimental_trainers_keep_the_history(start, mode, updates):
    first = begin(start, mode, "hadw", "trainer.save_freq=1", steps=2)
    assert first.wait(TIMEOUT) == 0, first.tail()
    before = history(first, 2)
    assert before["ticks"] == 2 * updates
    again = begin(start, mode, "hadw", "trainer.save_freq=1", steps=4)
    assert again.wait(TIMEOUT) == 0, again.tail()
    assert f"read the state of hadw from {again.folder}/checkpoints/global_step_2/" in again.log
    after = history(again, 4)
    assert after["ticks"] == 4 * updates
    assert after["window"][: len(before["window"])] == before["window"]
