"""A Ray cluster of several machines: ranks on each, and machines that lack what the run needs."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
import uuid
from contextlib import ExitStack
from pathlib import Path

import pytest

import verl_ext
from tests.end_to_end import machines, where
from tests.integration.stand_ins import REGISTERED

pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.slow,
    pytest.mark.skipif(not machines.possible(), reason="no right to make network namespaces here"),
]
TIMEOUT = 600
ROOT = Path(__file__).parents[2]
# A cluster's shared secret, which newer versions of Ray ask for.
TOKEN = uuid.uuid4().hex * 2


@pytest.fixture
def ray_folder():
    """For Ray's files, on each machine; its path must be short."""
    folder = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / f"ve-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    yield folder
    folder.rmdir()


@pytest.fixture
def network(tmp_path, ray_folder):
    """Makes machines, which are gone after the test."""
    made = []
    with ExitStack() as stack:

        def make(names):
            made.extend(stack.enter_context(machines.network(tmp_path / "network", names)))
            return made

        yield make
    assert [line for machine in made for line in machine.processes()] == []


@pytest.fixture
def train(start, ray_folder, tmp_path):
    """Starts a run on the first machine, on the cluster there; `through` is what hands the command on."""

    def begin(head, *overrides, through=(), **settings):
        existing = (
            f"+ray_kwargs.ray_init.address={head.address}:{machines.PORT}",
            f"ray_kwargs.ray_init._temp_dir={ray_folder}",
            # The CPU preset has slots for a cluster that the run starts itself.
            "ray_kwargs.ray_init.num_cpus=null",
            "ray_kwargs.ray_init.num_gpus=null",
            # The trainer may run on another machine, which does not have this process's environment.
            f"+ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH={tmp_path}/run/metrics.jsonl",
            f"+ray_kwargs.ray_init.runtime_env.env_vars.TENSORBOARD_DIR={tmp_path}/run/tensorboard",
        )
        return start("run", *existing, *overrides, prefix=head.inside(*through, folder=head.folder), **settings)

    return begin


RAY = (sys.executable, "-m", "ray.scripts.scripts")


def environment(*, with_package=True):
    """What a shell on a machine has; without the package its source is on no path."""
    given = dict(os.environ)
    paths = [path for path in given.pop("PYTHONPATH", "").split(os.pathsep) if path]
    kept = [path for path in paths if with_package or not (Path(path) / "verl_ext").exists()]
    if with_package and str(ROOT) not in kept:
        kept.insert(0, str(ROOT))  # the tests' reward function is not installed
    secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    # All machines are one here, and nothing on it should wait for what is less nice than Ray's workers are.
    return given | secret | {"PYTHONPATH": os.pathsep.join(kept), "RAY_worker_niceness": "0"}


def metadata_folder():
    """Where pip says that the package is installed, its entry point included."""
    return Path(importlib.metadata.distribution("verl_ext")._path)


def uninstall(machine):
    """Remove the package on one machine, whether it is there itself or as a link to its source."""
    packages = metadata_folder().parent
    machine.make_own(packages)
    links = map(str, packages.glob("*verl_ext*.pth"))
    machine.do("rm", "-rf", str(metadata_folder()), str(packages / "verl_ext"), *links)


def running(machine, name):
    """How many processes of this name run on a machine."""
    return sum(line.startswith(f"ray::{name}") for line in machine.processes())


def test_two_machines_with_a_rank_on_each(network, train, ray_folder):
    a, b = network("ab")
    for machine in (a, b):
        machine.start_ray(ray_folder, a, environment())
    run = train(
        a,
        "algorithm.adv_estimator=gdpo",
        "algorithm.rewards.keys=[letters,elsewhere,registered]",
        "algorithm.rewards.weights=[1,0,0]",
        f"reward.custom_reward_function.path={where.__file__}",
        "reward.num_workers=2",
        "actor_rollout_ref.rollout.agent.num_workers=2",
        "trainer.nnodes=2",
        "trainer.n_gpus_per_node=1",
        "trainer.save_freq=2",
        configuration="[cpu,gdpo]",
        steps=2,
        env=environment(),
    )
    ranks = set()
    deadline = time.monotonic() + TIMEOUT
    while run.process.poll() is None and time.monotonic() < deadline:
        ranks.add((running(a, "WorkerDict"), running(b, "WorkerDict")))
        time.sleep(0.5)
    assert run.wait(1) == 0, run.tail()
    assert max(ranks) == (1, 1), ranks
    assert run.column("training/global_step") == [1, 2]
    # Rewards were computed on both machines, and everywhere the estimators were registered.
    assert all(0 < share < 1 for share in run.column("reward/elsewhere/mean"))
    assert run.column("reward/registered/mean") == [float(len(REGISTERED))] * 2
    # Written by the trainer's node and by each rank, into a folder that both machines see.
    saved = {path.name for path in run.folder.glob("checkpoints/global_step_2/actor/*.pt")}
    assert {"model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt"} <= saved


def test_a_submitted_job_brings_the_package_to_machines_without_it(network, train, ray_folder):
    a, b = network("ab")
    for machine in (a, b):
        uninstall(machine)
        machine.start_ray(ray_folder, a, environment(with_package=False))
    runtime_env = {
        "py_modules": [str(Path(verl_ext.__file__).parent)],
        "env_vars": {"VERL_USE_EXTERNAL_MODULES": "verl_ext.integration.plugin"},
    }
    address = f"--address=http://{a.address}:{machines.DASHBOARD}"
    run = train(
        a,
        "algorithm.adv_estimator=hadw",
        "algorithm.rewards.accuracy_threshold=0",
        "trainer.nnodes=2",
        "trainer.save_freq=2",
        through=(*RAY, "job", "submit", address, "--runtime-env-json", json.dumps(runtime_env), "--"),
        configuration="[cpu,hadw]",
        env=environment(with_package=False),
    )
    assert run.wait(TIMEOUT) == 0, run.tail()
    assert run.column("training/global_step") == [1, 2]
    saved = json.loads((run.folder / "checkpoints/global_step_2/verl_ext.json").read_text())
    assert saved["state"]["weigh_by_history"]["ticks"] == 2
