"""The tool of the task and the format of its calls: `c+` presses the key c and continues, `c.` ends the session."""

from __future__ import annotations

import json
import random
from typing import Any

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.function_tool import function_tool

KEYS = "abcdefgh"


@function_tool
def press(key: str) -> str:
    """Press a key. The result is the letter to press next.

    Args:
        key: The letter to press.
    """
    return f"\n{random.choice(KEYS)}\n"  # line breaks separate turns and results of the tool in a response


@ToolParser.register("keys")
class Keys(ToolParser):
    """Parses the calls of this task. For models with their own tool format, verl has parsers such as `hermes`."""

    async def extract_tool_calls(self, responses_ids: list[int], tools: Any = None) -> tuple[str, list[FunctionCall]]:
        text = self.tokenizer.decode(responses_ids, skip_special_tokens=True)
        call = FunctionCall(name="press", arguments=json.dumps({"key": text[:1]}))
        return text, [call] if text.endswith("+") else []
