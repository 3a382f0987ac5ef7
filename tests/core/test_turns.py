"""Per-turn rewards: returns, conflicts, and the metrics of turns."""

import math

import numpy as np
import pytest

from tests.facts import facts
from verl_ext import Batch, DataError, Settings, build
from verl_ext.core.metrics import reward_metrics
from verl_ext.core.turns import Turns

NAN = math.nan
CONFLICT = [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]
NO_CONFLICT = [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("rewards_of_q", [NO_CONFLICT, CONFLICT], ids=["no conflict", "conflict"])
def test_a_conflict_in_one_prompt_does_not_shift_the_turns_of_another(rewards_of_q):
    """gd2po drops the conflict, so that group q is not centered. Only the scale of the other groups may change.

    No other response to p reaches the second turn of the first response.
    """
    rewards_of_p = [[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]]
    turns = Turns.of_counts([2, 1, 1, 1, 1], (0,))
    batch = Batch.of([*rewards_of_p, *rewards_of_q], list("pppqqq"), keys=("tool", "correct"), turns=turns)
    settings = Settings.parse({"gd2po": {"whiten": "sequence"}})

    result = build("gd2po", settings)(batch)

    first_turn, second_turn, other_response = result.advantages[:3]
    assert second_turn == 0
    assert first_turn > 0
    assert other_response == -first_turn
    assert result.metrics["whiten_shift"] == 0


@pytest.mark.parametrize("numbers", [[1], [0, 2], [0, 0, 2], [0, 1, 1], [0, -1]], ids=str)
def test_turn_numbers_with_gaps_or_repetitions_are_rejected(numbers):
    with pytest.raises(DataError, match="turns"):
        Turns(np.array(numbers))


@pytest.mark.parametrize("discount", [0.9, 1.0, 0.0])
def test_a_value_of_the_last_turn_has_discounted_sums_at_earlier_turns(discount):
    """They equal the returns of a per-turn reward that is 0 before the last turn."""
    random = np.random.default_rng(0)
    turns = Turns.of_counts(random.integers(1, 6, 40), (0,), discount)
    values = np.where(turns.last, random.normal(size=len(turns.number)), 0.0)
    before = values.copy()

    discounted_sums = turns.discounted_sums(values)

    np.testing.assert_array_equal(values, before)
    np.testing.assert_array_equal(discounted_sums, turns.returns(values[:, None])[:, 0])
    for row, number in enumerate(turns.number):
        last_row = row + np.argmax(turns.last[row:])
        turns_to_the_end = turns.number[last_row] - number
        assert discounted_sums[row] == pytest.approx(discount**turns_to_the_end * values[last_row])


def test_metrics_count_responses_and_describe_the_first_eight_turns():
    """Three responses have 10, 1 and 2 turns. The second turn of the third response is not scored."""
    turns = Turns.of_counts([10, 1, 2], (0,))
    tool = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 3, 5, NAN]
    batch = Batch.of([[reward, 1.0] for reward in tool], ["a"] * 13, keys=("tool", "acc"), turns=turns)

    metrics = reward_metrics(batch)

    assert metrics["reward/tool/mean"] == (45 + 3) / 2
    assert metrics["reward/tool/unscored"] == 1
    assert metrics["reward/acc/mean"] == 1
    per_turn_metrics = {name for name in metrics if "per_turn" in name}
    assert per_turn_metrics == {f"reward/tool/per_turn/{turn}/mean" for turn in range(1, 9)}
    assert metrics["reward/tool/per_turn/1/mean"] == (0 + 3 + 5) / 3
    assert metrics["reward/tool/per_turn/2/mean"] == 1


def test_each_response_has_at_least_one_turn():
    with pytest.raises(DataError, match=facts("turn")):
        Turns.of_counts([2, 0, 1])
