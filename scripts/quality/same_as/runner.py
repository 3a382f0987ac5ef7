"""The process of one version: run cases and write their results.

    python -m same_as.runner ROOT PLAN RESULTS

`ROOT` is the folder of the version, which must be the one that is imported. `PLAN` is a JSON file with the cases: for
each kind its seeds, and for the kinds with batches how many batches to reach. Results are pickled one after the other.
"""

import json
import logging
import pickle
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch

import verl_ext
from same_as import cases
from same_as.core import accepts, run_core
from same_as.spelling import Spelling

GAVE_UP = 20_000
"""Seeds of a kind that are tried at most."""


def run_case(case: cases.Case, spelling: Spelling) -> dict[str, Any]:
    """Run one case; return what is compared, and how it ended: `computed`, `raised` or `skipped`."""
    outcome: dict[str, Any] = {"name": case.name, "kind": case.kind, "method": case.method, "tags": case.tags}
    outcome |= {"planned": len(case.batches), "batches": [], "error": None, "text": ""}
    lacking = spelling.missing(case.method, case.algorithm) if case.method else []
    if lacking:
        return outcome | {"end": "skipped", "text": ", ".join(dict.fromkeys(lacking))}
    try:
        if case.kind in ("core", "lists"):
            run_core(case, spelling, outcome)
        elif case.kind == "trainers":
            from same_as.other_trainers import run_other_trainer

            run_other_trainer(case, spelling, outcome)
        elif case.kind == "check":
            from same_as.commands import run_command

            run_command(case, spelling, outcome)
        else:
            from same_as.trainers import run_trainer

            run_trainer(case, spelling, outcome)
    except Exception as error:  # noqa: BLE001 - the type of any error is compared
        outcome["error"] = type(error).__name__
        last = traceback.extract_tb(error.__traceback__)[-1]
        outcome["text"] = f"{error} ({Path(last.filename).name}:{last.lineno})"[:300]
    ended = "computed" if outcome["error"] is None else "raised"
    return {"end": ended, **outcome}


def main() -> None:
    root, plan, results = (Path(text).resolve() for text in sys.argv[1:4])
    if root not in Path(verl_ext.__file__).parents:
        raise SystemExit(f"verl_ext is imported from {verl_ext.__file__}, expected from {root}")
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    spelling = Spelling(accepts)
    began = time.monotonic()
    with results.open("wb") as file:
        for kind, asked in json.loads(plan.read_text()).items():
            batches, seeds = 0, asked.get("seeds", range(GAVE_UP))
            for seed in seeds:
                outcome = run_case(cases.draw(kind, seed), spelling)
                pickle.dump(outcome, file)
                batches += outcome["planned"]
                if batches >= asked.get("batches", sys.maxsize):
                    break
            file.flush()
            print(f"{kind}: {batches} batches, {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
