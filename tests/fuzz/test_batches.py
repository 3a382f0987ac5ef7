"""Whatever a batch holds, its advantages are finite, of its shape and 0 behind the mask, or our error refuses it."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from tests.calls import call_on_tensors, object_array
from tests.fuzz.rubbish import NAMES, Draw, draws, many, name, scalar, sometimes
from verl_ext import Batch, Settings, build
from verl_ext.core.chain import plain_state
from verl_ext.errors import VerlExtError
from verl_ext.registry import INSTALLED

ALL = sorted(INSTALLED)
KEYS = ("a", "b/../c", "ключ")
CONFIGS: tuple[dict[str, Any], ...] = (
    {},
    {"gdpo": {"whiten": "token"}},
    {"gdpo": {"whiten": "none", "scale": "mad", "epsilon": 5e-324}},
    {"gdpo": {"scale": "none"}},
    {"dgpo": {"dgae": False, "dqw_temp": 1e-6, "balance": "sequence"}},
    {"dgpo": {"dqw_temp": 1e308}},
    {"hadw": {"anchor": "window", "history_window": 1, "base": "gdpo"}},
    {"hadw": {"anchor": "fixed", "fixed_anchor": 0.0, "lambda_scale": 1e30, "base": "dgpo"}},
    {"hadw": {"eta": 0.0, "eta_min": 0.0, "lambda_scale": 5e-324, "base": "drgrpo"}},
    {"rewards": {"keys": list(KEYS), "weights": [1e30, -1e30, 0.0]}},
    {"use_kl_in_reward": True},
    {"norm_adv_by_std_in_grpo": False},
)
STEPS = ["condition", "centre", "scale_by_std", "weigh_and_sum", "whiten", "balance", "weigh_by_history"]
EXTREMES = (
    *(0.0, -0.0, 1.0, -1.0, 0.2, 1e-30, 5e-324, 1e-7, 1e16),
    *(1e30, -1e30, 1e31, 3e38, 1e300, np.nan, np.inf, -np.inf),
)
UIDS = (
    *NAMES,
    *(0, 1, -1, 2**70, True, None, 0.5, float("nan"), b"", b"\xff"),
    *((), ("a", 1), (None,), frozenset(), "pad0", "pad"),
)
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool, torch.uint8)


def config_of(draw: Draw) -> dict[str, Any]:
    chosen = dict(draw.choice(CONFIGS))
    chosen.setdefault("rewards", {"keys": list(KEYS)[: draw.randrange(1, 4)]} if draw.random() < 0.8 else {})
    chosen["compose"] = {"steps": [step for step in STEPS[1:] if draw.random() < 0.9 or step == "weigh_and_sum"]}
    return chosen


def rewards_of(draw: Draw, *shape: int) -> np.ndarray:
    rng = np.random.default_rng(draw.getrandbits(32))
    kind = draw.randrange(5)
    if kind == 0:
        return rng.choice(EXTREMES, shape)
    if kind == 1:
        return rng.choice((0.0, 1.0), shape)
    if kind == 2:
        return rng.choice((0.0, 1.0, np.nan), shape)
    if kind == 3:
        return np.full(shape, draw.choice(EXTREMES))
    return rng.normal(size=shape) * draw.choice((1e-12, 1.0, 1e9, 1e29))


def uids_of(draw: Draw, size: int) -> list[Any]:
    kind = draw.randrange(4)
    pool = draw.sample(UIDS, draw.randrange(1, 8))
    if kind == 0:
        return list(range(size))
    return [draw.choice(pool) for _ in range(size)]


def told(error: Exception) -> None:
    assert isinstance(error, VerlExtError)
    assert len(str(error)) > 20


@many
@given(draws)
def test_the_core(draw: Draw) -> None:
    size, estimator = draw.choice((0, 1, 2, 3, 8, 20)), draw.choice(ALL)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an overflow that numpy warns of would be a wrong number
        try:
            settings = Settings.parse(config_of(draw))
            chain = build(estimator, settings)
            keys = settings.rewards.keys or ("score",)
            state = None
            for _ in range(draw.randrange(1, 4)):
                batch = Batch.of(
                    rewards_of(draw, size, len(keys)),
                    uids_of(draw, size),
                    keys=keys,
                    lengths=sometimes(
                        draw, 0.5, lambda d: rewards_of(d, size), [d.randrange(9) for d in [draw] * size]
                    ),
                    accuracy=sometimes(draw, 0.2, lambda d: rewards_of(d, size), [float(draw.random() < 0.5)] * size),
                    kl_reward=sometimes(draw, 0.1, lambda d: rewards_of(d, size), None),
                )
                result = chain(batch, state)
                state = result.state
        except VerlExtError as error:
            return told(error)
    assert result.advantages.shape == (size,)
    assert np.isfinite(result.advantages).all(), result.advantages
    assert np.isfinite(list(result.metrics.values())).all(), result.metrics
    plain_state(state or {})
    return None


def tensor_of(draw: Draw, rows: int, width: int) -> torch.Tensor:
    values = torch.from_numpy(rewards_of(draw, rows, width))
    return values.to(draw.choice(DTYPES[:2]) if draw.random() < 0.7 else draw.choice(DTYPES))


def mask_of(draw: Draw, rows: int, width: int) -> torch.Tensor:
    kind = draw.randrange(4)
    if kind == 0:
        return torch.zeros(rows, width, dtype=draw.choice(DTYPES))
    lengths = torch.tensor([draw.randrange(width + 1) for _ in range(rows)])
    mask = torch.arange(width)[None, :] < lengths[:, None]
    if kind == 1:
        mask = torch.from_numpy(np.random.default_rng(draw.getrandbits(32)).random((rows, width)) < 0.5)
    return mask.to(draw.choice(DTYPES))


def component(draw: Draw, rows: int) -> Any:
    """A column as verl's batch holds it, of the right length."""
    kind = draw.randrange(7)
    values = rewards_of(draw, rows)
    if kind < 4:
        return (values, values.tolist(), object_array(values.tolist()), torch.from_numpy(values))[kind]
    if kind == 4:
        return object_array([scalar(draw) for _ in range(rows)])
    if kind == 5:
        return object_array([bool(draw.random() < 0.5) for _ in range(rows)])
    return values[:, None]


@many
@given(draws)
def test_the_functions_that_verl_calls(draw: Draw) -> None:
    rows, width, estimator = draw.choice((0, 1, 2, 3, 8, 20)), draw.choice((0, 1, 3, 7)), draw.choice(ALL)
    rewards, mask = tensor_of(draw, rows, width), mask_of(draw, rows, width)
    if draw.random() < 0.05:
        rewards = draw.choice((rewards[0:1], rewards[:, :1], rewards.flatten()))
    if draw.random() < 0.05:
        mask = mask.to(torch.float32) * draw.choice((float("nan"), float("inf"), -1.0, 0.5, 2.0))
    uids = uids_of(draw, rows)
    fields = {key: component(draw, rows) for key in (*KEYS, "acc", name(draw)) if draw.random() < 0.9}
    tensors = {f"token_level_scores_{key}": tensor_of(draw, rows, width) for key in KEYS if draw.random() < 0.1}
    if draw.random() < 0.3:
        tensors["token_level_scores"] = tensor_of(draw, rows, width)
    logging.getLogger("verl_ext").setLevel(logging.ERROR)
    given = {
        "config": config_of(draw),
        "components": sometimes(draw, 0.05, lambda _: None, fields),
        "batch": sometimes(draw, 0.3, lambda _: None, tensors),
    }
    try:
        found = call_on_tensors(estimator, rewards, mask, uids, **given)
    except VerlExtError as error:
        return told(error)
    finally:
        logging.getLogger("verl_ext").setLevel(logging.INFO)
    advantages = found.tensor
    assert found.returns is advantages
    assert advantages.shape == mask.shape
    assert advantages.dtype.is_floating_point
    assert torch.isfinite(advantages).all(), advantages
    assert (advantages[mask == 0] == 0).all()
    return None


@pytest.mark.parametrize("estimator", ALL)
@pytest.mark.parametrize("groups", ["one huge group", "a hundred thousand groups of one", "pairs"])
def test_many_rows(estimator: str, groups: str) -> None:
    rows = 100_000
    uids = {"one huge group": ["g"] * rows, "pairs": [row // 2 for row in range(rows)]}.get(groups, list(range(rows)))
    rng = np.random.default_rng(0)
    fields = {"a": rng.random(rows), "b": rng.integers(0, 2, rows), "acc": rng.integers(0, 2, rows)}
    config = {
        "rewards": {"keys": ["a", "b"]},
        "compose": {"steps": ["centre", "scale_by_mad", "weigh_and_sum", "whiten"]},
    }
    given = {"config": config, "components": fields}
    found = call_on_tensors(estimator, torch.zeros(rows, 2), torch.ones(rows, 2), uids, **given).tensor
    assert torch.isfinite(found).all()
    if len(set(uids)) == rows:  # with nothing to compare it with, its advantage is 0
        assert (found == 0).all()
    else:
        assert (found != 0).any()
