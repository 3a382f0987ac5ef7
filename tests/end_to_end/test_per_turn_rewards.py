"""Per-turn rewards through verl's own tool agent loop, with a model, on both trainers."""

import numpy as np
import pytest

from recipes.turns import prepare_data
from tests.end_to_end.run import ROOT
from tests.end_to_end.test_agents import dumped, history
from tests.end_to_end.test_training import TIMEOUT, latest
from verl_ext import Batch, Settings, Turns, build
from verl_ext.core.post_sum import WeightByHistory

pytestmark = [pytest.mark.end_to_end, pytest.mark.slow, pytest.mark.runs(2)]
SETTINGS = {"rewards": {"keys": ["right"], "per_turn": ["right"], "accuracy_key": "acc"}}


@pytest.fixture
def begin(start, tmp_path):
    """Return a function that starts hadw with a per-turn reward on the task of recipes/turns."""
    task = tmp_path / "task"
    prepare_data.write(task, steps=200)
    overrides = [
        "algorithm.adv_estimator=hadw",
        "algorithm.rewards.keys=[right]",
        "algorithm.rewards.per_turn=[right]",
        "algorithm.rewards.accuracy_key=acc",
        f"algorithm.verl_ext.dump_dir={tmp_path}/run/dump",
        f"data.train_files={task}/train.parquet",
        f"data.val_files={task}/val.parquet",
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
    ]

    def start_hadw(trainer, *, steps):
        return start("run", *overrides, trainer, steps=steps, configuration="[cpu,hadw]")

    return start_hadw


def batch_of(turns):
    """Return the batch of a dump of turns."""
    return Batch.of(
        turns[["raw/right"]].to_numpy(),
        list(turns.uid),
        keys=("right",),
        accuracy=turns.accuracy,
        turns=Turns(turns.turn.to_numpy() - 1, columns=(0,)),
    )


def assert_advantages_of_core(run, steps, states):
    """Assert that the dumped advantages of each step are those of the core, and so are the states after some steps.

    `states` has the history that was saved after a step, by step.
    """
    hadw = build("hadw", Settings.parse(SETTINGS))
    state = None
    for step in steps:
        turns = dumped(run, step)
        result = hadw(batch_of(turns), state)
        np.testing.assert_allclose(turns.advantage, result.advantages, rtol=0, atol=1e-12)
        state = result.state
        if step in states:
            assert states[step] == state[WeightByHistory.name]


@pytest.mark.parametrize("trainer", ["trainer.use_v1=True", "trainer.use_v1=False"])
def test_a_killed_run_of_hadw_resumes_with_the_advantages_of_the_core(begin, trainer):
    killed = begin(trainer, steps=500)
    killed.wait_until(lambda: latest(killed) >= 2, TIMEOUT)
    killed.kill()
    killed.process.wait()
    saved_step = latest(killed)
    saved_history = history(killed, saved_step)
    assert saved_history["updates"] == saved_step

    last_step = saved_step + 1
    resumed = begin(trainer, steps=last_step)
    assert resumed.wait(TIMEOUT) == 0, resumed.tail()
    states = {saved_step: saved_history, last_step: history(resumed, last_step)}
    assert_advantages_of_core(resumed, range(1, last_step + 1), states)

    # The first batch is of the untrained model. A trained model may need only one turn.
    assert set(dumped(resumed, 1).turn) == {1, 2, 3}
    last_turns = dumped(resumed, last_step)
    metrics = resumed.metrics[last_step]
    assert metrics["advantage/turns"] == pytest.approx(len(last_turns) / 32)
    has_nonzero_advantage = bool((last_turns.advantage != 0).any())
    assert (metrics["actor/grad_norm"] > 0) == has_nonzero_advantage
    assert 0 <= metrics["val-core/keys/acc/mean@1"] <= 1
