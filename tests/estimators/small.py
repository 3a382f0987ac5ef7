"""Two prompts of two responses with two components, for tests of single facts."""

from typing import Any

import numpy as np

from tests.calls import Call, call
from tests.facts import NEEDED
from verl_ext import Settings, build

GDPO = {"rewards": {"keys": ["x", "y"]}}
UIDS = list("aabb")
X, Y = [1.0, 0.0, 0.0, 2.0], [0.0, 1.0, 5.0, 3.0]


def config_for(name: str, **more: Any) -> dict[str, Any]:
    """Return the settings without which an estimator cannot compute."""
    if name == "compose":
        return {"compose": {"steps": ["weighted_sum", "center"]}} | more
    required = {name: NEEDED[name]} if name in NEEDED else {}
    chain = build(name, Settings.parse(required))
    keys = GDPO if chain.per_reward else {}
    return keys | required | more


def fields(**columns: Any) -> dict[str, Any]:
    return {"x": np.array(X), "y": np.array(Y), "acc": np.array([1.0, 0.0, 0.0, 1.0])} | columns


def gdpo(**given: Any) -> Call:
    return call("gdpo", [0.0] * 4, UIDS, **({"config": GDPO, "components": fields()} | given))
