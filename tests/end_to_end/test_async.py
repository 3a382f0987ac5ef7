"""verl's asynchronous trainer of two pools on the CPU: hadw's history over a restart.

What a step trains on depends on which answers were ready, so no two runs are alike; the history is checked by its
count and by the values that a resumed run carries on. `test_agents` and `test_turns` have the other trainers.
"""

import pytest

from tests.end_to_end.test_training import TIMEOUT, state

pytestmark = [pytest.mark.end_to_end, pytest.mark.slow]

ESTIMATORS = {
    "gdpo": ("algorithm.rewards.keys=[score,length]",),
    "dgpo": ("algorithm.rewards.accuracy_threshold=0",),
    "hadw": ("algorithm.rewards.accuracy_threshold=0",),
}


def test_the_history_ticks_once_an_update_and_goes_on_after_a_restart(start):
    updates = "trainer.v1.separate_async.parameter_sync_step=2"  # in a step
    overrides = ("algorithm.adv_estimator=hadw", "data.train_batch_size=16", updates, "trainer.save_freq=1")
    given = (*overrides, *ESTIMATORS["hadw"])
    first = start("run", *given, steps=1, configuration="[cpu,separate_async,hadw]")
    assert first.wait(TIMEOUT) == 0, first.tail()
    before = history(first, 1)
    assert before["ticks"] == 2
    again = start("run", *given, steps=2, configuration="[cpu,separate_async,hadw]")
    assert again.wait(TIMEOUT) == 0, again.tail()
    assert sorted(again.metrics) == [2]
    after = history(again, 2)
    assert after["ticks"] == 4
    assert after["window"][: len(before["window"])] == before["window"]
    assert again.column("hadw/tick") == [3.5]  # verl logs the mean over the updates of a step
    assert again.column("advantage/missing_responses") == [0]


def history(run, step):
    return state(run, step)["hadw"]["weigh_by_history"]
