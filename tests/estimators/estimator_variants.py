"""Every estimator with variants of its settings, and calls of an estimator in the middle of a run."""

from typing import Any

import numpy as np
import pytest

from tests.batches import Rollout
from tests.calls import Call, call
from tests.facts import NEEDED
from verl_ext import Settings, Whiten, build
from verl_ext.methods import METHODS

Config = dict[str, Any]

KEYS: Config = {"rewards": {"keys": ["a", "b"], "weights": [1.0, 0.5]}, **NEEDED}
# `compose` has no steps by default, and `hadw` builds on another estimator. `maxrl` rejects the negative rewards of a
# random batch. tests/estimators/test_per_turn_against_reference.py tests it with other rewards.
NOT_BASES = {"compose", "hadw", "maxrl"}
BASES = sorted(METHODS.keys() - NOT_BASES)


def unwhitened(conflict: str, tau: float = 0.2) -> list[Any]:
    """Return the steps of gd2po without whitening."""
    scale_by_std = {"step": "scale_by_std", "epsilon": 1e-6}
    drop_conflicts = {"step": "drop_conflicts", "conflict": conflict, "tau": tau}
    return ["center", scale_by_std, drop_conflicts, "weighted_sum"]


def estimator_variants() -> dict[str, tuple[str, Config]]:
    """Return the name and the configuration of each variant, which include hadw on every base."""
    variants = {name: (name, KEYS) for name in BASES}
    variants["nearly canceling"] = ("compose", KEYS | {"compose": {"steps": unwhitened("snr", 0.5)}})
    variants["gdpo over tokens"] = ("gdpo", KEYS | {"gdpo": {"whiten": "token"}})
    variants["dgpo by sequences, std"] = ("dgpo", KEYS | {"dgpo": {"dgae": False, "balance": "sequence"}})
    for base in BASES:
        variants[f"hadw on {base}"] = ("hadw", KEYS | {"hadw": {"base": base}})
    variants["hadw on dgpo"] = ("hadw", KEYS | {"hadw": {"base": "dgpo", "anchor": "window"}})
    return variants


VARIANTS = estimator_variants()
EVERY_VARIANT = pytest.mark.parametrize(("name", "config"), VARIANTS.values(), ids=VARIANTS.keys())


def whitens_over_tokens(name: str) -> bool:
    """Return whether the last step of a method moves a zero-variance group away from 0."""
    last_step = build(name, Settings.parse(KEYS)).steps[-1]
    return last_step == Whiten("token")


def shifting_variants() -> set[str]:
    """Return the variants that move a zero-variance group away from 0."""
    shifting_methods = [name for name in BASES if whitens_over_tokens(name)]
    return {"gdpo over tokens", *shifting_methods, *(f"hadw on {name}" for name in shifting_methods)}


SHIFTING_VARIANTS = shifting_variants()


def state_of_hadw(config: Config) -> Config:
    """Return a state of hadw in the middle of a run, in which the weights are not 1. Other estimators ignore it."""
    anchor = config.get("hadw", {}).get("anchor", "soft")
    return {"weight_by_history": {"anchor": anchor, "value": 0.4, "window": [0.2, 0.6, 0.4], "updates": 3}}


def components(rollout: Rollout) -> dict[str, np.ndarray]:
    """Return the components that a reward function would return for the rollout."""
    columns = {key: np.array(column) for key, column in rollout.columns.items()}
    return columns | {"acc": np.array(rollout.accuracy)}


def call_on_rollout(name: str, config: Config, rollout: Rollout, **options: Any) -> Call:
    """Call an estimator as a trainer does, by default with a state in the middle of a run."""
    arguments = {"components": components(rollout), "state": state_of_hadw(config)} | options
    scores = [0.0] * len(rollout.uids)
    return call(name, scores, rollout.uids, rollout.lengths, config=config, **arguments)
