"""Every rule agrees with verl on which trainer a run uses: verl tests the truth value of `trainer.use_v1`."""

import pandas
import pytest

from tests.configs import compose_quickly
from tests.facts import says
from verl_ext.checks.judge import judge
from verl_ext.checks.summary import plan
from verl_ext.run_config import uses_default_trainer

GDPO = ("algorithm.adv_estimator=gdpo", "+algorithm.rewards.keys=[acc,format]")
ANY_REWARD = ("algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=any_reward")
TURNS = ("+algorithm.rewards.per_turn=[format]", "+algorithm.rollout_correction.rollout_rs=token_k1")


@pytest.mark.parametrize(("value", "is_default"), [("True", True), ("False", False), ("null", False), ("0", False)])
def test_rules_and_plan_follow_the_truth_value(value, is_default, tmp_path):
    pandas.DataFrame({"prompt": [1] * 10}).to_parquet(tmp_path / "train.parquet")
    data = (f"data.train_files={tmp_path}/train.parquet", "data.train_batch_size=5", "+data.gen_batch_size=2")
    selection = f"trainer.use_v1={value}"
    filtered = judge(compose_quickly(*GDPO, *ANY_REWARD, selection))
    with_turns = judge(compose_quickly(*GDPO, *TURNS, selection))
    planned, _ = plan(judge(compose_quickly(*GDPO, *data, selection)))
    assert uses_default_trainer(filtered.config) == is_default
    assert any(says(error, "any_reward", selection) for error in filtered.errors) == (not is_default)
    assert any(says(error, "rollout_rs", selection) for error in with_turns.errors) == (not is_default)
    assert any(says(line, "batch size 2") for line in planned) == (not is_default)
