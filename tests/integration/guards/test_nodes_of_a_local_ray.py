"""One node of a Ray that this process has started, to itself and to another driver."""

from __future__ import annotations

import subprocess
import sys

import pytest
import ray

from tests.facts import a_line_says
from verl_ext.integration.guards import nodes


def test_one_that_starts_ray_asks_nothing(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert nodes.workers_have_our_environment()

    @ray.remote(num_cpus=0)
    def worker_has() -> bool:
        return nodes.workers_have_our_environment()

    assert ray.get(worker_has.remote())
    monkeypatch.setattr(nodes, "_asked", set())
    monkeypatch.setattr(nodes, "ask", lambda *_: pytest.fail("the node was asked"))
    nodes.check()


def test_one_that_joins_asks(cluster: None) -> None:
    code = (
        "import verl, ray; from verl_ext.integration.guards import nodes; "
        f"ray.init(address={ray.get_runtime_context().gcs_address!r}, log_to_driver=False); "
        "assert not nodes.workers_have_our_environment(); nodes.check(60.0)"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert a_line_says(done.stderr, "one node", "verl_ext")
