"""Measure how the time and memory of the advantage step grow with the batch, up to 262,144 trajectories.

Each point runs in its own process, to measure its own peak memory. `core` is the estimator on one number per trajectory
and reward, with the lengths of the responses. `padded` is the whole call by verl, with `[B, L]` scores, mask and
advantages in float32, for sizes that fit into `--memory`. The last columns are slopes in log-log: 1 is linear.

    python scripts/bench_load.py                                     # minutes, 16 GB
    python scripts/bench_load.py --memory 4 --plot load.png

Exit status 1 if, over the larger half of the sizes, the memory of an estimator grows faster than the batch to the power
of 1.15, or its time faster than to the power of 1.5. (A row costs more when the dictionary of groups no longer fits
into the caches of the processor; a nested loop over rows would be a 2.)
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from verl_ext.registry import ESTIMATORS

OURS = tuple(name for name in ESTIMATORS if name != "compose")
SIZES = tuple(2**power for power in range(10, 19))
TOKENS = 16384
GROUP = 8
# Bytes of a padded call per row and token: scores, mask, advantages in float32.
PADDED_BYTES = 12
STEEPEST = {"ms": 1.5, "mb": 1.15}


def peak() -> float:
    """The peak memory of this process in MB, since its start or the last `forget_peak`."""
    status = Path("/proc/self/status").read_text()
    return float(status.split("VmHWM:")[1].split()[0]) / 1024


def forget_peak() -> None:
    """Reset the peak: making the input takes more memory than the input itself."""
    Path("/proc/self/clear_refs").write_text("5")


def settings(name: str) -> dict[str, object]:
    return {"adv_estimator": name, "rewards": {"keys": ["correctness", "format"]} if name == "gdpo" else {}}


def drawn(rows: int) -> tuple[np.ndarray, list[str], np.ndarray]:
    """Draw two rewards, uids in random order, and lengths from an eighth of the longest."""
    draw = np.random.default_rng(0)
    rewards = draw.integers(0, 2, (rows, 2)).astype(float)
    groups = draw.permutation(np.repeat(np.arange(rows // GROUP), GROUP))
    return rewards, [f"{group:032x}" for group in groups.tolist()], draw.integers(TOKENS // 8, TOKENS + 1, rows)


def core(name: str, rows: int) -> Callable[[], object]:
    from verl_ext import Batch, Settings, build

    chain = build(name, Settings.parse(settings(name), loss_agg_mode="token-mean"))
    rewards, uids, lengths = drawn(rows)
    keys = ("correctness", "format") if name == "gdpo" else ("score",)
    columns, accuracy = np.ascontiguousarray(rewards[:, : len(keys)]), rewards[:, 0]
    return lambda: chain(Batch.of(columns, uids, keys=keys, lengths=lengths, accuracy=accuracy), None)


def padded(name: str, rows: int) -> Callable[[], object]:
    from omegaconf import OmegaConf

    from verl_ext.integration.advantage.registry import estimator_function

    rewards, uids, lengths = drawn(rows)
    ends = torch.from_numpy(lengths)
    mask = torch.zeros(rows, TOKENS)
    for start in range(0, rows, 1024):  # comparing everything at once would take more memory than the call itself
        part = slice(start, start + 1024)
        mask[part] = torch.arange(TOKENS) < ends[part, None]
    scores = torch.zeros(rows, TOKENS)
    scores[torch.arange(rows), ends - 1] = torch.from_numpy(rewards[:, 0]).float()
    components = {"correctness": rewards[:, 0], "format": rewards[:, 1], "acc": rewards[:, 0]}
    config = OmegaConf.create(
        {"algorithm": settings(name), "actor_rollout_ref": {"actor": {"loss_agg_mode": "token-mean"}}}
    ).algorithm
    function, index = estimator_function(name), np.array(uids, dtype=object)

    def call() -> object:
        return function(
            token_level_rewards=scores, response_mask=mask, index=index, config=config, non_tensor_batch=components
        )

    return call


KINDS = {"core": core, "padded": padded}


def point(kind: str, name: str, rows: int) -> dict[str, float]:
    """Median milliseconds of a call, and the MB that it takes besides its input."""
    KINDS[kind](name, 64)()  # warm up: the first call imports modules
    call = KINDS[kind](name, rows)
    forget_peak()
    before = peak()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < 2 and len(times) < 30):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return {"ms": statistics.median(times) * 1e3, "mb": peak() - before}


def slope(sizes: list[int], values: list[float]) -> float:
    """The slope over the larger half of the sizes, in log-log."""
    half = len(sizes) // 2
    if len(sizes) - half < 2:
        return math.nan
    return float(np.polyfit(np.log(sizes[half:]), np.log(np.maximum(values[half:], 1e-3)), 1)[0])


def measure(kind: str, name: str, sizes: list[int]) -> list[dict[str, float]]:
    points = []
    for rows in sizes:
        command = [sys.executable, "-W", "ignore", __file__, "--point", kind, name, str(rows)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"{kind} {name} {rows} ended with {done.returncode}:\n{done.stderr}")
        points.append(json.loads(done.stdout.splitlines()[-1]))
        print(f"{kind} {name} {rows}: {points[-1]['ms']:.2f} ms, {points[-1]['mb']:.1f} MB", file=sys.stderr)
    return points


def plot(path: Path, found: dict[tuple[str, str], tuple[list[int], list[dict[str, float]]]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, 2)
    for panel, unit, title in zip(panels, ("ms", "mb"), ("milliseconds per call", "MB besides its input"), strict=True):
        for number, ((kind, name), (sizes, points)) in enumerate(found.items()):
            values = [max(entry[unit], 1e-2) for entry in points]
            style = "-o" if kind == "core" else "--s"
            panel.plot(sizes, values, style, markersize=3, color=f"C{number % len(OURS)}", label=f"{name}, {kind}")
        panel.set(xscale="log", yscale="log", xlabel=f"trajectories of up to {TOKENS:,} tokens", title=title)
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES)
    parser.add_argument("--estimators", nargs="+", choices=OURS, default=OURS)
    parser.add_argument("--memory", type=float, default=16, help="GB for the padded calls")
    parser.add_argument("--plot", type=Path, help="write a picture here")
    parser.add_argument("--output", type=Path, help="write the table here as well")
    parser.add_argument("--point", nargs=3, metavar=("KIND", "ESTIMATOR", "ROWS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.point:
        kind, name, rows = options.point
        print(json.dumps(point(kind, name, int(rows))))
        return 0

    fitting = [rows for rows in options.sizes if rows * TOKENS * PADDED_BYTES <= options.memory * 1e9]
    lines = ["| | trajectories | ms | MB | slope of time | of memory |", "|---|---|---|---|---|---|"]
    found, steep = {}, False
    for kind, sizes in (("core", list(options.sizes)), ("padded", fitting)):
        for name in options.estimators if sizes else ():
            points = measure(kind, name, sizes)
            found[kind, name] = sizes, points
            slopes = [slope(sizes, [entry[unit] for entry in points]) for unit in STEEPEST]
            steep = steep or any(value > limit for value, limit in zip(slopes, STEEPEST.values(), strict=True))
            shown = " | ".join(f"{value:.2f}" for value in slopes)
            most = points[-1]
            lines.append(f"| {name}, {kind} | {sizes[-1]:,} | {most['ms']:.0f} | {most['mb']:.0f} | {shown} |")
    print("\n".join(lines))
    if options.output:
        options.output.write_text("\n".join(lines) + "\n")
    if options.plot:
        plot(options.plot, found)
    return 1 if steep else 0


if __name__ == "__main__":
    sys.exit(main())
