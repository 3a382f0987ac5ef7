"""Make a tiny task: tokenizer, model warmed up with supervision, and verl's parquet files. A minute on two cores.

    python scripts/make_tiny_task.py tools

A folder that is there already, made with the same settings, is left as it is.
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
    # Matrices this small gain nothing from a second thread, and the same number everywhere makes the same model.
    torch.set_num_threads(1)
    steps = task_named(options.task).warm_up_steps if options.warm_up_steps is None else options.warm_up_steps
    recipe = Recipe(options.task, steps, seed=options.seed)
    with ExitStack() as stack:
        bars: list[tqdm] = []

        def report(step: int, loss: float) -> None:
            if not bars:  # a task that is there already shows none
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
