"""The rewards of a batch, and what is read of it: which score, which turns, and what a batch for metrics leaves out."""

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
    settings = Settings.parse(algorithm)
    trainer = SimpleNamespace(config=SimpleNamespace(data=SimpleNamespace(max_response_length=7)))
    return Run(name, settings, None if by_verl else build(name, settings), trainer=trainer)


def test_the_turns_of_a_run_with_a_trainer_are_read_with_its_maximum_response_length() -> None:
    run = run_of("drgrpo", {"rewards": {"keys": ["tool"], "per_turn": ["tool"]}})
    assert (Request.of(run).turns, Request.of(run).max_response_length) == (True, 7)
    assert Request.of(run_of("drgrpo", {"rewards": {"keys": ["tool"]}})).max_response_length == 0


@pytest.mark.parametrize(
    ("name", "by_verl", "rewards"),
    [
        ("rloo", True, {"keys": ["score"], "log": "keys"}),
        ("gdpo", False, {"keys": ["score", "acc"], "token_scores": True}),
    ],
)
def test_a_reward_named_score_that_no_function_returned_is_read_from_the_trainer(
    name: str, by_verl: bool, rewards: dict[str, Any]
) -> None:
    run = run_of(name, {"rewards": rewards}, by_verl=by_verl)
    tensors = {"token_level_scores": torch.tensor([[0.0, 1.0], [0.0, 2.0], [0.0, 3.0], [0.0, 4.0]])}
    fields = {"acc": object_array([1.0, 0.0, 0.0, 1.0])}
    table = table_of(run, fields, UIDS, MASK, returned=["acc"], tensors=tensors)
    assert table.column("score").tolist() == [1.0, 2.0, 3.0, 4.0]


def test_what_the_agent_loop_wrote_is_read_before_a_field_of_the_same_name(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"depth": object_array([5.0, 6.0]), "extra_fields": object_array([{"depth": 1.0}, {"depth": 2.0}])}
    monkeypatch.setattr(queue, "fetch", lambda *_: dict(fields))
    table = queue.read_table(["p_0_0", "p_1_0"], "train", Request(Settings().rewards, names=("depth",)))
    assert table.column("depth").tolist() == [1.0, 2.0]
    fields["extra_fields"] = object_array([{}, {}])
    table = queue.read_table(["p_0_0", "p_1_0"], "train", Request(Settings().rewards, names=("depth",)))
    assert table.column("depth").tolist() == [5.0, 6.0]


def test_a_run_that_needs_no_reward_reads_nothing_from_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[Any] = []
    monkeypatch.setattr(queue, "fetch", lambda *given: fetched.append(given) or {})
    table = queue.read_table(["p_0_0", "q_0_0"], "train", Request(Settings().rewards))
    assert table.labels == ["p", "q"]
    assert fetched == []


@pytest.mark.parametrize(("width", "truncated"), [(7, [True, False, False, False]), (5, [False] * 4)])
def test_a_response_is_truncated_if_it_has_the_maximum_length_without_its_prompt(
    width: int, truncated: list[bool]
) -> None:
    run = run_of("drgrpo", {"rewards": {"keys": ["tool"], "per_turn": ["tool"]}})  # at most 7 tokens
    lengths = torch.tensor([[width], [width - 1], [width - 2], [1]])
    mask = (torch.arange(width) < lengths).long()
    prompt = torch.ones(4, 3, dtype=torch.int64)
    tensors = {"attention_mask": torch.cat([prompt, mask], dim=1)}
    table = table_of(run, {"tool": object_array([per_turn([1.0])] * 4)}, UIDS, mask, returned=["tool"], tensors=tensors)
    assert table.truncated is not None
    assert table.truncated.tolist() == truncated


def test_a_returned_reward_whose_field_is_gone_is_no_result() -> None:
    run = run_of("gdpo", {"rewards": {"keys": ["acc"]}})
    table = table_of(run, {"acc": object_array([1.0] * 4)}, UIDS, MASK, returned=["acc", "gone"])
    assert table.results is not None
    assert [*table.results] == ["acc"]


def test_without_a_kl_term_the_score_is_left_to_the_estimator() -> None:
    rewards = {"keys": ["acc"]}
    assert not Request.of(run_of("gdpo", {"rewards": rewards})).score
    assert Request.of(run_of("gdpo", {"rewards": rewards, "use_kl_in_reward": True})).score


def test_a_batch_for_metrics_has_no_conditions_and_nan_for_a_score_that_is_not_finite() -> None:
    conditions = {"easy": {"reward": "hard", "at_least": 1.0}}
    settings = Settings.parse({"rewards": {"keys": ["easy", "hard"], "conditions": conditions}}).rewards
    results = {"easy": [1.0] * 4, "hard": [0.0, 1.0, 0.0, 1.0]}
    table = Table(
        settings=settings, row_index=ROWS, labels=UIDS, results=results, score=np.array([np.inf, 1.0, 2.0, 3.0])
    )
    assert table.batch(["easy", "hard"]).rewards[:, 0].tolist() == [0.0, 1.0, 0.0, 1.0]
    assert table.batch(["easy", "hard"], for_estimator=False).rewards[:, 0].tolist() == [1.0] * 4
    np.testing.assert_array_equal(table.batch(None, for_estimator=False).raw[:, 0], [np.nan, 1.0, 2.0, 3.0])


def test_the_score_may_be_an_array_with_one_column_as_any_other_reward() -> None:
    settings = Settings.parse({"rewards": {"keys": ["score", "acc"]}}).rewards
    one_column = np.array([[1.0], [0.0], [0.5], [0.0]])
    table = Table(settings=settings, row_index=ROWS, labels=UIDS, results={"score": one_column, "acc": one_column})
    assert table.column("score").tolist() == table.column("acc").tolist() == [1.0, 0.0, 0.5, 0.0]


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
    mask = torch.tensor([[1, 0, 1], [1, 1, 0], [1, 0, 1], [1, 0, 0]])
    lists = object_array([per_turn([1.0, 0.0]), per_turn([1.0]), per_turn([0.0, 1.0]), per_turn([1.0])])
    table = table_of(run, {"tool": lists}, UIDS, mask, returned=["tool"])
    kl = np.array([-0.1, -0.2, -0.3, -0.4])
    accuracy = np.array([1.0, 0.0, 0.5, 0.25])
    batch = table.batch(["tool"], kl_reward=kl, accuracy=accuracy)
    assert batch.kl_reward is not None
    assert batch.kl_reward.tolist() == [-0.1, -0.1, -0.2, -0.3, -0.3, -0.4]
    assert batch.accuracy is not None
    assert batch.accuracy.tolist() == [1.0, 1.0, 0.0, 0.5, 0.5, 0.25]
