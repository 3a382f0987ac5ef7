"""Measure CPU time and memory of `report` on a long log: the first read, and one update of `--follow`.

python scripts/bench_report.py [--megabytes 200]
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import tempfile
import time
from pathlib import Path

from verl_ext.report.reader import Reader
from verl_ext.report.table import plain, rows

METRICS = ["reward/correctness/mean", "reward/format/mean", *(f"actor/metric_{at}/mean" for at in range(100))]


def line(step: int, stream: random.Random) -> str:
    return json.dumps({"step": step, "data": {name: stream.random() for name in METRICS}}) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=200)
    options = parser.parse_args()
    stream = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        step = 0
        with path.open("w") as file:
            while file.tell() < options.megabytes * 1e6:
                step += 1
                file.write(line(step, stream))
        print(f"{step} steps, {len(METRICS)} metrics, {path.stat().st_size / 1e6:.0f} MB")
        print(f"peak memory before: {peak():.0f} MB")
        reader = Reader([path])
        for what in ("first read", "after one more line"):
            began = time.process_time()
            plain(rows({"run": [reader.read(running=True)]}, METRICS[:2], window=10))
            print(f"{what}: {time.process_time() - began:.3f} s of CPU, peak memory {peak():.0f} MB")
            with path.open("a") as file:
                file.write(line(step + 1, stream))


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


if __name__ == "__main__":
    main()
