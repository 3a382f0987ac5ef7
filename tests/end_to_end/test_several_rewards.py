"""Estimators of several rewards, and a rubric, through verl on both trainers, are resumed with the same steps."""

import shutil

import pandas
import pytest

from tests.end_to_end import rubric_reward
from tests.end_to_end.test_training import TRACKER, assert_same_steps, steps_saved
from tests.fresh import TIMEOUT

pytestmark = [pytest.mark.end_to_end, pytest.mark.slow, pytest.mark.runs(2)]
CASES = {
    "dvao": ("dvao", "algorithm.rewards.keys=[score,length]"),
    "rvpo": ("rvpo", "algorithm.rewards.keys=[score,length]"),
    "rubric": ("gdpo", "algorithm.rewards.keys=[rubric,length]", "algorithm.rewards.rubrics=[rubric]"),
}


@pytest.fixture
def data_overrides(tiny, tmp_path):
    """Return the overrides of a data set whose ground truths are 2 to 9 letters, and of its reward function."""
    rows = pandas.read_parquet(tiny / "train.parquet")
    ground_truths = ["abcdefghi"[: 2 + number % 8] for number in range(len(rows))]
    rows["reward_model"] = [{"style": "rule", "ground_truth": letters} for letters in ground_truths]
    rows.to_parquet(tmp_path / "train.parquet")
    return (
        f"data.train_files={tmp_path}/train.parquet",
        f"reward.custom_reward_function.path={rubric_reward.__file__}",
    )


@pytest.mark.parametrize("trainer", ["trainer.use_v1=True", "trainer.use_v1=False"])
@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_trains_the_same_steps(start, data_overrides, case, trainer):
    name, *rewards = CASES[case]
    overrides = (*data_overrides, trainer, *rewards, "trainer.save_freq=1")

    def train():
        run = start("run", f"algorithm.adv_estimator={name}", *overrides, steps=3, configuration=f"[cpu,{name}]")
        assert run.wait(TIMEOUT) == 0, run.tail()
        return run

    run = train()
    metrics = run.metrics
    # Remove the checkpoints after step 1.
    for step, path in steps_saved(run).items():
        if step > 1:
            shutil.rmtree(path)
    (run.folder / TRACKER).write_text("1")
    resumed = train()
    assert_same_steps(resumed.metrics, metrics, first=2)
    for values in metrics.values():
        assert values["actor/grad_norm"] > 0
        if case == "rubric":  # the mean over 8 prompts
            assert 2 < values["reward/rubric/criteria"] < 9
