"""How a cluster's nodes are asked."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import cloudpickle

from tests.facts import says
from tests.integration.guards.test_nodes import GOOD, node
from verl_ext.integration.guards import nodes


class Asked:
    """In place of Ray's tasks: what each node answers and when, on a clock that only waiting moves on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: dict[str, tuple[float, Any]] = {}
        self.now, self.waits = 0.0, list[float]()
        self.sent: list[tuple[str, bool]] = []
        self.options: list[dict[str, Any]] = []
        self.cancelled: list[tuple[str, bool]] = []
        for name in ("remote", "wait", "get", "cancel"):
            monkeypatch.setattr(ray, name, getattr(self, name))
        # Ray's own takes nothing but ids of its making.
        monkeypatch.setattr(
            nodes,
            "NodeAffinitySchedulingStrategy",
            lambda node_id, soft: SimpleNamespace(node_id=node_id, soft=soft),
        )

    def remote(self, **options: Any) -> Callable[..., Any]:
        self.options.append(options)

        def of(function: Callable[..., Any]) -> Any:
            self.pickled = cloudpickle.dumps(function)
            return SimpleNamespace(options=self.task)

        return of

    def task(self, scheduling_strategy: Any) -> Any:
        def remote() -> str:
            self.sent.append((scheduling_strategy.node_id, scheduling_strategy.soft))
            return f"reference to {scheduling_strategy.node_id}"

        return SimpleNamespace(remote=remote)

    def due(self, reference: str) -> float:
        return self.answers[reference.rpartition(" ")[2]][0]

    def wait(self, references: list[str], *, num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        assert num_returns == len(references)
        self.waits.append(timeout)
        self.now = min(self.now + timeout, max(self.now, *map(self.due, references), 0.0))
        done = [reference for reference in references if self.due(reference) <= self.now]
        return done, [reference for reference in references if reference not in done]

    def get(self, reference: str) -> Any:
        found = self.answers[reference.rpartition(" ")[2]][1]
        if isinstance(found, BaseException):
            raise found
        return found

    def cancel(self, reference: str, *, force: bool) -> None:
        self.cancelled.append((reference.rpartition(" ")[2], force))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    return Asked(monkeypatch)


NEVER = float("inf")


def test_each_node_is_asked_on_itself_without_a_cpu(asked: Asked) -> None:
    asked.answers = {"id1": (1.0, GOOD), "id2": (2.0, GOOD)}
    assert nodes.ask([node(1), node(2)], 300.0) == {"id1": GOOD, "id2": GOOD}
    # A busy cluster has no free CPU; another node must not answer instead.
    assert asked.options == [{"num_cpus": 0, "max_retries": 0, "max_calls": 1}]
    assert asked.sent == [("id1", False), ("id2", False)]
    assert asked.waits == [nodes.SLOW]
    assert asked.cancelled == []


def test_a_slow_node_is_named_and_waited_for(asked: Asked, caplog: pytest.LogCaptureFixture) -> None:
    asked.answers = {"id1": (1.0, GOOD), "id2": (299.0, GOOD)}
    assert nodes.ask([node(1), node(2)], 300.0) == {"id1": GOOD, "id2": GOOD}
    (record,) = caplog.records
    assert says(record.getMessage(), "host2", "10.0.0.2", "id2")
    assert "host1" not in record.getMessage()
    assert asked.waits == [nodes.SLOW, 300.0 - nodes.SLOW]
    assert asked.cancelled == []


@pytest.mark.parametrize(("patience", "waits"), [(300.0, [30.0, 270.0]), (10.0, [10.0, 0.0])])
def test_a_node_that_never_answers_is_given_up(asked: Asked, patience: float, waits: list[float]) -> None:
    asked.answers = {"id1": (1.0, GOOD), "id2": (NEVER, GOOD)}
    found = nodes.ask([node(1), node(2)], patience)
    assert found["id1"] == GOOD
    assert says(found["id2"], "no answer", f"{patience:.0f} s")
    assert asked.waits == waits
    assert asked.cancelled == [("id2", True)]  # its worker process would go on importing verl


def test_a_node_that_could_not_be_asked_says_why(asked: Asked) -> None:
    asked.answers = {"id1": (1.0, GOOD), "id2": (2.0, ray.exceptions.RuntimeEnvSetupError("no such wheel"))}
    found = nodes.ask([node(1), node(2)], 300.0)
    assert found["id1"] == GOOD
    assert "RuntimeEnvSetupError: " in str(found["id2"])
    assert "no such wheel" in str(found["id2"])
    assert asked.cancelled == []


def test_an_error_that_is_not_ray_s_is_no_answer(asked: Asked) -> None:
    asked.answers = {"id1": (1.0, ValueError("a bug of ours"))}
    with pytest.raises(ValueError, match="a bug of ours"):
        nodes.ask([node(1)], 300.0)


def test_the_question_is_sent_whole(asked: Asked) -> None:
    """By name it could not be read where the package is missing."""
    asked.answers = {"id1": (1.0, GOOD)}
    nodes.ask([node(1)], 300.0)
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "verl_ext"}
    sys.modules["verl_ext"] = None  # type: ignore[assignment]
    try:
        question: Callable[[], dict[str, str | None]] = cloudpickle.loads(asked.pickled)
        found = question()
    finally:
        sys.modules.update(hidden)
    assert str(found["verl_ext failed"]).startswith("ModuleNotFoundError")
    assert "verl_ext cannot be imported" in str(nodes.trouble(found, nodes.answer()))
