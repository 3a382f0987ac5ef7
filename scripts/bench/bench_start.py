"""Time the start of a run: the import of the plugin, `check`, and the driver until verl starts Ray.

    python scripts/bench/bench_start.py --repeat 5

The times are medians over new interpreters, in seconds. The driver is stopped at the point where verl would start Ray.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

PLUGIN = """
import sys, time, verl
for name in [name for name in sys.modules if name.partition(".")[0] == "verl_ext"]:
    del sys.modules[name]
start = time.perf_counter()
import verl_ext.plugin
print(time.perf_counter() - start)
"""
DRIVER = """
import sys, time
start = time.perf_counter()
import ray
def stop(*_, **__):
    print(time.perf_counter() - start, flush=True)
    raise SystemExit
ray.init = stop
from verl.trainer import main_ppo
sys.argv[0] = main_ppo.__file__
main_ppo.main()
"""
OVERRIDES = [
    "+verl_ext=gdpo",
    "algorithm.rewards.keys=[correctness,format]",
    "actor_rollout_ref.rollout.n=8",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True",
]


def printed(code: str, *arguments: str) -> float:
    """Run Python code in a new interpreter, and return the last number of its output."""
    command = [sys.executable, "-W", "ignore", "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def check() -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "verl_ext", "check", *OVERRIDES], capture_output=True, check=False)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5, help="number of measurements (default: %(default)s)")
    options = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    measurements = {
        "import of the plugin": lambda: printed(PLUGIN),
        "check": check,
        "driver until Ray starts": lambda: printed(DRIVER, *OVERRIDES),
    }
    for name, measure in measurements.items():
        measure()  # compiles the modules
        print(f"{name}: {statistics.median(measure() for _ in range(options.repeat)):.3f} s", flush=True)


if __name__ == "__main__":
    main()
