"""Dynamic sampling by any reward and the dump of advantages in verl's own pipeline, and the reports on the run."""

import numpy as np
import pandas
import pytest

from tests.fresh import TIMEOUT
from verl_ext.cli import main

pytestmark = [pytest.mark.end_to_end, pytest.mark.slow]


def test_a_run_that_filters_and_dumps_and_is_reported(start, tmp_path, capsys):
    dump = tmp_path / "dump"
    run = start(
        "run",
        "algorithm.adv_estimator=gdpo",
        "+algorithm.rewards.keys=[score,length]",
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=any_reward",
        f"+algorithm.verl_ext.dump_dir={dump}",
        f"trainer.rollout_data_dir={tmp_path}/rollouts",
        f"trainer.validation_data_dir={tmp_path}/validation",
        "trainer.test_freq=3",
        "actor_rollout_ref.rollout.val_kwargs.n=4",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
        steps=3,
    )
    assert run.wait(TIMEOUT) == 0, run.tail()
    finished, dropped = run.column("filter_groups/finished_total"), run.column("filter_groups/dropped_total")
    assert all(count - gone >= 8 for count, gone in zip(finished, dropped, strict=True))  # eight prompts a batch
    assert run.column("reward/score/zero_variance_group_fraction")[0] < 1
    assert len(list(dump.glob("from-0-0/advantages-*.parquet"))) == 3
    assert main(["report", f"run={run.folder}", "--window", "2"]) == 0
    assert "1-3" in capsys.readouterr().out
    # What the run wrote: its dumps, verl's rollouts, which have the score alone, and its validation.
    accuracy = ["algorithm.rewards.accuracy_key=score", "algorithm.rewards.accuracy_threshold=0"]
    two = ["gdpo", "algorithm.rewards.keys=[score,length]", *accuracy]
    save = ["--output", str(tmp_path / "out.parquet")]
    for folder, variants, shown in (
        ("validation", two, "32 trajectories in 8 groups of 4, steps 3 to 3"),
        ("rollouts", ["dgpo", "hadw", *accuracy], "96 trajectories in 24 groups of 4, steps 1 to 3, 3 batches"),
        ("dump", two, "96 trajectories in 24 groups of 4, steps 1 to 3, 3 batches"),
    ):
        assert main(["compare", str(tmp_path / folder), *variants, *save]) == 0, capsys.readouterr().err
        assert shown in capsys.readouterr().out
    ours = pandas.read_parquet(tmp_path / "out.parquet")["advantage/gdpo"]
    logged = pandas.concat(pandas.read_parquet(path) for path in sorted(dump.glob("*/*.parquet")))["advantage"]
    np.testing.assert_allclose(ours, logged, atol=1e-9)
