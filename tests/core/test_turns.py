"""Rewards by turn: returns, conflicts, and the metrics of turns."""

import math

import numpy as np
import pytest

from tests.facts import facts
from verl_ext import Batch, DataError, Settings, build
from verl_ext.core.metrics import reward_metrics
from verl_ext.core.turns import Turns

NAN = math.nan


def test_a_conflict_of_one_prompt_moves_no_turn_of_another():
    """gd2po drops the conflict, so that its group is not centered; its scale alone reaches the others."""
    settings = Settings.parse({"gd2po": {"whiten": "sequence"}})
    turns = Turns.of_counts([2, 1, 1, 1, 1], (0,))
    apart = [[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]]
    for conflict in ([[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]], [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]):
        batch = Batch.of([*apart, *conflict], list("pppqqq"), keys=("tool", "right"), turns=turns)
        found = build("gd2po", settings)(batch)
        assert found.advantages[1] == 0  # no other response reached this turn
        assert found.advantages[0] == -found.advantages[2] > 0
        assert found.metrics["whiten_shift"] == 0


@pytest.mark.parametrize("numbers", [[1], [0, 2], [0, 0, 2], [0, 1, 1], [0, -1]])
def test_turns_that_do_not_follow_one_another_are_refused(numbers):
    with pytest.raises(DataError, match="turns"):
        Turns(np.array(numbers))


@pytest.mark.parametrize("discount", [0.9, 1.0, 0.0])
def test_a_value_of_the_last_turns_has_the_returns_of_a_per_turn_reward(discount):
    rng = np.random.default_rng(0)
    turns = Turns.of_counts(rng.integers(1, 6, 40), (0,), discount)
    values = np.where(turns.last, rng.normal(size=len(turns.number)), 0.0)
    before = values.copy()
    found = turns.discounted_sums(values)
    np.testing.assert_array_equal(found, turns.returns(values[:, None])[:, 0])
    np.testing.assert_array_equal(values, before)
    for row, number in enumerate(turns.number):
        last_row = row + np.argmax(turns.last[row:])
        assert found[row] == pytest.approx(discount ** (turns.number[last_row] - number) * values[last_row])


def test_metrics_count_responses_and_show_the_first_turns():
    turns = Turns.of_counts([10, 1, 2], (0,))
    entries = np.array([[float(turn)] for turn in [*range(10), 3, 5, NAN]])
    batch = Batch.of(np.hstack([entries, np.ones((13, 1))]), ["a"] * 13, keys=("tool", "acc"), turns=turns)
    found = reward_metrics(batch)
    assert found["reward/tool/mean"] == (45 + 3) / 2
    assert found["reward/tool/unscored"] == 1
    assert found["reward/acc/mean"] == 1
    assert {name for name in found if "per_turn" in name} == {f"reward/tool/per_turn/{t}/mean" for t in range(1, 9)}
    assert found["reward/tool/per_turn/1/mean"] == (0 + 3 + 5) / 3
    assert found["reward/tool/per_turn/2/mean"] == 1  # the NaN is not scored


def test_each_response_has_at_least_one_turn():
    with pytest.raises(DataError, match=facts("turn")):
        Turns.of_counts([2, 0, 1])
