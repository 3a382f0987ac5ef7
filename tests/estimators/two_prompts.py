"""Two prompts with two responses each and the rewards `x` and `y`, for tests of single facts."""

from typing import Any

import numpy as np

from tests.calls import Call, call
from tests.facts import NEEDED
from verl_ext import Settings, build

GDPO = {"rewards": {"keys": ["x", "y"]}}
UIDS = list("aabb")
X = [1.0, 0.0, 0.0, 2.0]
Y = [0.0, 1.0, 5.0, 3.0]
ACCURACY = [1.0, 0.0, 0.0, 1.0]


def config_for(name: str, **more: Any) -> dict[str, Any]:
    """Return the settings without which an estimator cannot compute."""
    if name == "compose":
        return {"compose": {"steps": ["weighted_sum", "center"]}} | more
    required = {name: NEEDED[name]} if name in NEEDED else {}
    chain = build(name, Settings.parse(required))
    keys = GDPO if chain.per_reward else {}
    return keys | required | more


def fields(**columns: Any) -> dict[str, Any]:
    """Return the components of the responses. `columns` are added, or replace them."""
    return {"x": np.array(X), "y": np.array(Y), "acc": np.array(ACCURACY)} | columns


def gdpo(**options: Any) -> Call:
    """Call gdpo on the rewards `x` and `y`, with the arguments of `tests.calls.call` that the test sets."""
    arguments = {"config": GDPO, "components": fields()} | options
    return call("gdpo", [0.0] * 4, UIDS, **arguments)
