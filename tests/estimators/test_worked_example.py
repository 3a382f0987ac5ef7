"""The worked example of the specification, each row through the core and through the registered function.

Groups A, B, C of 4: acc = [1000 | 1110 | 0000], fmt = [1100 | 1011 | 0100], lengths = [4231 | 2253 | 3331].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.batches import ACC, FMT, LENGTHS, UIDS
from tests.calls import call, metrics_of
from verl_ext import Batch, Settings, build


@dataclass(frozen=True)
class Case:
    name: str
    config: dict[str, Any]
    expected: list[float]
    keys: tuple[str, ...] = ("acc",)
    size: int = 12


BOTH = {"rewards": {"keys": ["acc", "fmt"]}}
CASES = {
    # A: mean 1/4, so 1 - 1/4 and 0 - 1/4. B: mean 3/4. C is constant.
    "drgrpo on acc": Case("drgrpo", {}, [0.75, *[-0.25] * 3, *[0.25] * 3, -0.75, 0, 0, 0, 0]),
    # A: sum |r - 1/4| = 1.5, so 4 * 0.75 / 1.5001 = 1.999867 and a third of it. B the same mirrored.
    # All lengths add up to 32, those of A and B to 10 + 12: z = 32 / 22 = 1.454545.
    # exp(-0.25/2) = 0.882497, exp(-0.75/2) = 0.687289: lambda = 2 * odds / 1.569786 = 1.124353 and 0.875647.
    # A: 1.999867 * 1.454545 * 1.124353 = 3.270627; B: 0.666622 * 1.454545 * 0.875647 = 0.849056.
    "dgpo on acc": Case("dgpo", {}, [3.270627, *[-1.090209] * 3, *[0.849056] * 3, -2.547167, 0, 0, 0, 0]),
    # Totals [2100 | 2121 | 0100]: means 0.75, 1.5, 0.25; sums of |r - mean| 3, 2, 1.5; z = 1, every group varies.
    # acc 0.25, 0.75 and 0, which counts as 1: odds 0.882497, 0.687289, 0.606531, sum 2.176317.
    # lambda = 3 * odds / sum = 1.216503, 0.947411, 0.836087.
    # A: 4 * 1.25 / 3.0001 * 1.216503 = 2.027433; B: 4 * 0.5 / 2.0001 * 0.947411 = 0.947364;
    # C: 4 * 0.75 / 1.5001 * 0.836087 = 1.672064.
    "dgpo on acc+fmt": Case(
        "dgpo",
        BOTH,
        [2.027433, 0.405487, *[-1.216460] * 2, *[0.947364, -0.947364] * 2, -0.557355, 1.672064, *[-0.557355] * 2],
        keys=("acc", "fmt"),
    ),
    # A: acc [1.4997, -0.4999 x3] (0.75 / (0.5 + 1e-4)), fmt [0.865875 x2, -0.865875 x2] (0.5 / (0.577350 + 1e-4)).
    # S of A = [2.365575, 0.365975, -1.365775 x2]; B: acc + fmt = [0.4999 + 0.4999, 0.4999 - 1.4997, 0.9998, -0.9998].
    # Over the 8: sum S^2 = 5.595945 + 0.133938 + 2 * 1.865341 + 4 * 0.9996 = 13.458966, std = sqrt(/7) = 1.386617.
    # 2.365575 / (1.386617 + 1e-4) = 1.705880, 0.9998 / 1.386717 = 0.720983.
    "gdpo, groups A+B, sequence, eps 1e-4": Case(
        "gdpo",
        BOTH | {"gdpo": {"epsilon": 1e-4}},
        [1.705880, 0.263915, -0.984898, -0.984898, *[0.720983, -0.720983] * 2],
        keys=("acc", "fmt"),
        size=8,
    ),
    # With eps 1e-6 S of A = [2.366020, 0.366025, -1.366023 x2], of B = +-1; weighed by lengths [4231 | 2253]:
    # (4 * 2.366020 + 2 * 0.366025 - 4 * 1.366023 + 2 - 2 + 5 - 3) / 22 = 0.306002 is the mean over tokens, 1.381241 the
    # std with n - 1; (2.366020 - 0.306002) / 1.381241 = 1.491430.
    "gdpo, groups A+B, token": Case(
        "gdpo",
        BOTH | {"gdpo": {"whiten": "token"}},
        [1.491430, 0.043456, -1.210526, -1.210526, *[0.502445, -0.945528] * 2],
        keys=("acc", "fmt"),
        size=8,
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_core_and_the_registered_function_give_the_row(case):
    columns = {"acc": np.array(ACC[: case.size]), "fmt": np.array(FMT[: case.size])}
    uids, lengths = UIDS[: case.size], LENGTHS[: case.size]
    rewards = np.stack([columns[key] for key in case.keys], axis=1)
    batch = Batch.of(rewards, uids, keys=case.keys, lengths=lengths, accuracy=columns["acc"])
    found = build(case.name, Settings.parse(case.config))(batch)
    np.testing.assert_allclose(found.advantages, case.expected, atol=1e-5)
    direct = call(case.name, columns["acc"], uids, lengths, config=case.config, components=columns)
    np.testing.assert_allclose(direct.rows, case.expected, atol=1e-5)


def test_dgpo_logs_the_numbers_of_the_row():
    metrics = metrics_of("dgpo", ACC, UIDS, lengths=LENGTHS)
    assert metrics["dgpo/balance_z"] == pytest.approx(32 / 22)
    assert metrics["dgpo/dead_share"] == pytest.approx(4 / 12)  # the four rows of C
    assert metrics["dgpo/difficulty_weight_max"] == pytest.approx(1.124353, abs=1e-6)
    assert metrics["dgpo/difficulty_weight_min"] == pytest.approx(0.875647, abs=1e-6)
    assert metrics["dgpo/valid_groups"] == 2
    assert metrics["dgpo/all_right_groups"] == 0
    assert metrics["dgpo/all_wrong_groups"] == 1


# hadw soft, eta_min 0, lambda 1.3, batches [1000, 1110] then [1000, 1111].
FIRST, SECOND = ACC[:8], [1.0, 0, 0, 0, 1, 1, 1, 1]
HADW = {"hadw": {"eta_min": 0.0, "lambda_scale": 1.3}}
# The second batch: GRPO gives A 0.75 / (0.5 + 1e-6) = 1.499997 and -0.499999, B is constant. p_A = 0.25, C = 0.5: the
# prompt is hard, so 1.499997 * 1.3 e^0.25 = 2.503844 and -0.499999 * 1.3 e^-0.25 = -0.506219.
REWEIGHED = [1.499997 * 1.669233, *[-0.499999 * 1.012441] * 3, 0, 0, 0, 0]


def test_the_registered_function_gives_the_row_of_hadw():
    first = call("hadw", FIRST, UIDS[:8], LENGTHS[:8], config=HADW)
    np.testing.assert_allclose(first.rows[:2], [1.499997, -0.499999], atol=1e-5)
    second = call("hadw", SECOND, UIDS[:8], LENGTHS[:8], config=HADW, state=first.state)
    np.testing.assert_allclose(second.rows, REWEIGHED, atol=1e-5)
    assert second.state["weigh_by_history"]["value"] == pytest.approx(0.5125, abs=1e-12)
