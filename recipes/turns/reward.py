"""One entry for each turn: 1 if it pressed the letter that was asked for."""

from __future__ import annotations

from typing import Any

from verl_ext import per_turn

MOST = 3
"""Turns of a session at most."""


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    """Score one answer: what the model wrote and what the tool said alternate in `solution_str`, line by line."""
    lines = solution_str.split("\n")
    asked, pressed = [ground_truth, *lines[1::2]], lines[::2]
    turns = extra_info["num_turns"] // 2  # of the model; verl counts the tool's answers and the prompt as well
    entries = [float(line[:1] == letter) for line, letter in zip(pressed, asked, strict=False)][:turns]
    return {"score": sum(entries), "acc": float(sum(entries) == MOST), "right": per_turn(entries)}
