"""The measures against their definitions, by hand."""

import numpy as np
import pytest

from verl_ext.core.groups import Groups
from verl_ext.tools.compare import measures

GROUPS = Groups.of(list("aaabbb"))


def measured(advantages, baseline):
    level = measures.by_accuracy(np.array([1 / 3, 1.0]), "accuracy")
    return measures.measure(np.array(advantages), np.array(baseline), GROUPS, level)


def test_fractions_of_zeros_zero_variance_groups_and_sign_flips():
    found = measured([1.0, 0.0, -1.0, 0.0, 0.0, 0.0], [-1.0, 1.0, -2.0, 0.0, 1.0, 0.0])
    assert (found.zero_variance, found.zero, found.sign_flips) == pytest.approx((1 / 2, 4 / 6, 1 / 6))
    assert found.mean_magnitude == pytest.approx(2 / 6)
    assert found.by_level[[2, 5], 0].tolist() == [2, 0]  # the first group has all of it


def test_the_interval_of_a_bin_is_that_of_the_mean_over_its_groups():
    level = measures.by_accuracy(np.array([0.5] * 4), "accuracy")
    groups = Groups.of(list("aabbccdd"))
    advantages = np.array([1.0, -1, 2, -2, 3, -3, 6, -6])
    found = measures.measure(advantages, advantages, groups, level).by_level[2]
    assert found == pytest.approx([1, 1.96 * np.std([1, 2, 3, 6], ddof=1) / 2 / 3])


def test_prompts_are_sorted_by_accuracy():
    bins = measures.by_accuracy(np.array([0, 0.1 + 0.2, 0.25, 2 / 3, 0.9, 1, np.nan]), "accuracy")
    assert bins.ids.tolist() == [0, 2, 1, 3, 4, 5, 6]
    assert len(bins.labels) == 7
