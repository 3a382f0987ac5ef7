"""Answers with tool calls."""

import json


def call(name: str, **parameters: object) -> str:
    return json.dumps({"name": name, "parameters": parameters})


def calls(*lines: str, think: str = " t ") -> str:
    block = "\n".join(lines)
    return f"<think>{think}</think>\n<tool_call>\n{block}\n</tool_call>"


F, G = call("f", a=1, b="x"), call("g", a=1, b="x")
ONE, TWO = calls(F), calls(F, G)
RESPONSE = "<think> t </think>\n<response> hello </response>"
BOTH = f"{ONE}\n<response> hello </response>"
THINK = "<think> t </think>"
