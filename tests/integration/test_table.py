"""The table of rewards of a batch: which score and which turns are read, and what a batch for metrics omits."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.calls import object_array, table_of
from verl_ext import Settings, build, per_turn
from verl_ext.advantages import queue
from verl_ext.advantages.table import Request, Table
from verl_ext.core.row_index import RowIndex
from verl_ext.errors import DataError
from verl_ext.run import Run

UIDS = ["p", "p", "q", "q"]
ROWS = RowIndex.of_padding(np.zeros(4, dtype=bool))
MASK = torch.ones(4, 2, dtype=torch.int64)


def run_of(name: str, algorithm: dict[str, Any], *, by_verl: bool = False) -> Run:
    """Return a run whose trainer has a maximum response length of 7. With `by_verl`, verl computes the advantages."""
    settings = Settings.parse(algorithm)
    trainer = SimpleNamespace(config=SimpleNamespace(data=SimpleNamespace(max_response_length=7)))
    return Run(name, settings, None if by_verl else build(name, settings), trainer=trainer)


def test_turns_are_requested_with_the_trainers_maximum_response_length() -> None:
    request = Request.of(run_of("drgrpo", {"rewards": {"keys": ["tool"], "per_turn": ["tool"]}}))
    assert request.turns
    assert request.max_response_length == 7
    request_without_turns = Request.of(run_of("drgrpo", {"rewards": {"keys": ["tool"]}}))
    assert request_without_turns.max_response_length == 0


@pytest.mark.parametrize(
    ("name", "by_verl", "rewards"),
    [
        ("rloo", True, {"keys": ["score"], "log": "keys"}),
        ("gdpo", False, {"keys": ["score", "acc"], "token_scores": True}),
    ],
)
def test_the_key_score_is_the_trainers_score_if_the_function_returned_none(
    name: str, by_verl: bool, rewards: dict[str, Any]
) -> None:
    run = run_of(name, {"rewards": rewards}, by_verl=by_verl)
    token_level_scores = torch.tensor([[0.0, 1.0], [0.0, 2.0], [0.0, 3.0], [0.0, 4.0]])
    fields = {"acc": object_array([1.0, 0.0, 0.0, 1.0])}
    tensors = {"token_level_scores": token_level_scores}
    table = table_of(run, fields, UIDS, MASK, returned=["acc"], tensors=tensors)
    assert table.column("score").tolist() == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    ("extra_fields", "expected"), [([{"depth": 1.0}, {"depth": 2.0}], [1.0, 2.0]), ([{}, {}], [5.0, 6.0])]
)
def test_the_agent_loops_value_precedes_a_field_of_the_same_name(
    extra_fields: list[dict[str, float]], expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"depth": object_array([5.0, 6.0]), "extra_fields": object_array(extra_fields)}
    monkeypatch.setattr(queue, "fetch", lambda *_: fields)
    request = Request(Settings().rewards, names=("depth",))
    table = queue.read_table(["p_0_0", "p_1_0"], "train", request)
    assert table.column("depth").tolist() == expected


def test_a_run_that_needs_no_reward_does_not_read_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise AssertionError("the queue was read")

    monkeypatch.setattr(queue, "fetch", fail)
    table = queue.read_table(["p_0_0", "q_0_0"], "train", Request(Settings().rewards))
    assert table.labels == ["p", "q"]


@pytest.mark.parametrize(("width", "truncated"), [(7, [True, False, False, False]), (5, [False] * 4)])
def test_a_response_of_the_maximum_length_without_its_prompt_is_truncated(width: int, truncated: list[bool]) -> None:
    """The maximum length is 7."""
    run = run_of("drgrpo", {"rewards": {"keys": ["tool"], "per_turn": ["tool"]}})
    lengths = torch.tensor([[width], [width - 1], [width - 2], [1]])
    mask = (torch.arange(width) < lengths).long()
    prompt_mask = torch.ones(4, 3, dtype=torch.int64)
    fields = {"tool": object_array([per_turn([1.0])] * 4)}
    tensors = {"attention_mask": torch.cat([prompt_mask, mask], dim=1)}
    table = table_of(run, fields, UIDS, mask, returned=["tool"], tensors=tensors)
    assert table.truncated is not None
    assert table.truncated.tolist() == truncated


def test_a_returned_reward_without_a_field_is_no_result() -> None:
    run = run_of("gdpo", {"rewards": {"keys": ["acc"]}})
    table = table_of(run, {"acc": object_array([1.0] * 4)}, UIDS, MASK, returned=["acc", "gone"])
    assert table.results is not None
    assert [*table.results] == ["acc"]


def test_the_score_is_requested_only_with_a_kl_term() -> None:
    rewards = {"keys": ["acc"]}
    without_kl = run_of("gdpo", {"rewards": rewards})
    with_kl = run_of("gdpo", {"rewards": rewards, "use_kl_in_reward": True})
    assert not Request.of(without_kl).score
    assert Request.of(with_kl).score


def test_conditions_hold_for_the_estimator_but_not_for_metrics() -> None:
    conditions = {"easy": {"reward": "hard", "at_least": 1.0}}
    settings = Settings.parse({"rewards": {"keys": ["easy", "hard"], "conditions": conditions}}).rewards
    results = {"easy": [1.0] * 4, "hard": [0.0, 1.0, 0.0, 1.0]}
    table = Table(settings=settings, row_index=ROWS, labels=UIDS, results=results)
    for_estimator = table.batch(["easy", "hard"])
    for_metrics = table.batch(["easy", "hard"], for_estimator=False)
    assert for_estimator.rewards[:, 0].tolist() == [0.0, 1.0, 0.0, 1.0]
    assert for_metrics.rewards[:, 0].tolist() == [1.0] * 4


def test_an_infinite_score_is_nan_in_a_batch_for_metrics() -> None:
    settings = Settings.parse({"rewards": {"keys": ["acc"]}}).rewards
    table = Table(settings=settings, row_index=ROWS, labels=UIDS, results={}, score=np.array([np.inf, 1.0, 2.0, 3.0]))
    for_metrics = table.batch(None, for_estimator=False)
    np.testing.assert_array_equal(for_metrics.raw[:, 0], [np.nan, 1.0, 2.0, 3.0])


@pytest.mark.parametrize("key", ["score", "acc"])
def test_a_reward_may_be_an_array_with_one_column(key: str) -> None:
    settings = Settings.parse({"rewards": {"keys": [key]}}).rewards
    one_column = np.array([[1.0], [0.0], [0.5], [0.0]])
    table = Table(settings=settings, row_index=ROWS, labels=UIDS, results={key: one_column})
    assert table.column(key).tolist() == [1.0, 0.0, 0.5, 0.0]


@pytest.mark.parametrize("tokens", [(1, 1, 1, 1), (2, 1, 3, 1)])
def test_a_field_with_a_value_per_token_is_no_reward(tokens: tuple[int, ...]) -> None:
    """An estimator stops with an error that names the reward. For an estimator of verl, the metrics are NaN."""
    settings = Settings.parse({"rewards": {"keys": ["depth"]}}).rewards
    field = torch.nested.as_nested_tensor([torch.ones(count) for count in tokens], layout=torch.jagged)
    table = Table(settings=settings, row_index=ROWS, labels=UIDS, fields={"depth": field})
    with pytest.raises(DataError, match="'depth'"):
        table.column("depth")
    assert np.isnan(table.column("depth", strict=False)).all()


def test_each_turn_has_the_kl_term_and_the_accuracy_of_its_response() -> None:
    run = run_of("drgrpo", {"rewards": {"keys": ["tool"], "per_turn": ["tool"]}})
    # The responses have two turns, one turn, two turns, and one turn.
    mask = torch.tensor([[1, 0, 1], [1, 1, 0], [1, 0, 1], [1, 0, 0]])
    rewards = [per_turn([1.0, 0.0]), per_turn([1.0]), per_turn([0.0, 1.0]), per_turn([1.0])]
    table = table_of(run, {"tool": object_array(rewards)}, UIDS, mask, returned=["tool"])
    kl_of_response = np.array([-0.1, -0.2, -0.3, -0.4])
    accuracy_of_response = np.array([1.0, 0.0, 0.5, 0.25])
    batch = table.batch(["tool"], kl_reward=kl_of_response, accuracy=accuracy_of_response)
    assert batch.kl_reward is not None
    assert batch.kl_reward.tolist() == [-0.1, -0.1, -0.2, -0.3, -0.3, -0.4]
    assert batch.accuracy is not None
    assert batch.accuracy.tolist() == [1.0, 1.0, 0.0, 0.5, 0.5, 0.25]
