"""Two prompts of two responses with two components, for tests of single facts."""

from typing import Any

import numpy as np

from tests.calls import Call, call
from tests.facts import NEEDED
from verl_ext.methods.simple import ROWS

GDPO = {"rewards": {"keys": ["x", "y"]}}
UIDS = list("aabb")
X, Y = [1.0, 0.0, 0.0, 2.0], [0.0, 1.0, 5.0, 3.0]


def config_for(name: str, **more: Any) -> dict[str, Any]:
    """What an estimator cannot do without."""
    if name == "compose":
        return {"compose": {"steps": ["weighted_sum", "center"]}} | more
    per_reward = name == "gdpo" or (name in ROWS and not ROWS[name].steps[0].sums)
    return (GDPO if per_reward else {}) | ({name: NEEDED[name]} if name in NEEDED else {}) | more


def fields(**columns: Any) -> dict[str, Any]:
    return {"x": np.array(X), "y": np.array(Y), "acc": np.array([1.0, 0.0, 0.0, 1.0])} | columns


def gdpo(**given: Any) -> Call:
    return call("gdpo", [0.0] * 4, UIDS, **({"config": GDPO, "components": fields()} | given))
