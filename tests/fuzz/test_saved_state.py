"""A saved state may hold anything: a run goes on from it or refuses it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from hypothesis import given

from tests.fuzz.rubbish import Draw, draws, many, name, tree
from verl_ext import Batch, Settings, build
from verl_ext.core.chain import plain_state
from verl_ext.errors import CheckpointError

SOUND: dict[str, Any] = {
    "weigh_by_history": {"anchor": "soft", "value": 0.4, "window": [0.2, 0.6, 0.4], "ticks": 3},
}
BATCH = Batch.of([[1.0], [0.0]], ["g", "g"], accuracy=[1.0, 0.0])


def damaged(draw: Draw, data: Any) -> Any:
    """The data with one place changed, gone or added."""
    if isinstance(data, dict) and data and draw.random() < 0.85:
        key = draw.choice(list(data))
        kind = draw.randrange(8)
        if kind == 0:
            return {other: value for other, value in data.items() if other != key}
        if kind == 1:
            return {**data, name(draw): tree(draw)}
        return {**data, key: damaged(draw, data[key])}
    if isinstance(data, list) and data and draw.random() < 0.6:
        at = draw.randrange(len(data))
        return [*data[:at], damaged(draw, data[at]), *data[at + 1 :]]
    return draw.choice((tree(draw), tree(draw), str(data), [data], 1e400, -1, 0, 2**60, True, None))


@many
@given(draws)
def test_a_damaged_state_is_refused_or_gives_numbers(draw: Draw) -> None:
    data = SOUND
    for _ in range(draw.randrange(3)):
        data = damaged(draw, data)
    data = json.loads(json.dumps(data, default=lambda value: value.decode("latin-1"), skipkeys=True))
    chain = build("hadw", Settings())
    try:
        chain.check_state(data)
    except CheckpointError:
        return
    result = chain(BATCH, data)
    assert np.isfinite([*result.advantages, *result.metrics.values()]).all()
    assert plain_state(data) == data
