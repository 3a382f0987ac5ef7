"""Lite PPO by hand: the standard deviation is that of the rewards of the batch, before they are centered."""

import numpy as np

from verl_ext import Batch, Settings, build


def test_centered_rewards_are_divided_by_the_std_of_the_raw_rewards():
    """The rewards 0, 1, 10 and 11 have mean 5.5 and variance (2 * 5.5² + 2 * 4.5²) / 3 = 33.667."""
    batch = Batch.of([[0.0], [1.0], [10.0], [11.0]], ["p", "p", "q", "q"])

    result = build("liteppo", Settings())(batch)

    expected = 0.5 / 33.667**0.5  # each reward differs by 0.5 from the mean of its group
    np.testing.assert_allclose(result.advantages, [-expected, expected, -expected, expected], rtol=1e-5)
