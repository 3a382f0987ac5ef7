"""Trainings on two Ray nodes, which are two raylets of this machine with the slot of one rank each.

Two ranks on one node compute the same numbers, so each run is compared with a run on one node.
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
FASTER_UPDATE = ("algorithm.verl_ext.share_prompts=True", "algorithm.verl_ext.skip_zero_advantage=True")
GDPO = ("algorithm.adv_estimator=gdpo", "algorithm.rewards.keys=[score,length]")
RESOURCES = re.compile(r"perf/|timing|memory")
"""Metrics of time and memory, which differ between runs."""


@pytest.fixture
def cluster():
    """Start a cluster of two nodes and return its address. After the test, none of its processes may be left."""
    mark = uuid.uuid4().hex
    folder = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / f"ve-{mark[:8]}"
    folder.mkdir()
    environment = {**os.environ, **runs.FINDS_TESTS, runs.MARK: mark, "RAY_TMPDIR": str(folder)}
    if environment.get("CUDA_VISIBLE_DEVICES") == "":
        del environment["CUDA_VISIBLE_DEVICES"]  # Ray rejects slots of GPUs if the variable is empty
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
            remaining_processes = runs.end_all(mark, patience=10)
            runs.end_all(mark, patience=0)  # processes that the remaining processes have started meanwhile
            shutil.rmtree(folder, ignore_errors=True)
    assert remaining_processes == []


def overrides_of_cluster(address, folder):
    """Return the overrides of a run on the two nodes of a cluster."""
    # The trainer is a process of the cluster, which does not have the environment of the driver.
    variables = {
        **EXTERNAL,
        "VERL_FILE_LOGGER_PATH": f"{folder}/metrics.jsonl",
        "TENSORBOARD_DIR": f"{folder}/tensorboard",
    }
    return [
        "trainer.nnodes=2",
        "trainer.n_gpus_per_node=1",
        f"++ray_kwargs.ray_init.address={address}",
        "ray_kwargs.ray_init.num_cpus=null",
        "ray_kwargs.ray_init.num_gpus=null",
        "ray_kwargs.ray_init._temp_dir=null",  # the folder is the cluster's
        *(f"++ray_kwargs.ray_init.runtime_env.env_vars.{name}={value}" for name, value in variables.items()),
    ]


@pytest.fixture
def train(start, tmp_path):
    """Return a function that trains with two ranks, either on one node or on the nodes of a cluster."""

    def train(name, *overrides, steps, estimator, address=None):
        two_ranks = ["trainer.n_gpus_per_node=2"]
        ranks = two_ranks if address is None else overrides_of_cluster(address, tmp_path / name)
        environment = {**EXTERNAL, **runs.FINDS_TESTS}
        configuration = f"[cpu,{estimator}]"
        run = start(name, *overrides, *ranks, steps=steps, configuration=configuration, env=environment)
        assert run.wait(TIMEOUT) == 0, run.tail()
        return run

    return train


def computed_metrics(values):
    """Return the metrics of a step without those of time and memory."""
    return {name: value for name, value in values.items() if not RESOURCES.search(name)}


def assert_equal_metrics(found, expected):
    """Assert that each step has the same metrics, whose values are equal up to floating-point error.

    Rows come in the order in which they were generated, so float32 sums differ in their last digits: relative
    differences of 2.7e-7 were seen. Metrics that compare the rollout's log-probabilities with the trainer's are
    rounding errors themselves. The largest difference of such a metric was 4.8e-7, one unit in the last place of 4.6.
    """
    assert found.keys() == expected.keys()
    for step in expected:
        metrics = computed_metrics(found[step])
        expected_metrics = computed_metrics(expected[step])
        assert metrics.keys() == expected_metrics.keys()
        for name, value in expected_metrics.items():
            assert metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6), (step, name)


@pytest.mark.runs(3)
def test_two_nodes_train_save_and_resume_as_one_node(train, cluster):
    overrides = (*HADW, *FASTER_UPDATE, "trainer.save_freq=2")
    first = train("two", *overrides, steps=2, estimator="hadw", address=cluster)
    metrics = first.metrics
    resumed = train("two", *overrides, steps=4, estimator="hadw", address=cluster)
    assert sorted(resumed.metrics) == [3, 4]
    metrics |= resumed.metrics
    expected = train("one", *overrides, steps=4, estimator="hadw").metrics
    assert_equal_metrics(metrics, expected)
    runs.check_estimator("hadw", metrics, steps=(1, 2, 3, 4))
    for values in metrics.values():
        assert values["actor/rows_kept"] == pytest.approx(1 - values["advantage/zero_fraction"])
        assert values["actor/prompt_tokens_saved"] > 0.3
    assert min(values["actor/rows_kept"] for values in metrics.values()) < 1.0
    shards = resumed.folder.glob("checkpoints/global_step_4/actor/model_world_size_2_rank_*.pt")
    assert len(list(shards)) == 2


@pytest.mark.runs(2)
def test_two_nodes_train_gdpo_as_one_node(train, cluster):
    metrics = train("two", *GDPO, steps=2, estimator="gdpo", address=cluster).metrics
    expected = train("one", *GDPO, steps=2, estimator="gdpo").metrics
    assert_equal_metrics(metrics, expected)
    runs.check_estimator("gdpo", metrics, steps=(1, 2))
