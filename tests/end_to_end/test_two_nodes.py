"""Trainings over two Ray nodes, which are two raylets of this machine with the slot of one rank each.

The same two ranks on one node train the same numbers, so each run is compared with one on one node.
"""

import os
import re
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.end_to_end import deterministic_order, two_node_cluster
from tests.end_to_end import run as runs
from tests.fresh import TIMEOUT

pytestmark = [pytest.mark.end_to_end, pytest.mark.slow]
EXTERNAL = {"VERL_USE_EXTERNAL_MODULES": deterministic_order.__name__}
HADW = ("algorithm.adv_estimator=hadw", "algorithm.rewards.accuracy_threshold=0.1")
SHORTER = ("algorithm.verl_ext.share_prompts=True", "algorithm.verl_ext.skip_zero_advantage=True")
GDPO = ("algorithm.adv_estimator=gdpo", "algorithm.rewards.keys=[score,length]")
USED = re.compile(r"perf/|timing|memory")
"""Metrics of time and memory, which no two runs have in common."""


@pytest.fixture
def cluster():
    """The address of a cluster of two nodes; all of its processes are gone after the test."""
    mark = uuid.uuid4().hex
    folder = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / f"ve-{mark[:8]}"
    folder.mkdir()
    environment = {**os.environ, **runs.FINDS_TESTS, runs.MARK: mark, "RAY_TMPDIR": str(folder)}
    if environment.get("CUDA_VISIBLE_DEVICES") == "":
        del environment["CUDA_VISIBLE_DEVICES"]  # Ray rejects slots of GPUs where it is empty
    command = [sys.executable, "-m", two_node_cluster.__name__]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            address = process.stdout.readline().strip()
            assert re.fullmatch(r"[\d.]+:\d+", address), address
            yield address
            process.stdin.close()
            process.wait(120)
        finally:
            left = runs.end_all(mark, patience=10)
            runs.end_all(mark, patience=0)  # what those have started meanwhile
            shutil.rmtree(folder, ignore_errors=True)
    assert left == []


@pytest.fixture
def train(start, tmp_path):
    """Trains on one node with two ranks, or on the nodes of a cluster; returns the metrics of the steps."""

    def train(name, *overrides, steps, estimator, address=None):
        folder = tmp_path / name
        if address is None:
            places = ["trainer.n_gpus_per_node=2"]
        else:
            variables = {**EXTERNAL, "VERL_FILE_LOGGER_PATH": f"{folder}/metrics.jsonl"}
            variables["TENSORBOARD_DIR"] = f"{folder}/tensorboard"
            places = [
                "trainer.nnodes=2",
                "trainer.n_gpus_per_node=1",
                f"++ray_kwargs.ray_init.address={address}",
                "ray_kwargs.ray_init.num_cpus=null",
                "ray_kwargs.ray_init.num_gpus=null",
                "ray_kwargs.ray_init._temp_dir=null",  # the folder is the cluster's
                # The trainer is a process of the cluster, which does not have the environment of the driver.
                *(f"++ray_kwargs.ray_init.runtime_env.env_vars.{key}={value}" for key, value in variables.items()),
            ]
        environment = {**EXTERNAL, **runs.FINDS_TESTS}
        configuration = f"[cpu,{estimator}]"
        run = start(name, *overrides, *places, steps=steps, configuration=configuration, env=environment)
        assert run.wait(TIMEOUT) == 0, run.tail()
        return run

    return train


def assert_equal_metrics(found, expected):
    """Each step has the same metrics, and their values are equal up to floating-point error.

    Rows come in the order in which they were done, so float32 sums differ in their last digits: relative differences of
    2.7e-7 were seen. Metrics that compare the rollout's log-probabilities with the trainer's are rounding themselves.
    The largest difference of such a metric was 4.8e-7, one unit in the last place of a log-probability of 4.6.
    """
    assert found.keys() == expected.keys()
    for step, values in expected.items():
        computed = {name for name in values if not USED.search(name)}
        assert {name for name in found[step] if not USED.search(name)} == computed
        for name in computed:
            assert found[step][name] == pytest.approx(values[name], rel=1e-5, abs=1e-6), (step, name)


@pytest.mark.runs(3)
def test_two_nodes_train_save_and_resume_with_the_numbers_of_two_ranks_on_one_node(train, cluster):
    overrides = (*HADW, *SHORTER, "trainer.save_freq=2")
    first = train("two", *overrides, steps=2, estimator="hadw", address=cluster)
    found = first.metrics
    resumed = train("two", *overrides, steps=4, estimator="hadw", address=cluster)
    assert sorted(resumed.metrics) == [3, 4]
    found |= resumed.metrics
    expected = train("one", *overrides, steps=4, estimator="hadw").metrics
    assert_equal_metrics(found, expected)
    runs.check_estimator("hadw", found, steps=(1, 2, 3, 4))
    for values in found.values():
        assert values["actor/rows_kept"] == pytest.approx(1 - values["advantage/zero_fraction"])
        assert values["actor/prompt_tokens_saved"] > 0.3
    assert min(values["actor/rows_kept"] for values in found.values()) < 1.0
    shards = resumed.folder.glob("checkpoints/global_step_4/actor/model_world_size_2_rank_*.pt")
    assert len(list(shards)) == 2


@pytest.mark.runs(2)
def test_two_nodes_train_gdpo_with_the_numbers_of_two_ranks_on_one_node(train, cluster):
    found = train("two", *GDPO, steps=2, estimator="gdpo", address=cluster).metrics
    expected = train("one", *GDPO, steps=2, estimator="gdpo").metrics
    assert_equal_metrics(found, expected)
    runs.check_estimator("gdpo", found, steps=(1, 2))
