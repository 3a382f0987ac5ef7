"""Sessions of several turns and several outputs through verl's own pipeline, with a model."""

import pandas
import pytest

from tests.end_to_end import agents
from tests.end_to_end.ray_checkpoint_engine import SEPARATE_ASYNC
from tests.end_to_end.run import FINDS_TESTS
from tests.end_to_end.test_training import TIMEOUT, state
from verl_ext import Batch, Settings, build
from verl_ext.core.post_sum import WeightByHistory

pytestmark = [pytest.mark.end_to_end, pytest.mark.slow]
SESSIONS = 32
ESTIMATORS = {
    "gdpo": ("algorithm.rewards.keys=[score,length]",),
    "dgpo": ("algorithm.rewards.accuracy_threshold=0",),
    "hadw": ("algorithm.rewards.accuracy_threshold=0",),
}


@pytest.fixture
def begin(start, tmp_path):
    """Starts a run whose sessions are `agents.Attempts`."""
    (tmp_path / "agents.yaml").write_text(f"- name: attempts\n  _target_: {agents.__name__}.Attempts\n")

    def run(name, estimator, *overrides, steps):
        return start(
            name,
            f"algorithm.adv_estimator={estimator}",
            *ESTIMATORS[estimator],
            f"actor_rollout_ref.rollout.agent.agent_loop_config_path={tmp_path}/agents.yaml",
            "actor_rollout_ref.rollout.agent.default_agent_loop=attempts",
            "actor_rollout_ref.rollout.calculate_log_probs=True",
            f"algorithm.verl_ext.dump_dir={tmp_path}/{name}/dump",
            "data.max_response_length=32",
            "trainer.save_freq=1",
            *overrides,
            steps=steps,
            configuration=f"[cpu,{estimator}]",
            env=FINDS_TESTS,
        )

    return run


def history(run, step):
    return state(run, step)["hadw"]["weight_by_history"]


def dumped(run, step):
    """Return the dump of a step. A killed run may have dumped the step that the resumed run computes again."""
    paths = run.folder.glob(f"dump/*/advantages-{step:08d}-000.parquet")
    newest = max(paths, key=lambda path: path.stat().st_mtime)
    return pandas.read_parquet(newest)


@pytest.mark.parametrize("estimator", ["gdpo", "dgpo"])
def test_a_session_counts_once_and_all_its_outputs_are_trained_with_its_advantage(begin, estimator):
    run = begin("run", estimator, steps=3)
    assert run.wait(TIMEOUT) == 0, run.tail()
    several = 0
    for step in (1, 2, 3):
        sessions, logged = dumped(run, step), run.metrics[step]
        assert len(sessions) == SESSIONS
        assert sorted(sessions.groupby("uid").size()) == [4] * 8
        # The last output has two turns; more tokens than that can only be of the attempts before it.
        several += (sessions.tokens > 2 * agents.TURN).sum()
        assert logged["reward/score/mean"] == pytest.approx(sessions["reward/score"].mean(), abs=1e-6)
        # verl's own mean goes over the tokens of all outputs that are trained on.
        mean = (sessions.advantage * sessions.tokens).sum() / sessions.tokens.sum()
        assert logged["critic/advantages/mean"] == pytest.approx(mean, abs=1e-5)
        assert logged["advantage/missing_responses"] == 0
        assert logged["actor/grad_norm"] > 0
        # The rollout's probabilities of every output, attempts and second turns, are the trainer's.
        assert abs(logged["rollout_corr/kl"]) < 1e-5
    assert several > 10


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_the_history_counts_sessions_and_goes_on(begin, mode):
    more = () if mode == "sync" else (f"trainer.v1.trainer_mode={mode}",)
    first = begin("run", "hadw", *more, steps=2)
    assert first.wait(TIMEOUT) == 0, first.tail()
    before = history(first, 2)
    assert before["updates"] == 2
    assert first.metrics[2]["hadw/batch_accuracy"] == pytest.approx(dumped(first, 2).accuracy.mean(), abs=1e-12)
    again = begin("run", "hadw", *more, steps=3)
    assert again.wait(TIMEOUT) == 0, again.tail()
    # No two runs of several turns are alike to the last digit: a turn is generated beside whichever are ready. What
    # the run that was not interrupted would have made of these sessions can be said exactly.
    sessions = dumped(again, 3)
    batch = Batch.of(sessions[["reward/score"]], list(sessions.uid), accuracy=sessions.accuracy)
    chain = build("hadw", Settings())
    undisturbed = chain(batch, {WeightByHistory.name: before})
    assert sessions.advantage.to_numpy() == pytest.approx(undisturbed.advantages, abs=1e-12)
    assert history(again, 3) == undisturbed.state[WeightByHistory.name]
    assert history(again, 3)["updates"] == 3


def test_the_history_ticks_once_an_update_and_goes_on_with_a_pool_of_its_own(start):
    """What a step trains on depends on which answers were ready: the history is checked by what is carried on."""
    updates = "trainer.v1.separate_async.parameter_sync_step=2"  # in a step
    overrides = ("algorithm.adv_estimator=hadw", "data.train_batch_size=16", updates, "trainer.save_freq=1")
    given = (*overrides, *ESTIMATORS["hadw"], *SEPARATE_ASYNC)
    first = start("run", *given, steps=1, configuration="[cpu,hadw]", env=FINDS_TESTS)
    assert first.wait(TIMEOUT) == 0, first.tail()
    before = history(first, 1)
    assert before["updates"] == 2
    again = start("run", *given, steps=2, configuration="[cpu,hadw]", env=FINDS_TESTS)
    assert again.wait(TIMEOUT) == 0, again.tail()
    assert sorted(again.metrics) == [2]
    after = history(again, 2)
    assert after["updates"] == 4
    assert after["window"][: len(before["window"])] == before["window"]
    assert again.column("hadw/updates") == [3.5]  # verl logs the mean over the updates of a step
    assert again.column("advantage/missing_responses") == [0]
