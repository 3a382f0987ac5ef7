"""Run cases of the core: `build(name, Settings.parse(...))(Batch.of(...), state)`."""

import inspect
import json
from typing import Any

import verl_ext
from same_as import renamed
from same_as.cases import Case
from same_as.spelling import Spelling, same
from verl_ext import Batch, Settings, build


def accepts(method: str, algorithm: Any) -> bool:
    """Return whether this version builds a configuration."""
    try:
        build(method, Settings.parse(algorithm))
    except Exception:  # noqa: BLE001 - which error says that a name is unknown is the version's business
        return False
    return True


def run_core(case: Case, spelling: Spelling, outcome: dict[str, Any]) -> None:
    """Run the batches of a case one after the other; append to `outcome["batches"]`."""
    method, algorithm = spelling.translate(case.method, case.algorithm)
    settings = Settings.parse(algorithm, **case.overrides)
    chain = build(method, settings)
    state = None
    for given in case.batches:
        conditions = settings.rewards.conditions
        result = chain(Batch.of(**arguments_of(given, conditions)), state)
        state = json.loads(json.dumps(result.state))
        outcome["batches"].append(
            {"advantages": [result.advantages], "metrics": {f"{method}/{k}": v for k, v in result.metrics.items()}}
            | {"state": state}
        )


def arguments_of(given: dict[str, Any], conditions: Any) -> dict[str, Any]:
    """Return the arguments of `Batch.of` under the names that this version has for its parameters."""
    arguments = {**given}
    counts = arguments.pop("turn_counts", None)
    if counts is not None:
        # The first reward has an entry for each turn; the discount is that of the settings in both versions.
        arguments["turns"] = verl_ext.Turns.of_counts(counts, (0,))
    if conditions:
        arguments["conditions"] = conditions
    parameters = inspect.signature(Batch.of).parameters
    named: dict[str, Any] = {}
    for name, value in arguments.items():
        known = next((other for other in same(renamed.PARAMETERS, name) if other in parameters), name)
        named[known] = value
    return named
