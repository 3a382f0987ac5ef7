"""Rows without advantage are left out of the update in whole runs of verl, and the weights are those of all rows."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.end_to_end
TIMEOUT = 300
TRAINERS = {"default": (), "RayPPOTrainer": ("trainer.use_v1=False",)}


def weights(run):
    saved = torch.load(run.folder / "checkpoints/global_step_3/actor/model_world_size_1_rank_0.pt", weights_only=False)
    return torch.cat([value.to_local().flatten().double() for value in saved.values()])


@pytest.mark.runs(2)
@pytest.mark.parametrize("trainer", ["default", pytest.param("RayPPOTrainer", marks=pytest.mark.slow)])
def test_three_steps_end_with_the_same_weights(start, trainer):
    settings = (*TRAINERS[trainer], "actor_rollout_ref.actor.optim.lr=1e-3", "trainer.save_freq=3")
    skip = "+algorithm.verl_ext.skip_zero_advantage=True"
    every, kept = start("all", *settings, steps=3), start("kept", *settings, skip, steps=3)
    for run in (every, kept):
        assert run.wait(TIMEOUT) == 0, run.tail()
    rows = kept.column("update/rows_kept")
    assert rows[0] == 1.0  # the first update asks all ranks
    assert max(rows[1:]) < 1.0
    assert kept.column("update/fallback") == [0.0] * 3
    assert kept.column("actor/grad_norm") == pytest.approx(every.column("actor/grad_norm"), rel=1e-5)
    assert float((weights(kept) - weights(every)).norm() / weights(every).norm()) < 1e-5
