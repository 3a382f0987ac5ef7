"""Rewards by turn: a tree of decisions enumerated exactly, and what holds for any batch of turns."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from verl_ext import Batch, DataError, Settings, build
from verl_ext.core.groups import Groups
from verl_ext.core.metrics import reward_metrics
from verl_ext.core.steps import Centre
from verl_ext.core.totals import Whiten
from verl_ext.core.turns import Turns

NAN = math.nan
RIGHT = (0.6, 0.3, 0.7)
"""The chance that the call of a turn is right."""
STOP = (0.45, 0.6)
"""The chance that the model stops after it; the third turn is the last."""


def paths():
    """Each trajectory as `(probability, calls)`: turn 1, 2, 3 with a call that is right (1) or not (0) each."""
    for count in (1, 2, 3):
        for calls in itertools.product((1, 0), repeat=count):
            chance = math.prod(RIGHT[turn] if right else 1 - RIGHT[turn] for turn, right in enumerate(calls))
            chance *= math.prod(1 - stop for stop in STOP[: count - 1]) * (STOP[count - 1] if count < 3 else 1)
            yield chance, calls


def rewards(calls):
    """By turn: 1 for a right call, less later. Of the response: 2 if the last call and one before it are right."""
    own = [right * (1.0, 0.7, 0.4)[turn] for turn, right in enumerate(calls)]
    return own, 2.0 * (calls[-1] and sum(calls) > 1)


def scores(calls):
    """`d log p / d logit` of the two decisions of each turn: the call, and to stop (none at the third turn)."""
    for turn, right in enumerate(calls):
        stops = turn == len(calls) - 1
        yield [right - RIGHT[turn], *([stops - STOP[turn]] if turn < 2 else [])]


def ratios(advantages_of, size, discount=1.0):
    """For each turn and decision: the expected gradient of a group of `size`, divided by the true one."""
    every = list(paths())
    true = [np.zeros(2), np.zeros(2), np.zeros(1)]
    for chance, calls in every:
        own, whole = rewards(calls)
        for turn, score in enumerate(scores(calls)):
            later = sum(discount ** (at - turn) * own[at] for at in range(turn, len(calls)))
            true[turn] += chance * np.array(score) * (later + discount ** (len(calls) - 1 - turn) * whole)
    found = [np.zeros_like(each) for each in true]
    groups = list(itertools.product(range(len(every)), repeat=size))
    counts, given_rewards, labels = [], [], []
    for prompt, group in enumerate(groups):
        for member in group:
            own, whole = rewards(every[member][1])
            counts.append(len(own))
            given_rewards += [[one, whole] for one in own]
            labels += [prompt] * len(own)
    advantages = iter(advantages_of(np.array(given_rewards), labels, Turns.of_counts(counts, (0,), discount)))
    for group in groups:
        chance = math.prod(every[member][0] for member in group)
        for member in group:
            for turn, score in enumerate(scores(every[member][1])):
                found[turn] += chance * next(advantages) * np.array(score) / size
    return [each / wanted for each, wanted in zip(found, true, strict=True)]


def by_turn(*steps):
    chain = build("compose", Settings.parse({"compose": {"steps": list(steps)}}))
    return lambda values, labels, turns: chain(Batch.of(values, labels, keys=("own", "whole"), turns=turns)).advantages


def spread(found):
    """How far the two decisions of a turn are from one factor, in the worst turn."""
    return max(float(np.ptp(each)) for each in found)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("discount", [1.0, 0.5])
@pytest.mark.parametrize("steps", [("weigh_and_sum", "centre"), ("centre", "weigh_and_sum")])
def test_all_decisions_of_a_turn_have_one_factor_and_it_is_known(steps, discount, size):
    found = ratios(by_turn(*steps), size, discount)
    assert spread(found) < 1e-12
    reached = np.cumprod([1.0, 1 - STOP[0], 1 - STOP[1]])
    # With m - 1 of the size - 1 others there, the factor is E[(m - 1) / m].
    for each, chance in zip(found, reached, strict=True):
        others = range(size)
        chances = [math.comb(size - 1, k) * chance**k * (1 - chance) ** (size - 1 - k) for k in others]
        assert each == pytest.approx(sum(p * k / (k + 1) for k, p in zip(others, chances, strict=True)), abs=1e-12)


def test_leaving_one_out_makes_the_factor_the_share_that_is_not_alone():
    found = ratios(by_turn("weigh_and_sum", {"step": "centre", "leave_one_out": True}), 3)
    assert spread(found) < 1e-12
    alone = [(1 - chance) ** 2 for chance in np.cumprod([1.0, 1 - STOP[0], 1 - STOP[1]])]
    assert [float(each[0]) for each in found] == pytest.approx([1 - chance for chance in alone], abs=1e-12)


def test_returns_are_what_is_still_to_come_and_not_scored_before_an_entry_that_is_not():
    turns = Turns.of_counts([3, 1, 2], (0,), 0.5)
    given_rewards = np.array([[1.0, 4], [NAN, 4], [4, 4], [3, NAN], [0, 6], [2, 6]])
    wanted = [[NAN, 1], [NAN, 2], [4, 4], [3, NAN], [1, 3], [2, 6]]
    np.testing.assert_array_equal(turns.returns(given_rewards), wanted)


def test_a_response_alone_is_whitened_over_its_turns():
    """Half of 2^2 + 1^2 is the variance: no mean is subtracted."""
    batch = Batch.of([[1.0], [1.0]], ["p", "p"], turns=Turns.of_counts([2], (0,)))
    chain = build("compose", Settings.parse({"compose": {"steps": ["weigh_and_sum", "whiten"]}}))
    np.testing.assert_allclose(chain(batch).advantages, [2 / math.sqrt(2.5), 1 / math.sqrt(2.5)], rtol=1e-5)


def test_a_conflict_of_one_prompt_moves_no_turn_of_another():
    """gd2po drops the conflict, so that its group is not centred; its scale alone reaches the others."""
    settings = Settings.parse({"gd2po": {"whiten": "sequence"}})
    turns = Turns.of_counts([2, 1, 1, 1, 1], (0,))
    apart = [[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]]
    for conflict in ([[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]], [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]):
        batch = Batch.of([*apart, *conflict], list("pppqqq"), keys=("tool", "right"), turns=turns)
        found = build("gd2po", settings)(batch)
        assert found.advantages[1] == 0  # no other response reached this turn
        assert found.advantages[0] == -found.advantages[2] > 0
        assert found.metrics["whiten_shift"] == 0


def test_whitening_subtracts_nothing_because_the_mean_would_depend_on_the_decision_to_stop():
    def less_the_mean(values, labels, turns):
        found = by_turn("centre", "weigh_and_sum")(values, labels, turns)
        prompts, once = Groups.of(labels), turns.response_weights(np.full(len(labels), True))
        return found - prompts.broadcast(prompts.sum(once * found) / prompts.sum(once))

    assert spread(ratios(less_the_mean, 2)) > 0.01
    batch = Batch.of([[1.0], [1.0], [0.0]], ["p"] * 3, turns=Turns.of_counts([2, 1], (0,)))
    values = Centre().apply(batch.returns, batch)
    found = Whiten().update(values, batch, None)
    assert found.metrics["whiten_shift"] == 0
    assert found.values[1] == 0  # no other response reached this turn
    assert (found.values * values >= 0).all()


@pytest.mark.parametrize("numbers", [[1], [0, 2], [0, 0, 2], [0, 1, 1], [0, -1]])
def test_turns_that_do_not_follow_one_another_are_refused(numbers):
    with pytest.raises(DataError, match="turns"):
        Turns(np.array(numbers))


def test_metrics_count_responses_and_show_the_first_turns():
    turns = Turns.of_counts([10, 1, 2], (0,))
    entries = np.array([[float(turn)] for turn in [*range(10), 3, 5, NAN]])
    batch = Batch.of(np.hstack([entries, np.ones((13, 1))]), ["a"] * 13, keys=("tool", "acc"), turns=turns)
    found = reward_metrics(batch)
    assert found["reward/tool/mean"] == (45 + 3) / 2
    assert found["reward/tool/unscored"] == 1
    assert found["reward/acc/mean"] == 1
    assert {name for name in found if "by_turn" in name} == {f"reward/tool/by_turn/{t}/mean" for t in range(1, 9)}
    assert found["reward/tool/by_turn/1/mean"] == (0 + 3 + 5) / 3
    assert found["reward/tool/by_turn/2/mean"] == 1  # the NaN is not scored
