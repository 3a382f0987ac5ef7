"""Train on a tiny task with several estimators and seeds, one run after the other, and compare them.

    python scripts/compare_estimators.py tools grpo gdpo --seeds 1 2 3 4 5

It can be stopped and restarted at any time: finished runs are not repeated.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
import time
from pathlib import Path

from train_tiny import show_bar

from verl_ext.cli import main as verl_ext
from verl_ext.cpu.tiny.tasks import TASKS
from verl_ext.cpu.tiny.train import ESTIMATORS, Training, train
from verl_ext.errors import VerlExtError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=sorted(TASKS))
    parser.add_argument("estimators", nargs="+", metavar="estimator", help=", ".join(ESTIMATORS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--steps", type=int, default=Training.steps)
    parser.add_argument("--data", type=Path, help="the task's folder; default: .cache/tiny/<task>")
    parser.add_argument("--folder", type=Path, default=Path("outputs/tiny"), help="folder of the runs")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="more settings of verl for every run")
    options = parser.parse_args()
    data = options.data or Path(".cache/tiny") / options.task
    # The estimators are the inner loop, so that all have about the same number of runs whenever it is stopped.
    trainings = [
        Training(options.task, estimator, options.steps, seed)
        for seed, estimator in itertools.product(options.seeds, options.estimators)
    ]
    for training in trainings:
        print(training.name, flush=True)
        began = time.monotonic()
        show = functools.partial(show_bar, training.estimator)
        if train(training, data, options.folder / training.name, more=options.set, show=show):
            print(f"\n{training.name} took {time.monotonic() - began:.0f} s", flush=True)
    runs = [f"{training.estimator}={options.folder / training.name}" for training in trainings]
    names = "-".join(options.estimators)
    return verl_ext(["report", *runs, "--plot", str(options.folder / f"{options.task}-{names}.png")])


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except VerlExtError as error:
        sys.exit(f"{type(error).__name__}: {error}")
