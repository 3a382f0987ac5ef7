"""Time what the plugin adds to `import verl`, in every process of a run.

Two measurements: pairs of new interpreters, one with plugins and one with `VERL_USE_EXTERNAL_PLUGINS=none`, in
alternating order; and the import of the plugin alone, after verl, in one interpreter. The differences of the pairs are
noisy, because importing verl takes seconds; the second figure is not.

    python scripts/bench_import.py --pairs 15
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

IMPORT = "import time; t = time.perf_counter(); import verl; print(time.perf_counter() - t)"
OWN = """
import sys, time, verl
for name in [name for name in sys.modules if name.partition(".")[0] == "verl_ext"]:
    del sys.modules[name]
t = time.perf_counter()
import verl_ext.integration.plugin
print(time.perf_counter() - t)
"""


def seconds(code: str, plugins: str) -> float:
    environment = {**os.environ, "VERL_USE_EXTERNAL_PLUGINS": plugins}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15)
    options = parser.parse_args()
    differences, without = [], []
    for number in range(options.pairs):
        order = ("auto", "none") if number % 2 else ("none", "auto")
        times = {plugins: seconds(IMPORT, plugins) for plugins in order}
        differences.append(times["auto"] - times["none"])
        without.append(times["none"])
    own = [seconds(OWN, "auto") for _ in range(options.pairs)]
    print(f"import verl without plugins: {statistics.median(without):.3f} s (median of {options.pairs})")
    std = statistics.stdev(differences) * 1e3 if options.pairs > 1 else 0.0
    print(f"with the plugin: {statistics.median(differences) * 1e3:+.1f} ms per pair (median; std {std:.0f} ms)")
    print(f"the plugin's own import: {statistics.median(own) * 1e3:.1f} ms (median), {max(own) * 1e3:.1f} ms at most")


if __name__ == "__main__":
    main()
