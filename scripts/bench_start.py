"""Measure the start-up time and the memory of a run on the CPU: verl's own entry point with the tiny model.

Every half second the script finds the processes of the run and adds up their proportional set sizes, which adds a
little to the measured time.

    python scripts/bench_start.py --steps 3 --repeat 3
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests import tiny_model
from tests.end_to_end import run as runs


def memory_of(pids: list[int]) -> int:
    """Proportional set size of the processes together, in bytes."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:  # the process has ended
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def watch(run: runs.Run, steps: int) -> None:
    """Wait for the end of the run and print what was measured."""
    began, peak, most, moments = time.monotonic(), 0, 0, {}
    try:
        while run.process.poll() is None:
            pids = runs.processes_of(run.mark)
            peak, most = max(peak, memory_of(pids)), max(most, len(pids))
            for step in run.metrics:
                moments.setdefault(step, time.monotonic() - began)
            time.sleep(0.5)
        for step in run.metrics:
            moments.setdefault(step, time.monotonic() - began)
        if run.process.returncode or len(moments) < steps:
            sys.exit(f"the run ended with {run.process.returncode} after {len(moments)} steps:\n{run.tail()}")
    finally:
        run.clear()
    first = moments[1]
    begins = first - run.metrics[1]["timing_s/step"]
    print(
        f"first step begins after {begins:.1f} s and ends after {first:.1f} s; "
        f"{peak / 1e9:.1f} GB at the peak, {most} processes",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=1, help="runs, one after the other")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = tiny_model.write(Path(folder, "tiny"))
        for number in range(options.repeat):
            watch(runs.start(Path(folder, str(number)), data, steps=options.steps), options.steps)


if __name__ == "__main__":
    main()
