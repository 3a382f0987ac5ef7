"""Wait for processes that a test has started."""

from __future__ import annotations

import time


def pids_in(path, count=1, process=None):
    """The process ids in a file, once there are so many; the process that leads to them has not ended before."""
    deadline = time.monotonic() + 60
    while len(pids := path.read_text().split() if path.exists() else []) < count:
        assert time.monotonic() < deadline
        assert process is None or process.poll() is None
        time.sleep(0.05)
    return [int(pid) for pid in pids]
