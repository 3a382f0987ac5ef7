"""Estimators of several rewards, and a rubric, through verl on both trainers: resumed to the same steps."""

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


@pytest.mark.parametrize("trainer", ["trainer.use_v1=True", "trainer.use_v1=False"])
@pytest.mark.parametrize("case", CASES)
def test_it_goes_on_exactly(start, tiny, tmp_path, case, trainer):
    name, *overrides = CASES[case]
    rows = pandas.read_parquet(tiny / "train.parquet")
    letters = ["abcdefghi"[: 2 + number % 8] for number in range(len(rows))]  # 2 to 9 criteria
    rows["reward_model"] = [{"style": "rule", "ground_truth": wanted} for wanted in letters]
    rows.to_parquet(tmp_path / "train.parquet")
    files = (f"data.train_files={tmp_path}/train.parquet", f"reward.custom_reward_function.path={rubric_reward.__file__}")

    def run():
        more = (*files, trainer, *overrides, "trainer.save_freq=1")
        found = start("run", f"algorithm.adv_estimator={name}", *more, steps=3, configuration=f"[cpu,{name}]")
        assert found.wait(TIMEOUT) == 0, found.tail()
        return found

    first = run()
    whole = first.metrics
    for step, path in steps_saved(first).items():
        if step > 1:
            shutil.rmtree(path)
    (first.folder / TRACKER).write_text("1")
    again = run().metrics
    assert_same_steps(again, whole, first=2)
    assert all(values["actor/grad_norm"] > 0 for values in whole.values())
    if case == "rubric":  # 8 of the prompts
        assert all(2 < values["reward/rubric/criteria"] < 9 for values in whole.values())
