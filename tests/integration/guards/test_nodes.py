"""What is said of a cluster's nodes; the clusters themselves are in the end-to-end tests."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

import verl_ext
from tests.facts import a_line_says, facts, says
from tests.integration.configs import compose
from verl_ext.errors import ClusterError
from verl_ext.integration.driver import wrap_checked
from verl_ext.integration.guards import nodes
from verl_ext.integration.trainers.attach import attach
from verl_ext.settings import VerlExtSettings

EXPECTED = {"verl_ext": "1.2.0", "verl": "0.9.1", nodes.CODE: "c0de"}
GOOD: dict[str, str | None] = {
    "verl_ext": "1.2.0",
    "verl_ext from": "/site/verl_ext",
    "verl": "0.9.1",
    "verl from": "/site/verl",
    nodes.CODE: "c0de",
    "plugin": "loaded",
    "policy": None,
}


def node(number: int, *, alive: bool = True, **resources: float) -> dict[str, Any]:
    return {
        "NodeID": f"id{number}",
        "Alive": alive,
        "NodeManagerAddress": f"10.0.0.{number}",
        "NodeManagerHostname": f"host{number}",
        "Resources": resources or {"CPU": 8.0, "GPU": 1.0},
    }


class Cluster:
    """In place of Ray: what `ray.nodes()` lists, what the nodes answer, and who was asked."""

    def __init__(self) -> None:
        self.nodes: list[dict[str, Any]] = [node(1), node(2)]
        self.answers: dict[str, nodes.Answer] = {}
        self.asked: list[list[str]] = []
        self.job = "job1"
        self.started_here = True

    def ask(self, listed: list[Any], patience: float) -> dict[str, nodes.Answer]:
        self.asked.append([item["NodeID"] for item in listed])
        return {item["NodeID"]: self.answers.get(item["NodeID"], GOOD) for item in listed}

    def get_node_id(self) -> str:
        return "id1"

    def get_job_id(self) -> str:
        return self.job


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    found = Cluster()
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "nodes", lambda: found.nodes)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: found)
    monkeypatch.setattr(nodes, "ask", found.ask)
    monkeypatch.setattr(nodes, "workers_have_our_environment", lambda: found.started_here)
    monkeypatch.setattr(nodes, "answer", lambda: EXPECTED)
    monkeypatch.setattr(nodes, "_asked", set())
    return found


def test_a_cluster_that_is_alike_is_asked_once(cluster: Cluster) -> None:
    nodes.check()
    nodes.check()
    assert cluster.asked == [["id1", "id2"]]
    cluster.job = "job2"
    nodes.check()
    assert len(cluster.asked) == 2


def test_the_one_node_that_we_are_on_is_not_asked(cluster: Cluster) -> None:
    cluster.nodes = [node(1), node(2, alive=False), node(3, memory=1e9, GPU=8.0)]
    nodes.check()
    assert cluster.asked == []
    cluster.nodes = [node(1, memory=1e9), node(2)]  # a head that offers nothing, and the only machine that works
    nodes.check()
    assert cluster.asked == [["id2"]]


def test_the_one_node_of_a_cluster_that_ran_already_is_asked(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its workers have the environment of `ray start`."""
    cluster.nodes, cluster.started_here = [node(1)], False
    cluster.answers = {"id1": {**GOOD, "verl_ext failed": "ModuleNotFoundError: No module named 'verl_ext'"}}
    with pytest.raises(ClusterError, match=facts("1 of the 1 nodes", "host1", "No module named 'verl_ext'")):
        nodes.check()
    cluster.answers = {}
    with caplog.at_level(logging.INFO, "verl_ext"):
        nodes.check()
    assert cluster.asked == [["id1"], ["id1"]]
    assert a_line_says(caplog.text, "one node", "verl_ext 1.2.0", "verl 0.9.1")


@pytest.mark.parametrize(
    ("mode", "started", "ours"),
    [
        (ray.SCRIPT_MODE, SimpleNamespace(is_head=lambda: True), True),
        (ray.SCRIPT_MODE, SimpleNamespace(is_head=lambda: False), False),
        (ray.SCRIPT_MODE, None, False),
        (ray.WORKER_MODE, SimpleNamespace(is_head=lambda: False), True),
    ],
    ids=["a local Ray", "a cluster", "a cluster by Ray's client", "a worker"],
)
def test_whose_environment_workers_have(
    monkeypatch: pytest.MonkeyPatch, mode: int, started: SimpleNamespace | None, ours: bool
) -> None:
    monkeypatch.setattr(ray._private.worker, "global_worker", SimpleNamespace(mode=mode))
    monkeypatch.setattr(ray._private.worker, "_global_node", started)
    assert nodes.workers_have_our_environment() is ours


def test_every_node_that_differs_is_named_and_none_that_does_not(cluster: Cluster) -> None:
    cluster.nodes = [node(number) for number in range(1, 10)]
    cluster.answers = {
        "id2": {**GOOD, "verl_ext failed": "ModuleNotFoundError: No module named 'verl_ext'"},
        "id3": {**GOOD, "verl_ext": "1.1.0"},
        "id4": {**GOOD, "verl": "0.9.0", "verl_ext": "1.1.0"},
        "id5": {**GOOD, "plugin": None},
        "id6": {**GOOD, "plugin": None, "policy": "none"},
        "id7": "no answer within 300 s",
        "id8": {**GOOD, nodes.CODE: "0ther"},
        "id9": {**GOOD, "plugin": "this verl moved what verl_ext hooks into"},
    }
    with pytest.raises(ClusterError) as caught:
        nodes.check()
    said = str(caught.value)
    assert says(said, "8 of the 9 nodes", "verl_ext 1.2.0", "verl 0.9.1")
    wanted = [
        ("ModuleNotFoundError: No module named 'verl_ext'",),
        ("verl_ext 1.1.0", "/site/verl_ext", "expected 1.2.0"),
        ("verl_ext 1.1.0", "/site/verl_ext", "expected 1.2.0", "verl 0.9.0", "/site/verl"),
        ("plugin", "/site/verl_ext", "no installed"),
        ("plugin", "VERL_USE_EXTERNAL_PLUGINS=none"),
        ("no answer", "300 s"),
        ("verl_ext 1.2.0", "code", "/site/verl_ext"),
        ("plugin", "this verl moved what verl_ext hooks into"),
    ]
    lines = said.splitlines()[1:-1]
    for number, (line, found) in enumerate(zip(lines, wanted, strict=True), start=2):
        assert says(line, f"host{number}", f"10.0.0.{number}", f"id{number}", *found)
    assert "host1" not in said
    assert "algorithm.verl_ext.check_nodes=False" in said
    with pytest.raises(ClusterError):  # a second look is no pardon
        nodes.check()


def test_nothing_is_asked_without_ray(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    nodes.check()
    assert cluster.asked == []


def test_the_driver_asks_right_after_it_has_started_ray(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, Any]] = []

    def init(**kwargs: Any) -> str:
        started.append(kwargs)
        monkeypatch.setattr(ray, "is_initialized", lambda: True)
        return "context"

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    nodes.check_when_ray_runs(VerlExtSettings())
    nodes.check_when_ray_runs(VerlExtSettings())  # verl checks its configuration in two places
    assert cluster.asked == []
    cluster.answers = {"id2": {**GOOD, "verl_ext": "1.1.0"}}
    with pytest.raises(ClusterError, match="host2"):
        ray.init(num_cpus=3, runtime_env={"env_vars": {"MINE": "x"}})
    assert started == [{"num_cpus": 3, "runtime_env": {"env_vars": {"MINE": "x", nodes.ASKED: "1"}}}]
    assert len(cluster.asked) == 1
    assert ray.init is init


def test_a_trainer_whose_driver_has_asked_does_not_ask_again(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(nodes.ASKED, "1")
    nodes.check_in_trainer()
    nodes.check_when_ray_runs(VerlExtSettings())
    assert cluster.asked == []
    nodes.check()  # a driver does whatever its own environment says
    assert len(cluster.asked) == 1


KEYS = "+algorithm.rewards.keys=[correctness,format]"
OFF = "+algorithm.verl_ext.check_nodes=False"


@pytest.mark.parametrize("enter", [wrap_checked(lambda config: None), lambda config: attach(SimpleNamespace(), config)])
@pytest.mark.parametrize(
    ("overrides", "asked"),
    [
        (("algorithm.adv_estimator=gdpo", KEYS), 1),
        (("algorithm.adv_estimator=gdpo", KEYS, OFF), 0),
        (("algorithm.adv_estimator=grpo", KEYS), 0),
    ],
    ids=["ours", "switched off", "verl's own"],
)
def test_driver_and_trainer_ask(
    cluster: Cluster, enter: Callable[[Any], Any], overrides: tuple[str, ...], asked: int
) -> None:
    enter(compose(*overrides))
    assert len(cluster.asked) == asked


def test_the_answer_of_this_process_is_what_it_expects() -> None:
    import verl

    found = nodes.answer()
    assert found["verl_ext"] == verl_ext.__version__
    assert found["verl"] == verl.__version__
    assert nodes.trouble(found, found) is None


@pytest.mark.parametrize("policy", [None, "", "auto", "none", "other"])
def test_a_plugin_that_is_not_loaded_says_whether_it_was_switched_off(policy: str | None) -> None:
    said = str(nodes.trouble({**GOOD, "plugin": None, "policy": policy}, EXPECTED))
    off = policy in ("none", "other")
    assert (f"VERL_USE_EXTERNAL_PLUGINS={policy}" in said) is off
    assert ("VERL_USE_EXTERNAL_MODULES=verl_ext.integration.plugin" in said) is not off


def test_a_copy_that_is_not_installed_is_the_same_version_and_the_same_code(tmp_path: Path) -> None:
    """As `py_modules` brings it."""
    code_in, home = nodes.code_in, Path(verl_ext.__file__).parent
    copy = tmp_path / "verl_ext"
    shutil.copytree(home, copy, ignore=shutil.ignore_patterns("__pycache__"))
    told = subprocess.run(
        [
            sys.executable,
            "-I",
            "-S",
            "-c",
            f"import sys; sys.path = [{str(tmp_path)!r}, *sys.path]; import verl_ext as x; "
            "print(x.__version__, x.__file__)",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.split() == [verl_ext.__version__, str(copy / "__init__.py")]
    assert code_in(str(copy)) == nodes.answer()[nodes.CODE] == code_in(str(home))
    (copy / "notes.txt").write_text("no code")
    assert code_in(str(copy)) == code_in(str(home))
    seen = {code_in(str(home))}
    for change in (
        lambda: (copy / "settings.py").write_text("other = 1\n"),
        lambda: (copy / "settings.py").rename(copy / "renamed.py"),
        lambda: (copy / "core/more.py").touch(),
        lambda: (copy / "core/more.py").rename(copy / "rewards/more.py"),
    ):
        change()
        seen.add(code_in(str(copy)))
    assert len(seen) == 5
