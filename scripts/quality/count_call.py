"""Count the functions and files of the package that one advantage step runs through.

    python scripts/quality/count_call.py               # the registered gdpo in a trainer's run, which has read settings
    python scripts/quality/count_call.py --outside     # called from outside a trainer: settings are read in the call
    python scripts/quality/count_call.py --list        # with their names, in the order of the first call

The call is profiled after one that warms up imports and caches.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

import verl_ext
from verl_ext import Settings, build
from verl_ext.integration.components import of_batch
from verl_ext.integration.run import Run

PACKAGE = Path(verl_ext.__file__).parent


ALGORITHM = {"adv_estimator": "gdpo", "rewards": {"keys": ["correctness", "format"]}}
MASK = torch.ones(8, 4, dtype=torch.int64)
UIDS = np.array(["a"] * 4 + ["b"] * 4, dtype=object)
REWARDS = {"correctness": np.arange(8.0), "format": np.arange(8.0) % 3}


def advantage_step(run: Run) -> None:
    """Compute the advantages of gdpo on two rewards, as a trainer with this run does."""
    with run.computing(of_batch(REWARDS, {}, UIDS.tolist(), MASK, run.needs)):
        call()


def call(**rewards: Any) -> None:
    """Call the function in verl's registry."""
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    given = {"token_level_rewards": torch.rand(8, 4), "response_mask": MASK, "index": UIDS}
    get_adv_estimator_fn("gdpo")(**given, config=OmegaConf.create(ALGORITHM), **rewards)


def functions_of(call: Any) -> list[tuple[str, str]]:
    """Return file and name of every function of the package that runs in the call."""
    seen: dict[tuple[str, str, int], None] = {}

    def profile(frame: FrameType, event: str, _argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        comprehension = frame.f_code.co_name.startswith("<")
        if event == "call" and PACKAGE in path.parents and not comprehension:
            seen[str(path.relative_to(PACKAGE)), frame.f_code.co_name, frame.f_code.co_firstlineno] = None

    call()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return [(path, name) for path, name, _line in seen]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--outside", action="store_true", help="call it from outside a trainer")
    parser.add_argument("--list", action="store_true", help="print the functions")
    options = parser.parse_args()
    settings = Settings.parse(ALGORITHM)
    run = Run("gdpo", settings, build("gdpo", settings))
    outside = partial(call, non_tensor_batch=REWARDS, batch={})
    functions = functions_of(outside if options.outside else partial(advantage_step, run))
    if options.list:
        print("\n".join(f"{path}: {name}" for path, name in functions))
    print(f"{len(functions)} functions in {len({path for path, _ in functions})} files")


if __name__ == "__main__":
    main()
