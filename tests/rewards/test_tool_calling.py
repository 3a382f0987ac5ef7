"""Tool calls: how an answer is scored against the ground truth."""

import pytest

from tests.facts import facts
from tests.rewards.tool_answers import BOTH, ONE, RESPONSE, THINK, TWO, F, G, call, calls
from verl_ext.errors import ConfigurationError, DataError
from verl_ext.rewards.tool_calling import Options, check_ground_truth, compute_score

# The arithmetic is 6 * s / t - 3 with t = 1 + 3 = 4 for ONE and t = 1 + 3 + 3 = 7 for TWO.
EDGES = {
    "exact": (ONE, ONE, 1, 3),
    "surrounding space is stripped": (ONE, f"\n {ONE}\n", 1, 3),
    "1.0 is 1": (ONE, calls(call("f", a=1.0, b="x")), 1, 3),
    "true is 1": (ONE, calls(call("f", a=True, b="x")), 1, 3),
    "a string for a number": (ONE, calls(call("f", a="1", b="x")), 1, 1.5),  # s = 1 + (1 + 1) = 3
    "malformed JSON": (ONE, calls(F[:-1]), 1, -3),
    "a blank line between calls": (TWO, calls(F, "", G), 1, -3),
    "arguments for parameters": (ONE, calls('{"name": "f", "arguments": {"a": 1, "b": "x"}}'), 1, -3),
    "parameters that are no object": (ONE, calls('{"name": "f", "parameters": ["a", "b"]}'), 1, -3),
    "empty block": (ONE, calls(""), 1, -3),
    "two blocks": (ONE, f"{ONE}\n<tool_call>\n{F}\n</tool_call>", 0, 3),
    "unclosed": (ONE, ONE.removesuffix("</tool_call>"), 0, -3),
    "no tags": (ONE, F, 0, -3),
    "nothing": (ONE, "", 0, -3),
    "call on the line of its tag": (ONE, ONE.replace("<tool_call>\n", "<tool_call>"), 0, 3),
    "a call inside the think section": (ONE, calls("nothing", think=f"<tool_call>\n{F}\n</tool_call>"), 0, 3),
    "a response where none is wanted": (ONE, BOTH, 0, 3),
    "response": (RESPONSE, RESPONSE.replace("hello", "anything"), 1, 0),
    "a tool call before the response": (RESPONSE, BOTH, 0, 0),
    "call and response": (BOTH, BOTH, 1, 3),
    "call without the response": (BOTH, ONE, 0, 3),
    "think alone": (THINK, "<think>anything</think>", 1, 0),
    "deep nesting": (ONE, calls("[" * 100_000), 1, -3),
}


@pytest.mark.parametrize(("truth", "answer", "form", "correctness"), EDGES.values(), ids=EDGES)
def test_edge_case(truth, answer, form, correctness):
    expected = {"format": form, "correctness": pytest.approx(correctness), "score": pytest.approx(form + correctness)}
    assert compute_score("rlla", answer, truth) == expected


@pytest.mark.parametrize("name", ['["f"]', '{"f": 1}', "1", "null"])
def test_a_name_that_is_a_list_or_an_object_makes_the_calls_unreadable(name):
    answer = calls(F, f'{{"name": {name}, "parameters": {{"c": 2}}}}')
    counted = 6 * (1 / 3 + 3 + 0) / 7 - 3 if name in ("1", "null") else -3  # one common name of three
    assert compute_score("rlla", answer, TWO)["correctness"] == pytest.approx(counted)


@pytest.mark.parametrize(("words", "length"), [(0, 0), (100, 0.2), (2000, 1)])  # 100 / 512 = 0.195
def test_length_counts_the_words_of_the_think_section(words, length):
    score = compute_score("rlla", calls(F, think=" word" * words), ONE, length="fixed")
    assert score == {"format": 1, "correctness": 3, "length": length, "score": 4 + length}


def test_length_is_of_the_last_think_section_and_needs_both_tags():
    words = " word" * 128

    def length(answer: str) -> float:
        return compute_score("rlla", answer, ONE, length="fixed")["length"]

    assert length(f"<think>{words}</think><think>{words}{words}</think>{words}") == 0.5
    assert length(f"<think>{words}") == 0


def test_optimal_matching_without_scipy_names_the_package(monkeypatch):
    monkeypatch.setattr("verl_ext.rewards.options.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=facts("matching='optimal'", "'scipy'", "pip install 'scipy>=1.10'")):
        Options(matching="optimal")


@pytest.mark.parametrize(
    ("truth", "told"),
    [
        (None, ("non-empty string", None)),
        (" \n", ("non-empty string", repr(" \n"))),
        (F, ("well-formed", "expected <think>...</think>;")),
        (ONE.replace("</think>\n", "</think>"), ("well-formed", r"<think>...</think>\n<tool_call>\n...\n</tool_call>")),
        (f"{ONE}\n<tool_call>\n{G}\n</tool_call>", ("well-formed", r"<tool_call>\n...\n</tool_call>")),
        (calls(F[:-1]), ("tool call 1", "JSON")),
        (calls(F, "", G), ("tool call 2", "JSON")),
        (calls('{"name": 1, "parameters": {}}'), ("tool call 1", "string 'name'")),
        (calls('{"name": "f", "arguments": {}}'), ("tool call 1", "object 'parameters'")),
    ],
)
def test_a_malformed_ground_truth_is_an_error_that_names_the_row(truth, told):
    with pytest.raises(DataError, match=facts("row 17 of 'rlla'", *told)):
        compute_score("rlla", ONE, truth, {"index": 17})
    with pytest.raises(DataError, match=facts("a row", *told)):
        check_ground_truth(truth)
