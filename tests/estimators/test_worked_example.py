"""The worked example of the specification, through the core and through the registered function.

Groups A, B, C of 4: acc = [1000 | 1110 | 0000], fmt = [1100 | 1011 | 0100], lengths = [4231 | 2253 | 3331].
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.batches import ACC, FMT, LENGTHS, UIDS
from tests.calls import call, metrics_of
from verl_ext import Batch, Settings, build

# A: sum |r - 1/4| = 1.5, so 4 * 0.75 / 1.5001 = 1.999867 and a third of it. B the same mirrored.
# All lengths add up to 32, those of A and B to 10 + 12: z = 32 / 22 = 1.454545.
# exp(-0.25/2) = 0.882497, exp(-0.75/2) = 0.687289: lambda = 2 * odds / 1.569786 = 1.124353 and 0.875647.
# A: 1.999867 * 1.454545 * 1.124353 = 3.270627; B: 0.666622 * 1.454545 * 0.875647 = 0.849056.
DGPO = [3.270627, *[-1.090209] * 3, *[0.849056] * 3, -2.547167, 0, 0, 0, 0]


# With fmt: totals [2100 | 2121 | 0100], means 0.75, 1.5, 0.25; sums of |r - mean| 3, 2, 1.5; z = 1, every group varies.
# acc 0.25, 0.75 and 0, which counts as 1: odds 0.882497, 0.687289, 0.606531, sum 2.176317.
# lambda = 3 * odds / sum = 1.216503, 0.947411, 0.836087.
# A: 4 * 1.25 / 3.0001 * 1.216503 = 2.027433; B: 4 * 0.5 / 2.0001 * 0.947411 = 0.947364;
# C: 4 * 0.75 / 1.5001 * 0.836087 = 1.672064.
DGPO_BOTH = [2.027433, 0.405487, *[-1.216460] * 2, *[0.947364, -0.947364] * 2, -0.557355, 1.672064, *[-0.557355] * 2]
# gdpo with epsilon 1e-4 on A and B alone.
# A: acc [1.4997, -0.4999 x3] (0.75 / (0.5 + 1e-4)), fmt [0.865875 x2, -0.865875 x2] (0.5 / (0.577350 + 1e-4)).
# S of A = [2.365575, 0.365975, -1.365775 x2]; B: acc + fmt = [0.4999 + 0.4999, 0.4999 - 1.4997, 0.9998, -0.9998].
# Over the 8: sum S^2 = 5.595945 + 0.133938 + 2 * 1.865341 + 4 * 0.9996 = 13.458966, std = sqrt(/7) = 1.386617.
# 2.365575 / (1.386617 + 1e-4) = 1.705880, 0.9998 / 1.386717 = 0.720983.
GDPO = [1.705880, 0.263915, -0.984898, -0.984898, *[0.720983, -0.720983] * 2]


@pytest.mark.parametrize(
    ("name", "expected", "keys", "own"),
    [
        ("dgpo", DGPO, ["acc"], {}),
        ("dgpo", DGPO_BOTH, ["acc", "fmt"], {}),
        ("gdpo", GDPO, ["acc", "fmt"], {"gdpo": {"epsilon": 1e-4}}),
    ],
)
def test_the_core_and_the_registered_function_give_the_row(name, expected, keys, own):
    size, config = len(expected), {"rewards": {"keys": keys, "accuracy_key": "acc"}} | own
    uids, lengths, columns = UIDS[:size], LENGTHS[:size], {"acc": np.array(ACC[:size]), "fmt": np.array(FMT[:size])}
    rewards = np.stack([columns[key] for key in keys], axis=1)
    batch = Batch.of(rewards, uids, keys=keys, lengths=lengths, accuracy=columns["acc"])
    np.testing.assert_allclose(build(name, Settings.parse(config))(batch).advantages, expected, atol=1e-5)
    direct = call(name, columns["acc"], uids, lengths, config=config, components=columns)
    np.testing.assert_allclose(direct.rows, expected, atol=1e-5)


def test_dgpo_logs_the_numbers_of_the_row():
    metrics = metrics_of("dgpo", ACC, UIDS, lengths=LENGTHS)
    assert metrics["dgpo/balance_z"] == pytest.approx(32 / 22)
    assert metrics["dgpo/dead_share"] == pytest.approx(4 / 12)  # the four rows of C
    assert metrics["dgpo/difficulty_weight_max"] == pytest.approx(1.124353, abs=1e-6)
    assert metrics["dgpo/difficulty_weight_min"] == pytest.approx(0.875647, abs=1e-6)
    assert metrics["dgpo/valid_groups"] == 2
    assert metrics["dgpo/all_right_groups"] == 0
    assert metrics["dgpo/all_wrong_groups"] == 1
