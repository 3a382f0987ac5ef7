"""The statistics of groups: when a group has zero variance, and division by zero."""

import math

import numpy as np
import pytest

from verl_ext.core.groups import Groups, divide

NAN = math.nan


@pytest.mark.parametrize(
    ("values", "varies"),
    [
        ([0.0, 0.9e-6], False),  # the limit is 1e-6 * max(1, |mean|), here 1e-6
        ([0.0, 1.1e-6], True),
        ([1000.0, 1000.0009], False),  # 1e-6 * 1000
        ([1000.0, 1000.0011], True),
        ([-1000.0, -1000.0009], False),
        ([-1000.0, -1000.0011], True),
        ([0.0, 1e-6], False),  # at the limit itself
        ([0.1, 0.1 + 5e-7], False),  # the mean counts as 1 at least
        ([1e6, 999999.0], True),  # wider than 1e-6 of the mean, as wide as 1e-6 of the largest
        ([0.2] * 7 + [0.2 + 1.5e-8], False),  # one unit in the last place of float32
        ([5.0], False),
        ([5.0, NAN], False),
        ([NAN, NAN], False),
    ],
    ids=str,
)
def test_variance_is_relative_to_the_mean(values, varies):
    groups = Groups.of(["g"] * len(values))
    column = np.array(values)

    mean, varies_too = groups.variation(column)

    assert groups.varies(column).tolist() == [varies]
    assert varies_too.tolist() == [varies]
    np.testing.assert_array_equal(mean, groups.mean(column))


def test_division_by_zero_is_zero_and_nan_stays():
    with np.errstate(all="raise"):
        quotient = divide(np.array([1.0, 0.0, NAN]), np.array([0.0, 0.0, 2.0]))
    np.testing.assert_array_equal(quotient, [0, 0, NAN])
