"""The calls of an answer as bfcl-eval reads them."""

from __future__ import annotations

import json
from typing import Any

from verl_ext.rewards.tags import has_both_tags, last_block
from verl_ext.rewards.tool_calls import read_calls


def calls_of(answer: str) -> list[tuple[str, dict[str, Any]]]:
    """Names and parameters of the calls in the last tool_call block; none without a block, ValueError if unreadable."""
    if not has_both_tags(answer, "tool_call"):
        return []
    calls = []
    for call in read_calls(last_block(answer, "tool_call")):
        name, parameters = call.get("name"), call.get("parameters")
        if not isinstance(name, str) or not isinstance(parameters, dict):
            raise ValueError(f"a call is not a name with an object of parameters: {str(call)[:200]}")
        calls.append((name, parameters))
    return calls


def as_data(answer: str, language: str) -> list[dict[str, dict[str, Any]]]:
    """`[{name: {parameter: value}}]`; for Java and JavaScript, which are checked by their text, values as text."""
    if language == "Python":
        return [{name: given} for name, given in calls_of(answer)]
    return [{name: {key: _as_text(value) for key, value in given.items()}} for name, given in calls_of(answer)]


def as_code(answer: str) -> list[str]:
    """`name(parameter=value)`, which bfcl-eval executes in its multi-turn categories."""
    return [
        f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls_of(answer)
    ]


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
