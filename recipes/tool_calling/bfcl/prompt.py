"""Make prompts in the format of ToolRL's data for other tools and dialogues. Needs only the standard library.

A model is evaluated with the system prompt of its training. That prompt lists the tools of the row as

    1. Name: ...
    Description: ...
    Parameters: {...}

so a template is the prompt of one row, in which the list is replaced by `{tools}`. A dialogue is one user message, with
a blank line between two messages. The results of the calls of a step follow directly below the calls, in one list:

    **Dialogue Records History**
    <user> ... </user>

    <think> ... </think>
    <tool_call>
    {"name": "f", "parameters": {...}}
    </tool_call>
    <obs> [{"name": "f", "results": {...}}] </obs>

All JSON is written as `json.dumps` does, with ASCII escapes.

README.md lists the differences from ToolRL's handler for BFCL.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

TOOLS = "{tools}"
HISTORY = "**Dialogue Records History**"

# From the first numbered tool to the next heading.
_TOOLS = re.compile(r"^1\. Name: .*?(?=\n\s*\n\*\*|\Z)", re.DOTALL | re.MULTILINE)


def template_of(system_prompt: str) -> str:
    """Make a template from the system prompt of a row."""
    if len(_TOOLS.findall(system_prompt)) != 1:
        raise ValueError(
            "the system prompt has no list of tools that begins with '1. Name: ' and ends before a heading in **. "
            f"Found {system_prompt[:300]!r}. Write the template by hand, with {TOOLS} instead of the tools."
        )
    return _TOOLS.sub(lambda _: TOOLS, system_prompt)


def describe(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the list of tools in the format of the data."""
    return "\n".join(
        f"{number}. Name: {tool['name']}\nDescription: {tool.get('description', '')}\n"
        f"Parameters: {json.dumps(tool.get('parameters', {}).get('properties', {}))}"
        for number, tool in enumerate(tools, start=1)
    )


def system_prompt(template: str, tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the system prompt for these tools."""
    if TOOLS not in template:
        raise ValueError(f"the template has no {TOOLS}, found {template[:300]!r}. Add {TOOLS} where the tools belong.")
    return template.replace(TOOLS, describe(tools))


def dialogue(messages: Sequence[Mapping[str, Any]]) -> str:
    """Write a dialogue as one user message, without its system messages."""
    text, gap = HISTORY, "\n"
    for role, group in groupby(messages, key=lambda message: message["role"]):
        if role == "tool":
            text += f"\n<obs> {json.dumps([_result(message) for message in group])} </obs>"
        elif role in ("user", "assistant"):
            for message in group:
                content = message["content"].strip()
                text += gap + (f"<user> {content} </user>" if role == "user" else content)
                gap = "\n\n"
        elif role != "system":
            raise ValueError(f"a message has the role {role!r}, expected user, assistant, tool or system")
    return text


def _result(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of a call: a JSON object as an object, anything else as text."""
    content = message["content"]
    try:
        value = json.loads(content)
    except ValueError:
        value = None
    return {"name": message["name"], "results": value if isinstance(value, dict) else content}
