"""A shorter update: `skip_zero_advantage` leaves rows out, `share_prompts` computes a prompt once for its answers.

The trainer puts the rows in order and marks the data of a pass. verl's FSDP engine, in the workers, reads the marks.
"""

from __future__ import annotations

from typing import Any

SKIP_MARK = "verl_ext_skip"
"""The key in a pass's data that asks to leave out rows whose advantages are all 0."""
SHARE_MARK = "verl_ext_share"
"""The key that asks to compute a prompt once."""
FIGURES = "verl_ext_figures"
"""The key under which the split of an update returns its metrics."""


def entry(data: Any, name: str, default: Any = None) -> Any:
    """Return an entry of a batch that has no row for each response."""
    from verl.utils import tensordict_utils as tu

    return tu.get_non_tensor_data(data=data, key=name, default=default)
