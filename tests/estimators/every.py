"""Every estimator in its variants, and a call of an estimator in the middle of a run."""

from typing import Any

import numpy as np
import pytest

from tests.batches import Rollout
from tests.calls import Call, call
from tests.facts import NEEDED
from verl_ext import Settings, Whiten, build
from verl_ext.methods import METHODS

KEYS = {"rewards": {"keys": ["a", "b"], "weights": [1.0, 0.5]}, **NEEDED}
OWN_LIST = "compose"  # has no steps by default
# `maxrl` refuses the negative rewards of a random batch; tests/estimators/test_turns_against_reference.py has its own.
BASES = sorted(METHODS.keys() - {OWN_LIST, "hadw", "maxrl"})


def unwhitened(conflict: str, tau: float = 0.2) -> list[Any]:
    """The steps of gd2po without the last."""
    drop = {"step": "drop_conflicts", "conflict": conflict, "tau": tau}
    return ["center", {"step": "scale_by_std", "epsilon": 1e-6}, drop, "weighted_sum"]


# Every estimator of the package, and hadw on every base in the middle of a run, where Phi is not 1.
ESTIMATORS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, KEYS) for name in BASES},
    "nearly canceling": (OWN_LIST, KEYS | {OWN_LIST: {"steps": unwhitened("snr", 0.5)}}),
    "gdpo over tokens": ("gdpo", KEYS | {"gdpo": {"whiten": "token"}}),
    "dgpo by sequences, std": ("dgpo", KEYS | {"dgpo": {"dgae": False, "balance": "sequence"}}),
    "hadw on grpo": ("hadw", KEYS),
    **{f"hadw on {base}": ("hadw", KEYS | {"hadw": {"base": base}}) for base in BASES},
    "hadw on dgpo": ("hadw", KEYS | {"hadw": {"base": "dgpo", "anchor": "window"}}),
}
EVERY = pytest.mark.parametrize(("name", "config"), ESTIMATORS.values(), ids=ESTIMATORS.keys())


def whitens_over_tokens(name: str) -> bool:
    """Return whether the last step of a method moves a zero-variance group away from 0."""
    last_step = build(name, Settings.parse(KEYS)).steps[-1]
    return last_step == Whiten("token")


SHIFTED = [name for name in BASES if whitens_over_tokens(name)]
SHIFTS = ("gdpo over tokens", *SHIFTED, *(f"hadw on {name}" for name in SHIFTED))


def state_of_hadw(config: dict[str, Any]) -> dict[str, Any]:
    """Return a state of hadw in the middle of a run. Other estimators ignore it."""
    anchor = config.get("hadw", {}).get("anchor", "soft")
    return {"weight_by_history": {"anchor": anchor, "value": 0.4, "window": [0.2, 0.6, 0.4], "updates": 3}}


def components(rollout: Rollout) -> dict[str, np.ndarray]:
    columns = {key: np.array(column) for key, column in rollout.columns.items()}
    return columns | {"acc": np.array(rollout.accuracy)}


def run(name: str, config: dict[str, Any], rollout: Rollout, **given: Any) -> Call:
    settings = {"components": components(rollout), "state": state_of_hadw(config)} | given
    return call(name, [0.0] * len(rollout.uids), rollout.uids, rollout.lengths, config=config, **settings)
