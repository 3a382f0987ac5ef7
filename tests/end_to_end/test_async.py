"""verl's other trainers on the CPU: hadw's history over a restart in each.

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
}
# Preset, overrides, and the updates of one step.
MODES = {
    "colocate": ("cpu", ("trainer.v1.trainer_mode=colocate_async",), 1),
    "separate, 2": ("cpu,separate_async", ("trainer.v1.separate_async.parameter_sync_step=2",), 2),
    "ray": ("cpu", ("trainer.use_v1=False",), 1),
    "separate, 4": ("cpu,separate_async", ("trainer.v1.separate_async.parameter_sync_step=4",), 4),
}


def settings(mode, estimator):
    preset, overrides, updates = MODES[mode]
    name = f"algorithm.adv_estimator={estimator}"
    batch = f"data.train_batch_size={8 * updates}"
    return f"[{preset},{estimator}]", (name, batch, *overrides, *ESTIMATORS[estimator]), updates


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
    assert again.column("advantage/missing_responses") == ([] if mode == "ray" else [0])


def history(run, step):
    return state(run, step)["hadw"]["weigh_by_history"]
