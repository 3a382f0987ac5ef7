"""The helper of the tests finds a fact as a whole, wherever it stands."""

from __future__ import annotations

import pytest

from tests.facts import a_line_says, facts, says

MESSAGE = "algorithm.gdpo.epsilon must be above 0, found -3.5;\nset algorithm.rewards.weights=[1,12]."


@pytest.mark.parametrize(
    "found", [(), ("found",), (0, "algorithm.gdpo.epsilon"), (-3.5, 12), ("weights=[1", "above"), ("epsilon", 1)]
)
def test_facts_are_found_in_any_order_and_on_any_line(found):
    assert says(MESSAGE, *found)


@pytest.mark.parametrize("missing", [3.5, 3, 5, 2, "weight", "reward", "bov", "algorithm.gdpo.eps", "[1]"])
def test_a_part_of_a_name_or_of_a_number_is_no_fact(missing):
    assert not says(MESSAGE, missing)
    assert not says(MESSAGE, "found", missing)


def test_facts_of_one_line_stand_on_one_line():
    assert a_line_says(MESSAGE, "found", "algorithm.gdpo.epsilon")
    assert not a_line_says(MESSAGE, "found", "algorithm.rewards.weights")


def test_pytest_takes_the_pattern():
    with pytest.raises(ValueError, match=facts(-3.5, "algorithm.gdpo.epsilon")):
        raise ValueError(MESSAGE)
