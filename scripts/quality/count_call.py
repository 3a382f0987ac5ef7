"""Count the functions and files of the package that one advantage step runs through.

    python scripts/quality/count_call.py               # the registered gdpo, called as verl calls it
    python scripts/quality/count_call.py --list        # with their names, in the order of the first call

The call is profiled after one that warms up imports and caches.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

import verl_ext

PACKAGE = Path(verl_ext.__file__).parent


def advantage_step() -> None:
    """Compute the advantages of gdpo on two rewards."""
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    rows, length = 8, 4
    config = OmegaConf.create({"adv_estimator": "gdpo", "rewards": {"keys": ["correctness", "format"]}})
    rewards = np.arange(rows, dtype=np.float64)
    get_adv_estimator_fn("gdpo")(
        token_level_rewards=torch.rand(rows, length),
        response_mask=torch.ones(rows, length, dtype=torch.int64),
        index=np.array(["a"] * 4 + ["b"] * 4, dtype=object),
        config=config,
        non_tensor_batch={"correctness": rewards, "format": rewards % 3},
        batch={},
    )


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
    parser.add_argument("--list", action="store_true", help="print the functions")
    options = parser.parse_args()
    functions = functions_of(advantage_step)
    if options.list:
        print("\n".join(f"{path}: {name}" for path, name in functions))
    print(f"{len(functions)} functions in {len({path for path, _ in functions})} files")


if __name__ == "__main__":
    main()
