"""Whether work grows in proportion to a text, whatever the speed and the load of the machine."""

from __future__ import annotations

import time
from collections.abc import Callable

MEGABYTE = 1_000_000


def is_linear(work: Callable[[int], object]) -> bool:
    """Do the work on an eighth of a megabyte and on all of it: quadratic work would take 64 times as long."""

    def seconds(size: int) -> float:
        began = time.process_time()
        work(size)
        return time.process_time() - began

    seconds(MEGABYTE // 8)  # imports
    return seconds(MEGABYTE) < 32 * seconds(MEGABYTE // 8) + 0.1
