"""Dynamic sampling by any reward and the dump of advantages in verl's own pipeline, and the reports on the run."""

import numpy as np
import pandas
import pytest

from tests.fresh import TIMEOUT
from verl_ext.cli import main

pytestmark = [pytest.mark.end_to_end, pytest.mark.slow]


ACCURACY = ["algorithm.rewards.accuracy_key=score", "algorithm.rewards.accuracy_threshold=0"]
TWO_REWARDS = ["gdpo", "algorithm.rewards.keys=[score,length]", *ACCURACY]
PROMPTS_PER_BATCH = 8


@pytest.fixture
def compare(tmp_path, capsys):
    """Return a function that compares estimators on a folder of the run, and returns the output."""

    def run(folder, *variants):
        arguments = [str(tmp_path / folder), *variants, "--output", str(tmp_path / "out.parquet")]
        assert main(["compare", *arguments]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return run


def test_a_run_with_a_filter_and_a_dump_is_reported_and_compared(start, tmp_path, compare, capsys):
    run = start(
        "run",
        "algorithm.adv_estimator=gdpo",
        "+algorithm.rewards.keys=[score,length]",
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=any_reward",
        f"+algorithm.verl_ext.dump_dir={tmp_path}/dump",
        f"trainer.rollout_data_dir={tmp_path}/rollouts",
        f"trainer.validation_data_dir={tmp_path}/validation",
        "trainer.test_freq=3",
        "actor_rollout_ref.rollout.val_kwargs.n=4",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
        steps=3,
    )
    assert run.wait(TIMEOUT) == 0, run.tail()
    finished = run.column("filter_groups/finished_total")
    dropped = run.column("filter_groups/dropped_total")
    for finished_groups, dropped_groups in zip(finished, dropped, strict=True):
        assert finished_groups - dropped_groups >= PROMPTS_PER_BATCH
    assert run.column("reward/score/zero_variance_group_fraction")[0] < 1

    assert main(["report", f"run={run.folder}", "--window", "2"]) == 0
    assert "1-3" in capsys.readouterr().out

    assert "32 trajectories in 8 groups of 4, steps 3 to 3" in compare("validation", *TWO_REWARDS)
    three_batches = "96 trajectories in 24 groups of 4, steps 1 to 3, 3 batches"
    # verl's rollouts have only the score.
    assert three_batches in compare("rollouts", "dgpo", "hadw", *ACCURACY)
    assert three_batches in compare("dump", *TWO_REWARDS)
    dumps = [pandas.read_parquet(path) for path in sorted(tmp_path.glob("dump/from-0-0/advantages-*.parquet"))]
    assert len(dumps) == 3
    compared_advantages = pandas.read_parquet(tmp_path / "out.parquet")["advantage/gdpo"]
    dumped_advantages = pandas.concat(dumps)["advantage"]
    np.testing.assert_allclose(compared_advantages, dumped_advantages, atol=1e-9)
