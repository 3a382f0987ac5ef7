"""The prompts of ToolRL's data, for other tools and dialogues. Needs only Python's own library.

A model is evaluated with the system prompt that it was trained with. That prompt lists the row's tools as

    1. Name: ...
    Description: ...
    Parameters: {...}

so a template is the prompt of one row, with the list replaced by `{tools}`. A dialogue stands in one user message, with
a blank line between two messages, and what a step's calls returned right below them, in one list:

    **Dialogue Records History**
    <user> ... </user>

    <think> ... </think>
    <tool_call>
    {"name": "f", "parameters": {...}}
    </tool_call>
    <obs> [{"name": "f", "results": {...}}] </obs>

All JSON is written as `json.dumps` does, with ASCII escapes.

ToolRL's own BFCL handler (benchmarks/BFCL/rlla_qwen.py) writes prompts that differ from its training data. Where they
differ, this module follows the data. The handler has

- `<obs> You have made the tool call f(a=1). Execution returns: ... </obs>` for each call, instead of one list a step;
- a hint at the end of each user message: call tools, or say that none fits or that parameters are missing;
- one more user message below the last results: answer if the task is done, else go on and correct mistakes;
- no blank line before a user message that follows an answer or another user message;
- a newline at the end of the system prompt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

TOOLS = "{tools}"
HISTORY = "**Dialogue Records History**"

# From the first numbered tool up to the next heading.
_TOOLS = re.compile(r"^1\. Name: .*?(?=\n\s*\n\*\*|\Z)", re.DOTALL | re.MULTILINE)


def template_of(system_prompt: str) -> str:
    """The template that a row's system prompt was made from."""
    if len(_TOOLS.findall(system_prompt)) != 1:
        raise ValueError(
            "the system prompt has no list of tools that begins with '1. Name: ' and ends before a heading in **; "
            f"write a template with {TOOLS} in their place by hand; found: {system_prompt[:300]!r}"
        )
    return _TOOLS.sub(lambda _: TOOLS, system_prompt)


def describe(tools: Sequence[Mapping[str, Any]]) -> str:
    """The tools as the data list them."""
    return "\n".join(
        f"{number}. Name: {tool['name']}\nDescription: {tool.get('description', '')}\n"
        f"Parameters: {json.dumps(tool.get('parameters', {}).get('properties', {}))}"
        for number, tool in enumerate(tools, start=1)
    )


def system_prompt(template: str, tools: Sequence[Mapping[str, Any]]) -> str:
    """The system prompt for these tools."""
    if TOOLS not in template:
        raise ValueError(f"the template has no {TOOLS} where the tools belong: {template[:300]!r}")
    return template.replace(TOOLS, describe(tools))


def dialogue(messages: Sequence[Mapping[str, Any]]) -> str:
    """A dialogue as one user message, without its system messages."""
    said, gap = HISTORY, "\n"
    for role, found in groupby(messages, key=lambda message: message["role"]):
        if role == "tool":
            said += f"\n<obs> {json.dumps([_result(message) for message in found])} </obs>"
        elif role in ("user", "assistant"):
            for message in found:
                content = message["content"].strip()
                said += gap + (f"<user> {content} </user>" if role == "user" else content)
                gap = "\n\n"
        elif role != "system":
            raise ValueError(f"a message has the role {role!r}; expected user, assistant, tool or system")
    return said


def _result(message: Mapping[str, Any]) -> dict[str, Any]:
    """What a call returned: an object as an object, anything else as the text that it is."""
    content = message["content"]
    try:
        found = json.loads(content)
    except ValueError:
        found = None
    return {"name": message["name"], "results": found if isinstance(found, dict) else content}
