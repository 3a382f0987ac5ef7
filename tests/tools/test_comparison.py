"""The measures against their definitions, computed by hand."""

import numpy as np
import pytest

from verl_ext.core.groups import Groups
from verl_ext.tools.compare.comparison import by_accuracy, measure, relative_means


def test_fractions_of_zeros_zero_variance_groups_and_sign_flips():
    groups = Groups.of(["a", "a", "a", "b", "b", "b"])
    advantages = np.array([1.0, 0.0, -1.0, 0.0, 0.0, 0.0])
    grpo_advantages = np.array([-1.0, 1.0, -2.0, 0.0, 1.0, 0.0])
    measures = measure(advantages, grpo_advantages, groups)
    assert measures.zero_variance == 1 / 2  # group b
    assert measures.zero == 4 / 6
    assert measures.sign_flips == 1 / 6  # the first row
    assert measures.mean_magnitude == pytest.approx(2 / 6)


def test_the_mean_of_a_bin_is_relative_to_the_mean_over_all_groups():
    bins = by_accuracy(np.array([1 / 3, 1.0]), "accuracy")
    means = relative_means(np.array([2.0, 0.0]), bins)[:, 0]
    bin_of_one_third, bin_of_one = 2, 5
    assert means[bin_of_one_third] == 2
    assert means[bin_of_one] == 0


def test_the_interval_of_a_bin_is_that_of_the_mean_over_its_groups():
    bins = by_accuracy(np.array([0.5, 0.5, 0.5, 0.5]), "accuracy")
    group_means = np.array([1.0, 2.0, 3.0, 6.0])
    mean, half_width = relative_means(group_means, bins)[2]
    standard_error = np.std(group_means, ddof=1) / np.sqrt(4)
    assert mean == 1
    assert half_width == pytest.approx(1.96 * standard_error / 3)


def test_prompts_are_sorted_by_accuracy():
    bins = by_accuracy(np.array([0, 0.1 + 0.2, 0.25, 2 / 3, 0.9, 1, np.nan]), "accuracy")
    assert bins.ids.tolist() == [0, 2, 1, 3, 4, 5, 6]
    assert bins.labels == ("0", "(0, 0.25]", "(0.25, 0.5]", "(0.5, 0.75]", "(0.75, 1)", "1", "not scored")
