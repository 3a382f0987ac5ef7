"""The state that a run carries from batch to batch, as a checkpoint holds it."""

from __future__ import annotations

import json
from typing import Any

from verl_ext.core.chain import State
from verl_ext.errors import CheckpointError, listed


def plain_state(state: State) -> dict[str, Any]:
    """Return a copy of a chain's state as JSON restores it; raise `CheckpointError` if JSON would change it.

    >>> plain_state({"mine": (1, 2)})
    Traceback (most recent call last):
    ...
    verl_ext.errors.CheckpointError: the state of 'mine' cannot be saved: JSON changes it to {'mine': [1, 2]}; ...
    """
    try:
        restored: dict[str, Any] = json.loads(json.dumps(state, allow_nan=False))
        if restored == state:
            return restored
        wrong = f"JSON changes it to {restored!r:.200}"
    except (TypeError, ValueError, RecursionError) as error:
        wrong = str(error)
    raise CheckpointError(
        f"the state of {listed(state)} cannot be saved: {wrong}; it may hold only None, bool, int, finite float, str, "
        "list, and dict with str keys"
    )
