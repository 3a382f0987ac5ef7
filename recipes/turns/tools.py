"""The tool of the task, and how a call is written: `c+` presses the key c and goes on, `c.` ends the answer."""

from __future__ import annotations

import json
import random
from typing import Any

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.function_tool import function_tool

KEYS = "abcdefgh"


@function_tool
def press(key: str) -> str:
    """Press a key; the answer is the letter to press next.

    Args:
        key: The letter to press.
    """
    return f"\n{random.choice(KEYS)}\n"  # the lines part turns from answers of the tool in the text of a response


@ToolParser.register("keys")
class Keys(ToolParser):
    """Any model with a tool format of its own has a parser in verl, such as `hermes`."""

    async def extract_tool_calls(self, responses_ids: list[int], tools: Any = None) -> tuple[str, list[FunctionCall]]:
        text = self.tokenizer.decode(responses_ids, skip_special_tokens=True)
        call = FunctionCall(name="press", arguments=json.dumps({"key": text[:1]}))
        return text, [call] if text.endswith("+") else []
