"""The prompts of ToolRL's data, for other tools and dialogues. Needs nothing but Python's own library.

A model is evaluated with the system prompt that it was trained with. That prompt lists the row's tools as

    1. Name: ...
    Description: ...
    Parameters: {...}

so a template is the prompt of one row, with the list replaced by `{tools}`. A dialogue stands in one user message:
`<user>` what the user says, the model's answers as they are, and `<obs>` what the tools return.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
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
        f"Parameters: {json.dumps(tool.get('parameters', {}).get('properties', {}), ensure_ascii=False)}"
        for number, tool in enumerate(tools, start=1)
    )


def system_prompt(template: str, tools: Sequence[Mapping[str, Any]], more: str = "") -> str:
    """The system prompt for these tools, and after it what the benchmark's own system message says."""
    if TOOLS not in template:
        raise ValueError(f"the template has no {TOOLS} where the tools belong: {template[:300]!r}")
    found = template.replace(TOOLS, describe(tools))
    return f"{found}\n\n{more}" if more else found


def dialogue(messages: Sequence[Mapping[str, Any]]) -> str:
    """A dialogue as one user message."""
    parts = [HISTORY]
    for message in messages:
        role, content = message["role"], message["content"]
        said = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        if role == "user":
            parts.append(f"<user> {said.strip()} </user>\n")
        elif role == "assistant":
            parts.append(f"{said.strip()}\n")
        elif role == "tool":
            parts.append(f"<obs> {said.strip()} </obs>\n")
        elif role != "system":
            raise ValueError(f"a message has the role {role!r}; expected user, assistant, tool or system")
    return "\n".join(parts).strip()
