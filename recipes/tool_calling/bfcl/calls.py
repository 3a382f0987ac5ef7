"""Read the calls of a response for bfcl-eval, by the rules of ToolRL's handler (benchmarks/BFCL/rlla_qwen.py).

The calls are in the last `<tool_call>` block, one JSON object per line. Without a closing tag the block extends to the
end. Blank and unreadable lines are skipped. A call of a tool named `None` is ignored. Values are not converted in any
language. bfcl-eval expects a string for each parameter in Java and JavaScript, and counts other values as incorrect.
"""

from __future__ import annotations

import json
from typing import Any

from verl_ext.rewards.tags import last_block


def calls_of(answer: str) -> list[dict[str, Any]]:
    """Return the JSON objects in the last block, or an empty list without a block."""
    if "<tool_call>" not in answer:
        return []
    calls = []
    for line in last_block(answer, "tool_call").strip().split("\n"):
        try:
            call = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(call, dict):
            calls.append(call)
    return calls


def as_data(answer: str) -> list[dict[str, Any]]:
    """Return `[{name: {parameter: value}}]`, which bfcl-eval compares in its single-turn categories.

    A call without a name or without parameters is skipped. Parameters that are not an object are passed on, and
    bfcl-eval counts such a response as incorrect.
    """
    return [
        {call["name"]: call["parameters"]}
        for call in calls_of(answer)
        if isinstance(call.get("name"), str) and "parameters" in call and not _is_none(call["name"])
    ]


def as_code(answer: str) -> list[str]:
    """Return `name(parameter=value)`, which bfcl-eval executes in its multi-turn categories.

    A call without parameters is executed without arguments. A call without a name fails when it is executed, and the
    model sees the error. Raise `ValueError` if a name is not a string or parameters are not an object. In that case
    bfcl-eval ends the turn.
    """
    code = []
    for call in calls_of(answer):
        name, parameters = call.get("name", ""), call.get("parameters", {})
        if _is_none(name):
            continue
        if not isinstance(name, str) or not isinstance(parameters, dict):
            raise ValueError(f"a call must have a name and an object 'parameters', found {str(call)[:200]}")
        code.append(f"{name}({', '.join(f'{key}={value!r}' for key, value in parameters.items())})")
    return code


def _is_none(name: object) -> bool:
    return isinstance(name, str) and name.strip().lower() == "none"
