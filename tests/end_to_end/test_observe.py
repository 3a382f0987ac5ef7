"""Dynamic sampling by any reward and the dump of advantages in verl's own pipeline, and the reports on the run."""

from __future__ import annotations

import json

import pytest

from verl_ext.cli import main

pytestmark = [pytest.mark.end_to_end, pytest.mark.slow]
TIMEOUT = 400


def test_a_run_that_filters_and_dumps_and_is_reported(start, tmp_path, capsys):
    dump = tmp_path / "dump"
    run = start(
        "run",
        "algorithm.adv_estimator=gdpo",
        "+algorithm.rewards.keys=[score,length]",
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=any_reward",
        f"+algorithm.verl_ext.dump_dir={dump}",
        steps=3,
    )
    assert run.wait(TIMEOUT) == 0, run.tail()
    finished, dropped = run.column("filter_groups/finished_total"), run.column("filter_groups/dropped_total")
    assert all(count - gone >= 8 for count, gone in zip(finished, dropped, strict=True))  # eight prompts a batch
    assert run.column("reward/score/dead_groups")[0] < 1
    assert len(list(dump.glob("advantages-*.parquet"))) == 3
    assert main(["report", "--groups", str(dump)]) == 0
    text = capsys.readouterr().out
    assert "3 files, steps 1 to 3, 24 groups, 96 responses" in text
    assert "dead, no reward varies: 0 of 24 groups" in text
    tables = {}
    for log in ("metrics.jsonl", "tensorboard"):
        assert main(["report", f"run={run.folder / log}", "--window", "2"]) == 0
        tables[log] = capsys.readouterr().out
    assert tables["metrics.jsonl"] == tables["tensorboard"]
    assert json.loads((run.folder / "metrics.jsonl").read_text().splitlines()[0])["step"] == 1
