"""The worked example of the specification, through the core and through the registered function.

Groups A, B, C of 4: acc = [1000 | 1110 | 0000], lengths = [4231 | 2253 | 3331].
"""

import numpy as np
import pytest

from tests.batches import ACC, LENGTHS, UIDS
from tests.calls import call, metrics_of
from verl_ext import Batch, Settings, build

# A: sum |r - 1/4| = 1.5, so 4 * 0.75 / 1.5001 = 1.999867 and a third of it. B the same mirrored.
# All lengths add up to 32, those of A and B to 10 + 12: z = 32 / 22 = 1.454545.
# exp(-0.25/2) = 0.882497, exp(-0.75/2) = 0.687289: lambda = 2 * odds / 1.569786 = 1.124353 and 0.875647.
# A: 1.999867 * 1.454545 * 1.124353 = 3.270627; B: 0.666622 * 1.454545 * 0.875647 = 0.849056.
DGPO = [3.270627, *[-1.090209] * 3, *[0.849056] * 3, -2.547167, 0, 0, 0, 0]


def test_the_core_and_the_registered_function_give_the_row_of_dgpo():
    accuracy = np.array(ACC)
    batch = Batch.of(accuracy[:, None], UIDS, lengths=LENGTHS, accuracy=accuracy)
    np.testing.assert_allclose(build("dgpo", Settings())(batch).advantages, DGPO, atol=1e-5)
    found = call("dgpo", ACC, UIDS, LENGTHS)
    np.testing.assert_allclose(found.rows, DGPO, atol=1e-5)
    assert found.returns is found.tensor


def test_dgpo_logs_the_numbers_of_the_row():
    metrics = metrics_of("dgpo", ACC, UIDS, lengths=LENGTHS)
    assert metrics["dgpo/balance_z"] == pytest.approx(32 / 22)
    assert metrics["dgpo/zero_variance_fraction"] == pytest.approx(4 / 12)  # the four rows of C
    assert metrics["dgpo/difficulty_weight_max"] == pytest.approx(1.124353, abs=1e-6)
    assert metrics["dgpo/difficulty_weight_min"] == pytest.approx(0.875647, abs=1e-6)
    assert metrics["dgpo/valid_groups"] == 2
    assert metrics["dgpo/all_correct_groups"] == 0
    assert metrics["dgpo/all_incorrect_groups"] == 1
