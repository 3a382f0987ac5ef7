"""What a scorer declares to return is what it returns, for every option that changes it."""

from __future__ import annotations

import re
from importlib import import_module

import pytest

from tests.rewards.tool_answers import call, calls
from verl_ext import rewards

CALL = calls(call("f", a=1))
TRUTHS = {"gsm8k": "#### 18", "tool_calling": CALL, "boxed_math": "0.5"}
CASES = [
    ("gsm8k", {}),
    ("gsm8k", {"strict": "reference"}),
    ("boxed_math", {}),
    ("boxed_math", {"timeout": 1.0}),
    ("tool_calling", {}),
    ("tool_calling", {"length": "fixed"}),
]


@pytest.mark.parametrize(("module", "kwargs"), CASES)
@pytest.mark.parametrize("answer", ["", "nothing of the kind", CALL, "<think>1</think>\n<answer>18</answer>"])
def test_every_answer_has_the_declared_components_and_the_score(module: str, kwargs: dict, answer: str) -> None:
    scorer = import_module(f"verl_ext.rewards.{module}")
    found = scorer.compute_score("data", answer, TRUTHS[module], {"index": 1}, **kwargs)
    declared = scorer.Options(**kwargs)
    assert list(found) == [*declared.components, "score"]
    assert {type(value) for value in found.values()} == {float}
    assert all(0 <= found[name] <= 1 for name in declared.accuracies)


def test_every_scorer_declares_its_components_and_the_docs_name_them() -> None:
    table = dict(re.findall(r"^\| `verl_ext\.rewards\.(\w+)` \| (.*) \|$", rewards.__doc__ or "", re.MULTILINE))
    assert sorted(table) == sorted(TRUTHS)
    for module, text in table.items():
        scorer = import_module(f"verl_ext.rewards.{module}")
        declared = set().union(*(scorer.Options(**kwargs).components for name, kwargs in CASES if name == module))
        assert set(re.findall(r"`(\w+)`", text)) == declared, module
