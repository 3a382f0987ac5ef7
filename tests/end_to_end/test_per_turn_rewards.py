"""Rewards by turn through verl's own tool agent loop, with a model, on both trainers."""

import numpy as np
import pytest

from recipes.turns import prepare_data
from tests.end_to_end.run import ROOT
from tests.end_to_end.test_agents import dumped, history
from tests.end_to_end.test_training import TIMEOUT, latest
from verl_ext import Batch, Settings, Turns, build
from verl_ext.core.history import WeightByHistory

pytestmark = [pytest.mark.end_to_end, pytest.mark.slow, pytest.mark.runs(2)]
SETTINGS = {"rewards": {"keys": ["right"], "per_turn": ["right"], "accuracy_key": "acc"}}


@pytest.fixture
def begin(start, tmp_path):
    """Starts hadw by turn on the task of recipes/turns."""
    task = tmp_path / "task"
    prepare_data.write(task, steps=200)

    def run(*overrides, steps):
        return start(
            "run",
            "algorithm.adv_estimator=hadw",
            "algorithm.rewards.keys=[right]",
            "algorithm.rewards.per_turn=[right]",
            "algorithm.rewards.accuracy_key=acc",
            f"algorithm.verl_ext.dump_dir={tmp_path}/run/dump",
            *(f"data.{split}_files={task}/{split}.parquet" for split in ("train", "val")),
            f"actor_rollout_ref.model.path={task}/model",
            f"reward.custom_reward_function.path={ROOT}/recipes/turns/reward.py",
            "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent",
            "actor_rollout_ref.rollout.multi_turn.enable=True",
            "actor_rollout_ref.rollout.multi_turn.format=keys",
            f"actor_rollout_ref.rollout.multi_turn.function_tool_path={ROOT}/recipes/turns/tools.py",
            "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3",
            "data.max_response_length=32",
            "trainer.save_freq=1",
            "trainer.test_freq=1",
            *overrides,
            steps=steps,
            configuration="[cpu,hadw]",
        )

    return run


def batch_of(turns):
    """Return the batch of a dump of turns."""
    return Batch.of(
        turns[["raw/right"]].to_numpy(),
        list(turns.uid),
        keys=("right",),
        accuracy=turns.accuracy,
        turns=Turns(turns.turn.to_numpy() - 1, columns=(0,)),
    )


@pytest.mark.parametrize("trainer", ["trainer.use_v1=True", "trainer.use_v1=False"])
def test_hadw_goes_on_after_it_was_killed_and_its_advantages_are_those_of_the_core(begin, trainer):
    killed = begin(trainer, steps=500)
    killed.wait_until(lambda: latest(killed) >= 2, TIMEOUT)
    killed.kill()
    killed.process.wait()
    kept = latest(killed)
    saved_history = history(killed, kept)
    assert saved_history["updates"] == kept

    again = begin(trainer, steps=kept + 1)
    assert again.wait(TIMEOUT) == 0, again.tail()
    hadw = build("hadw", Settings.parse(SETTINGS))
    state = None
    for step in range(1, kept + 2):
        turns = dumped(again, step)
        undisturbed = hadw(batch_of(turns), state)
        np.testing.assert_allclose(turns.advantage, undisturbed.advantages, rtol=0, atol=1e-12)
        state = undisturbed.state
        if step == kept:
            assert saved_history == state[WeightByHistory.name]
    assert history(again, kept + 1) == state[WeightByHistory.name]
    first_batch = dumped(again, 1)  # of the untrained model; a trained one may answer in one turn
    assert set(first_batch.turn) == {1, 2, 3}
    logged = again.metrics[kept + 1]
    assert logged["advantage/turns"] == pytest.approx(len(turns) / 32)
    learns = bool((turns.advantage != 0).any())
    assert (logged["actor/grad_norm"] > 0) == learns
    assert 0 <= logged["val-core/keys/acc/mean@1"] <= 1
