"""Measure time and memory of `compare` on rollouts of a long run, each kind of input in a process of its own.

python scripts/bench_compare.py [--trajectories 1000000]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

PROMPTS, ANSWERS = 128, 8
VARIANTS = ("gdpo", "dgpo", "hadw", "algorithm.rewards.keys=[correctness,format]")
ACCURACY = "algorithm.rewards.accuracy_key=correctness"
OUTPUTS = {"plot": "png", "html": "html", "output": "parquet"}


def draw(size: int, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two rewards and a length for each trajectory of a step; prompts differ in difficulty."""
    stream = np.random.default_rng(step)
    right = stream.random((size // ANSWERS + 1, 1)) > stream.random((size // ANSWERS + 1, ANSWERS))
    correctness = right.astype(float).ravel()[:size]
    return correctness, (stream.random(size) < 0.7).astype(float), stream.integers(20, 180, size)


def steps(trajectories: int):
    batch = PROMPTS * ANSWERS
    for step, start in enumerate(range(0, trajectories, batch), start=1):
        yield step, *draw(min(batch, trajectories - start), step)


def write_lines(folder: Path, trajectories: int) -> None:
    """Files as verl's default trainer writes them to trainer.validation_data_dir."""
    asked, said = "Natalia sold clips to 48 of her friends. " * 8, "She sold 24. "
    for step, correctness, form, lengths in steps(trajectories):
        with (folder / f"{step}.jsonl").open("w") as file:
            for row, (right, well, length) in enumerate(zip(correctness, form, lengths, strict=True)):
                prompt, session = divmod(row, ANSWERS)
                entry = {
                    "input": asked,
                    "output": said * (length // 3),
                    "gts": "72",
                    "score": right + well,
                    "step": step,
                }
                rewards = {"reward": right + well, "correctness": right, "format": well}
                uid = {"uid": f"{step:016x}{prompt:016x}_{session}_0"}
                file.write(json.dumps(entry | rewards | uid) + "\n")


def write_dumps(folder: Path, trajectories: int) -> None:
    """Files of algorithm.verl_ext.dump_dir."""
    from verl_ext.core.batch import Batch
    from verl_ext.integration.advantage.dump import columns, save
    from verl_ext.settings import Settings

    settings = Settings.parse({"rewards": {"keys": ["correctness", "format"]}})
    for step, correctness, form, lengths in steps(trajectories):
        size = len(correctness)
        uids = [f"{step:016x}{row // ANSWERS:016x}" for row in range(size)]
        rewards = np.stack([correctness, form], axis=1)
        batch = Batch.of(rewards, uids, keys=("correctness", "format"), lengths=lengths, accuracy=correctness)
        where = {"step": np.full(size, step), "update": np.zeros(size, dtype=int), "estimator": ["gdpo"] * size}
        ends = {"uid": uids, "advantage": np.zeros(size)}
        save(folder / f"advantages-{step:08d}-000.parquet", where | ends | columns(settings, batch))


WRITERS = {"JSON lines": write_lines, "parquet": write_dumps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=1_000_000)
    parser.add_argument("--kind", choices=WRITERS, help="one kind only")
    parser.add_argument("--measured", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measured is not None:
        measured(options.measured)
        return
    for kind in [options.kind] if options.kind else WRITERS:
        with tempfile.TemporaryDirectory() as folder:
            rollouts = Path(folder) / "rollouts"
            rollouts.mkdir()
            WRITERS[kind](rollouts, options.trajectories)
            size = sum(path.stat().st_size for path in rollouts.iterdir()) / 1e6
            print(f"{kind}: {options.trajectories:,} trajectories, {size:,.0f} MB", flush=True)
            subprocess.run([sys.executable, __file__, "--measured", rollouts], check=True)


def measured(rollouts: Path) -> None:
    from verl_ext.cli import main as command

    began, clock = time.process_time(), time.perf_counter()
    outputs = [f"--{kind}={rollouts.parent}/out.{end}" for kind, end in OUTPUTS.items()]
    status = command(["compare", str(rollouts), *VARIANTS, ACCURACY, *outputs])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(
        f"exit status {status}: {time.perf_counter() - clock:.1f} s, {time.process_time() - began:.1f} s of CPU, "
        f"peak memory {peak:,.0f} MB"
    )


if __name__ == "__main__":
    main()
