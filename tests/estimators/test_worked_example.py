"""The worked example of the specification, through the core and through the registered function.

The three groups A, B and C have four responses each:

    group      A          B          C
    accuracy   1 0 0 0    1 1 1 0    0 0 0 0
    tokens     4 2 3 1    2 2 5 3    3 3 3 1
"""

import numpy as np
import pytest

from tests.batches import ACC, LENGTHS, UIDS
from tests.calls import call, metrics_of
from verl_ext import Batch, Settings, build

# A: the mean is 1/4, and sum |r - 1/4| = 1.5. So the correct response has 4 * 0.75 / 1.5001 = 1.999867, and the other
# three have minus a third of it. B is the same mirrored.
# All lengths add up to 32, those of A and B to 10 + 12: z = 32 / 22 = 1.454545.
# exp(-0.25/2) = 0.882497, exp(-0.75/2) = 0.687289: lambda = 2 * odds / 1.569786 = 1.124353 and 0.875647.
# A: 1.999867 * 1.454545 * 1.124353 = 3.270627; B: 0.666622 * 1.454545 * 0.875647 = 0.849056.
DGPO_ADVANTAGES = [3.270627, *[-1.090209] * 3, *[0.849056] * 3, -2.547167, 0, 0, 0, 0]


def test_dgpo_in_the_core_gives_the_worked_example():
    accuracy = np.array(ACC)
    batch = Batch.of(accuracy[:, None], UIDS, lengths=LENGTHS, accuracy=accuracy)

    result = build("dgpo", Settings())(batch)

    np.testing.assert_allclose(result.advantages, DGPO_ADVANTAGES, atol=1e-5)


def test_dgpo_called_by_verl_gives_the_worked_example():
    result = call("dgpo", ACC, UIDS, LENGTHS)

    np.testing.assert_allclose(result.rows, DGPO_ADVANTAGES, atol=1e-5)
    assert result.returns is result.tensor


def test_dgpo_logs_the_numbers_of_the_worked_example():
    metrics = metrics_of("dgpo", ACC, UIDS, lengths=LENGTHS)

    assert metrics["dgpo/balance_z"] == pytest.approx(32 / 22)
    assert metrics["dgpo/zero_variance_fraction"] == pytest.approx(4 / 12)  # the four rows of C
    assert metrics["dgpo/difficulty_weight_max"] == pytest.approx(1.124353, abs=1e-6)
    assert metrics["dgpo/difficulty_weight_min"] == pytest.approx(0.875647, abs=1e-6)
    assert metrics["dgpo/valid_groups"] == 2
    assert metrics["dgpo/all_correct_groups"] == 0
    assert metrics["dgpo/all_incorrect_groups"] == 1
