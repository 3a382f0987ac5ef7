"""Whether work grows in proportion to a text, whatever the speed and the load of the machine."""

import time
from collections.abc import Callable

MEGABYTE = 1_000_000


def is_linear(work: Callable[[str], object], text: Callable[[int], str]) -> bool:
    """Work on an eighth of a megabyte and on all of it, whose quadratic time would be 64 times as long.

    `text` makes a text of a size. A busy machine may disturb one comparison, so several are made.
    """
    part, whole = text(MEGABYTE // 8), text(MEGABYTE)

    def seconds(given: str) -> float:
        began = time.process_time()
        work(given)
        return time.process_time() - began

    seconds(part)  # imports
    return any(seconds(whole) < 32 * seconds(part) + 0.1 for _ in range(5))
