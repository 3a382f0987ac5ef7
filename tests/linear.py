"""Test whether the time of a computation grows in proportion to a text, whatever the speed and load of the machine."""

import time
from collections.abc import Callable

MEGABYTE = 1_000_000
ATTEMPTS = 5
"""Number of comparisons, because a busy machine may disturb one of them."""


def is_linear(work: Callable[[str], object], text: Callable[[int], str]) -> bool:
    """Return whether a text of 1 MB takes less than 32 times as long as one of 1/8 MB. Quadratic work takes 64 times.

    `text` returns a text of a given size.
    """
    small_text = text(MEGABYTE // 8)
    large_text = text(MEGABYTE)
    seconds(work, small_text)  # imports modules
    for _ in range(ATTEMPTS):
        limit = 32 * seconds(work, small_text) + 0.1
        if seconds(work, large_text) < limit:
            return True
    return False


def seconds(work: Callable[[str], object], text: str) -> float:
    """Return the processor time of the computation."""
    start = time.process_time()
    work(text)
    return time.process_time() - start
