"""The recipe of rewards by turn, and the reward function that its page offers to copy."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

from tests.recipes.launchers import RECIPES
from verl_ext.cli import main

PAGE = RECIPES.parent / "docs/pages/turns.md"


@pytest.mark.parametrize("arm", ["by_turn", "by_outcome"])
def test_an_arm_passes_the_check(arm: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["check", "--config-path", str(RECIPES), "--config-name", f"turns/{arm}"])
    out = capsys.readouterr().out
    assert status == 0, out
    assert ("right by turn" in out) == (arm == "by_turn")


def test_the_model_is_warmed_up_on_what_the_reward_function_and_the_tool_read() -> None:
    from recipes.turns import prepare_data, reward

    rng = random.Random(0)
    for _ in range(50):
        parts = prepare_data.session(rng)
        text = "".join(re.sub("</?s>", "", part) for part, _ in parts[1:])  # as verl decodes a response
        turns = [part for part, own in parts if own]
        asked = [re.sub(r"</?s>|\s", "", part) for part, own in parts if not own]
        found = reward.compute_score("keys", text, asked[0], {"num_turns": 2 * len(turns)})
        entries = [float(turn[0] == letter) for turn, letter in zip(turns, asked, strict=False)]
        assert json.loads(found["right"]) == entries
        assert found["score"] == sum(entries)


def test_the_function_to_copy_returns_an_entry_for_each_turn() -> None:
    block = re.search(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert block is not None
    space: dict[str, Any] = {}
    exec(block[1], space)
    call, answer = '<tool_call>{"name": "a"}</tool_call>', "\nuser\n<tool_response>7</tool_response>\nassistant\n"
    for number in (7, 17):
        text = f"{call}{answer}<tool_call>{{</tool_call>{answer}it is {number}"
        found = space["compute_score"]("x", text, "7", {"num_turns": 6})
        assert json.loads(found["call_ok"]) == [1.0, 0.0, 0.0]
        assert found["score"] == found["right"] == float(number == 7)
