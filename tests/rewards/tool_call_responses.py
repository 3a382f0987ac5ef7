"""Responses with tool calls, which are also ground truths."""

import json

REASONING = "<think> t </think>"


def call(name: str, **parameters: object) -> str:
    """Return a tool call as a line of JSON."""
    return json.dumps({"name": name, "parameters": parameters})


def response_with_calls(*lines: str, reasoning: str = " t ") -> str:
    """Return a response with a <think> section and these lines as tool calls."""
    block = "\n".join(lines)
    return f"<think>{reasoning}</think>\n<tool_call>\n{block}\n</tool_call>"


CALL_F = call("f", a=1, b="x")
CALL_G = call("g", a=1, b="x")
ONE_CALL = response_with_calls(CALL_F)
TWO_CALLS = response_with_calls(CALL_F, CALL_G)
TEXT_ONLY = f"{REASONING}\n<response> hello </response>"
CALL_AND_TEXT = f"{ONE_CALL}\n<response> hello </response>"
