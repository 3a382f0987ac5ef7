"""The plan of a run whose settings leave no step."""

import pandas

from tests.configs import compose_quickly
from tests.facts import says
from verl_ext.checks.judge import judge
from verl_ext.checks.summary import plan


def test_no_epoch_is_warned_of_with_the_number_of_epochs(tmp_path):
    pandas.DataFrame({"prompt": [1] * 10}).to_parquet(tmp_path / "train.parquet")
    config = compose_quickly(
        *("algorithm.adv_estimator=grpo", f"data.train_files={tmp_path}/train.parquet", "data.train_batch_size=4"),
        *("trainer.total_epochs=0", "trainer.total_training_steps=5", f"trainer.default_local_dir={tmp_path}"),
    )
    _, findings = plan(judge(config))
    assert any(says(finding, "trainer.total_training_steps=5", "trainer.total_epochs=3") for finding in findings)
