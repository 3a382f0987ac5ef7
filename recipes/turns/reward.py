"""A per-turn reward: 1 for each turn that presses the requested letter, else 0."""

from __future__ import annotations

from typing import Any

from verl_ext import per_turn

MOST = 3
"""Maximum number of turns of a session."""


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    """Score one response. Lines of the model and lines of the tool alternate in `solution_str`."""
    lines = solution_str.split("\n")
    asked, pressed = [ground_truth, *lines[1::2]], lines[::2]
    turns = extra_info["num_turns"] // 2  # turns of the model; verl also counts the tool's results and the prompt
    entries = [float(line[:1] == letter) for line, letter in zip(pressed, asked, strict=False)][:turns]
    return {"score": sum(entries), "acc": float(sum(entries) == MOST), "right": per_turn(entries)}
