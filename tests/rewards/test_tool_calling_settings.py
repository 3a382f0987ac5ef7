"""Tool calls: the length of thoughts, and the errors of settings and of ground truths."""

import pytest

from tests.facts import facts
from tests.rewards.tool_answers import ONE, F, G, calls
from verl_ext.errors import ConfigurationError, DataError
from verl_ext.rewards.tool_calling import Options, check_ground_truth, compute_score


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
