"""Make a tiny task: a tokenizer, a model after supervised warm-up, and verl's parquet files. A minute on two cores.

    python scripts/make_tiny_task.py tools

A folder that was made with the same settings is not made again.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path

import torch
from tqdm import tqdm

from verl_ext.cpu.tiny.make import Recipe, made, make
from verl_ext.cpu.tiny.tasks import TASKS, task_named
from verl_ext.errors import VerlExtError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=sorted(TASKS))
    parser.add_argument("--folder", type=Path, help="default: .cache/tiny/<task>")
    parser.add_argument("--warm-up-steps", type=int, help="default: the task's own")
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    options = parser.parse_args()
    folder = options.folder or Path(".cache/tiny") / options.task
    # A second thread does not help such small matrices, and one thread gives the same model on every machine.
    torch.set_num_threads(1)
    steps = task_named(options.task).warm_up_steps if options.warm_up_steps is None else options.warm_up_steps
    recipe = Recipe(options.task, steps, seed=options.seed)
    with ExitStack() as stack:
        bars: list[tqdm] = []

        def report(step: int, loss: float) -> None:
            if not bars:  # no bar if the task exists already
                total = recipe.warm_up_steps
                bars.append(stack.enter_context(tqdm(total=total, desc="Warm-up", file=sys.stdout, mininterval=1)))
            bars[0].set_postfix_str(f"loss {loss:.3f}", refresh=False)
            bars[0].update(step - bars[0].n)

        new = make(folder, recipe, report)
    rewards = ", ".join(f"{key} {value:.2f}" for key, value in made(folder)["rewards_after_warm_up"].items())
    print(f"{folder} {'made' if new else 'is there already'}: sampled answers score {rewards}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except VerlExtError as error:
        sys.exit(f"{type(error).__name__}: {error}")
