"""Train on a tiny task with verl and one estimator, on the CPU.

    python scripts/train_tiny.py tools gdpo --steps 50 --seed 1

The output of verl goes to log.txt in the folder of the run, the metrics to metrics.jsonl. Other arguments are overrides
of verl's configuration. A finished run with the same settings is not repeated; any other run starts from scratch.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from pathlib import Path

from verl_ext.cpu.tiny.tasks import TASKS
from verl_ext.cpu.tiny.train import ESTIMATORS, ROLLOUTS, Training, checkpoint, train
from verl_ext.errors import VerlExtError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=sorted(TASKS))
    parser.add_argument("estimator", choices=ESTIMATORS)
    parser.add_argument("--steps", type=int, default=Training.steps)
    parser.add_argument("--seed", type=int, default=Training.seed)
    parser.add_argument("--ranks", type=int, default=Training.ranks)
    parser.add_argument("--rollout", choices=ROLLOUTS, default=Training.rollout)
    parser.add_argument("--data", type=Path, help="the task's folder; default: .cache/tiny/<task>")
    parser.add_argument("--run", type=Path, help="the run's folder; default: outputs/tiny/<name of the settings>")
    options, more = parser.parse_known_args()
    if unknown := [argument for argument in more if argument.startswith("-")]:
        parser.error(f"unknown option {' '.join(unknown)}")
    try:
        training = Training(
            options.task, options.estimator, options.steps, options.seed, ranks=options.ranks, rollout=options.rollout
        )
    except VerlExtError as error:
        parser.error(str(error))
    data = options.data or Path(".cache/tiny") / training.task
    run = options.run or Path("outputs/tiny") / training.name
    print(f"{training.name}: verl starts, its output is in {run}/log.txt", flush=True)
    began = time.monotonic()
    try:
        trained = train(training, data, run, more=more, show=functools.partial(show_bar, training.estimator))
    except KeyboardInterrupt:
        print("\ninterrupted; every process of the run has ended", file=sys.stderr)
        return 130
    except VerlExtError as error:
        print(f"\n{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    took = f"trained in {time.monotonic() - began:.0f} s" if trained else "is there already"
    print(f"\n{training.name} {took}, checkpoint: {checkpoint(run) or 'none'}")
    return 0


def show_bar(name: str, bar: str) -> None:
    """Print a progress bar: in place on a terminal, else line by line."""
    bar = f"{name} {bar}"
    print(f"\r{bar}" if sys.stdout.isatty() else bar, end="" if sys.stdout.isatty() else "\n", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
