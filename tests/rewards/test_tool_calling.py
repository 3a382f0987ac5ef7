"""The rewards of a response with tool calls, compared with a ground truth."""

import itertools
import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.facts import facts
from tests.linear import is_linear
from tests.rewards.tool_call_responses import (
    CALL_AND_TEXT,
    CALL_F,
    CALL_G,
    ONE_CALL,
    REASONING,
    TEXT_ONLY,
    TWO_CALLS,
    call,
    response_with_calls,
)
from verl_ext.errors import ConfigurationError, DataError
from verl_ext.rewards.tool_calling import Options, check_ground_truth, compute_score

# The ground truth, the response, and its rewards for format and correctness. The correctness is 6 * s / t - 3.
# s is a sum of matches, and t is its largest value: 1 + 3 = 4 for ONE_CALL, and 1 + 3 + 3 = 7 for TWO_CALLS.
EDGE_CASES = {
    "surrounding space is stripped": (ONE_CALL, f"\n {ONE_CALL}\n", 1, 3),
    "1.0 is 1": (ONE_CALL, response_with_calls(call("f", a=1.0, b="x")), 1, 3),
    "true is 1": (ONE_CALL, response_with_calls(call("f", a=True, b="x")), 1, 3),
    "a string for a number": (ONE_CALL, response_with_calls(call("f", a="1", b="x")), 1, 1.5),  # s = 1 + (1 + 1) = 3
    "malformed JSON": (ONE_CALL, response_with_calls(CALL_F[:-1]), 1, -3),
    "a blank line between calls": (TWO_CALLS, response_with_calls(CALL_F, "", CALL_G), 1, -3),
    "arguments for parameters": (
        ONE_CALL,
        response_with_calls('{"name": "f", "arguments": {"a": 1, "b": "x"}}'),
        1,
        -3,
    ),
    "parameters that are no object": (ONE_CALL, response_with_calls('{"name": "f", "parameters": ["a", "b"]}'), 1, -3),
    "empty block": (ONE_CALL, response_with_calls(""), 1, -3),
    "two blocks": (ONE_CALL, f"{ONE_CALL}\n<tool_call>\n{CALL_F}\n</tool_call>", 0, 3),
    "unclosed": (ONE_CALL, ONE_CALL.removesuffix("</tool_call>"), 0, -3),
    "no tags": (ONE_CALL, CALL_F, 0, -3),
    "call on the line of its tag": (ONE_CALL, ONE_CALL.replace("<tool_call>\n", "<tool_call>"), 0, 3),
    "a call inside the think section": (
        ONE_CALL,
        response_with_calls("nothing", reasoning=f"<tool_call>\n{CALL_F}\n</tool_call>"),
        0,
        3,
    ),
    "a response where none is wanted": (ONE_CALL, CALL_AND_TEXT, 0, 3),
    "response": (TEXT_ONLY, TEXT_ONLY.replace("hello", "anything"), 1, 0),
    "a tool call before the response": (TEXT_ONLY, CALL_AND_TEXT, 0, 0),
    "call and response": (CALL_AND_TEXT, CALL_AND_TEXT, 1, 3),
    "call without the response": (CALL_AND_TEXT, ONE_CALL, 0, 3),
    "think alone": (REASONING, "<think>anything</think>", 1, 0),
    "deep nesting": (ONE_CALL, response_with_calls("[" * 100_000), 1, -3),
}


@pytest.mark.parametrize(("truth", "response", "format_reward", "correctness"), EDGE_CASES.values(), ids=EDGE_CASES)
def test_rewards_of_edge_case(truth, response, format_reward, correctness):
    rewards = compute_score("rlla", response, truth)
    assert rewards == {
        "format": format_reward,
        "correctness": pytest.approx(correctness),
        "score": pytest.approx(format_reward + correctness),
    }


@pytest.mark.parametrize("name", ["1", "null"])
def test_call_whose_name_is_a_number_or_null_matches_no_call(name):
    response = response_with_calls(CALL_F, f'{{"name": {name}, "parameters": {{"c": 2}}}}')
    # One of three names is common, and the call of f matches by its 3 points.
    expected = 6 * (1 / 3 + 3) / 7 - 3
    assert compute_score("rlla", response, TWO_CALLS)["correctness"] == pytest.approx(expected)


@pytest.mark.parametrize("name", ['["f"]', '{"f": 1}'])
def test_call_whose_name_is_a_list_or_an_object_makes_all_calls_unreadable(name):
    response = response_with_calls(CALL_F, f'{{"name": {name}, "parameters": {{"c": 2}}}}')
    assert compute_score("rlla", response, TWO_CALLS)["correctness"] == pytest.approx(-3)


WORDS = " word" * 128


@pytest.mark.parametrize(
    ("response", "length"),
    [
        (response_with_calls(CALL_F, reasoning=""), 0),
        (response_with_calls(CALL_F, reasoning=" word" * 100), 0.2),  # 100 / 512 = 0.195
        (response_with_calls(CALL_F, reasoning=" word" * 2000), 1),
        (f"<think>{WORDS}</think><think>{WORDS}{WORDS}</think>{WORDS}", 0.5),
        (f"<think>{WORDS}", 0),
    ],
)
def test_length_counts_the_words_of_the_last_complete_think_section(response, length):
    assert compute_score("rlla", response, ONE_CALL, length="fixed")["length"] == length


def test_error_about_missing_scipy_names_the_package(monkeypatch):
    monkeypatch.setattr("verl_ext.rewards.options.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=facts("matching='optimal'", "'scipy'", "pip install 'scipy>=1.10'")):
        Options(matching="optimal")


@pytest.mark.parametrize(
    ("truth", "words"),
    [
        (None, ("non-empty string", None)),
        (" \n", ("non-empty string", repr(" \n"))),
        (CALL_F, ("well-formed", "<think>...</think>, found")),
        (
            ONE_CALL.replace("</think>\n", "</think>"),
            ("well-formed", r"<think>...</think>\n<tool_call>\n...\n</tool_call>"),
        ),
        (f"{ONE_CALL}\n<tool_call>\n{CALL_G}\n</tool_call>", ("well-formed", r"<tool_call>\n...\n</tool_call>")),
        (response_with_calls(CALL_F[:-1]), ("tool call 1", "JSON")),
        (response_with_calls(CALL_F, "", CALL_G), ("tool call 2", "JSON")),
        (response_with_calls('{"name": 1, "parameters": {}}'), ("tool call 1", "string 'name'")),
        (response_with_calls('{"name": "f", "arguments": {}}'), ("tool call 1", "object 'parameters'")),
    ],
)
def test_malformed_ground_truth_is_an_error_that_names_the_row(truth, words):
    with pytest.raises(DataError, match=facts("row 17 of 'rlla'", *words)):
        compute_score("rlla", ONE_CALL, truth, {"index": 17})
    with pytest.raises(DataError, match=facts("a row", *words)):
        check_ground_truth(truth)


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
# Few names and values, so that several calls match the same call.
PARAMETERS = st.dictionaries(st.sampled_from("abc"), st.integers(0, 2) | VALUES, max_size=3)
CALL = st.fixed_dictionaries({"name": st.sampled_from("fg"), "parameters": PARAMETERS})
CALLS = st.lists(CALL, min_size=1, max_size=4)
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<response>", "</response>"]
LINES = ['{"name": "f", "parameters": {"a": 1}}', '{"name": [1], "parameters": {}}', '{"name": "f", "parameters": 1}']
SPECIAL_TEXTS = ["\n", " ", "{", "}", "[", '"', "\\", "NaN", "null", "\ud800", "9" * 5000, "[" * 2000]
PIECES = st.sampled_from([*TAGS, *LINES, *SPECIAL_TEXTS])
TEXT = st.text() | st.lists(PIECES | st.text(max_size=3), max_size=20).map("".join)
KWARGS = st.fixed_dictionaries(
    {"matching": st.sampled_from(["greedy", "optimal"]), "length": st.sampled_from(["omitted", "fixed"])}
)


def as_response(calls: list[dict], *, ascii_only: bool = True) -> str:
    """Return a response with these calls."""
    return response_with_calls(*(json.dumps(call, ensure_ascii=ascii_only) for call in calls))


@given(truth=CALLS.map(as_response) | st.just(TEXT_ONLY), text=TEXT | CALLS.map(as_response), kwargs=KWARGS)
def test_any_response_gets_rewards_in_range(truth, text, kwargs):
    for response in (text, response_with_calls(text)):
        rewards = compute_score("rlla", response, truth, **kwargs)
        score = rewards.pop("score")
        assert score == sum(rewards.values())
        assert rewards["format"] in (0, 1)
        assert -3 <= rewards["correctness"] <= 3
        if kwargs["length"] == "fixed":
            assert 0 <= rewards["length"] <= 1


@given(CALLS, KWARGS, st.booleans())
def test_ground_truth_as_response_gets_the_largest_rewards(calls, kwargs, ascii_only):
    truth = as_response(calls, ascii_only=ascii_only)
    rewards = compute_score("rlla", truth, truth, **kwargs)
    assert rewards["format"] == 1
    assert rewards["correctness"] == 3


# The correctness reward once more, in plain loops.


def jaccard(left: list, right: list) -> float:
    """Return the size of the intersection of two multisets over the size of their union."""
    if not left and not right:
        return 1.0
    intersection = Counter(left) & Counter(right)
    union = Counter(left) | Counter(right)
    return intersection.total() / union.total()


def match_of(true_call: dict, predicted_call: dict) -> float:
    """Return the points of a predicted call: the common names of parameters, and each equal value."""
    if true_call["name"] != predicted_call["name"]:
        return 0.0
    true_parameters = true_call["parameters"]
    predicted_parameters = predicted_call["parameters"]
    points = jaccard(list(true_parameters), list(predicted_parameters))
    for name, value in true_parameters.items():
        if name in predicted_parameters and predicted_parameters[name] == value:
            points += 1
    return points


def optimal_sum(matches: list[list[float]]) -> float:
    """Return the largest sum of matches if each true call (row) gets another predicted call (column), or none."""
    true_count, predicted_count = len(matches), len(matches[0])
    columns = [*range(predicted_count), *[None] * true_count]
    sums = []
    for assignment in itertools.permutations(columns, true_count):
        assigned = [(row, column) for row, column in enumerate(assignment) if column is not None]
        sums.append(sum(matches[row][column] for row, column in assigned))
    return max(sums)


def greedy_sum(matches: list[list[float]]) -> float:
    """Return the sum of matches if each true call in turn gets the best predicted call that is left."""
    unused_columns = list(range(len(matches[0])))
    total = 0.0
    for row in matches:
        if not unused_columns:
            break
        best_column = max(unused_columns, key=row.__getitem__)
        if row[best_column] > 0:
            unused_columns.remove(best_column)
            total += row[best_column]
    return total


def expected_correctness(true_calls: list[dict], predicted_calls: list[dict], matching: str) -> float:
    """Return the correctness of predicted calls in [-3, 3]."""
    if true_calls == predicted_calls:
        return 3
    matches = [[match_of(true, predicted) for predicted in predicted_calls] for true in true_calls]
    sum_of_matches = optimal_sum(matches) if matching == "optimal" else greedy_sum(matches)
    common_names = jaccard([call["name"] for call in true_calls], [call["name"] for call in predicted_calls])
    largest_sum = 1 + sum(1 + len(call["parameters"]) for call in true_calls)
    return 6 * (common_names + sum_of_matches) / largest_sum - 3


SMALL_PARAMETERS = st.dictionaries(st.sampled_from("abc"), st.integers(0, 1), max_size=3)
SMALL_CALL = st.fixed_dictionaries({"name": st.sampled_from("fg"), "parameters": SMALL_PARAMETERS})
SMALL_CALLS = st.lists(SMALL_CALL, min_size=1, max_size=3)


@pytest.mark.parametrize("matching", ["greedy", "optimal"])
@given(true_calls=SMALL_CALLS, predicted_calls=SMALL_CALLS)
def test_correctness_is_the_same_as_in_plain_loops(matching, true_calls, predicted_calls):
    response, truth = as_response(predicted_calls), as_response(true_calls)
    correctness = compute_score("rlla", response, truth, matching=matching)["correctness"]
    assert type(correctness) is float
    assert correctness == pytest.approx(expected_correctness(true_calls, predicted_calls, matching))


def many_calls(size: int) -> str:
    line = '{"name": "f", "parameters": {"a": 1}}'
    return response_with_calls(*[line] * (size // len(line)))


def many_parameters(size: int) -> str:
    parameters = {f"parameter {number}": number for number in range(size // 25)}
    return as_response([{"name": "f", "parameters": parameters}])


LONG_RESPONSES = {
    "calls": many_calls,
    "open brackets": lambda size: response_with_calls("[" * size),
    "digits": lambda size: response_with_calls("1" * size),
    "tags": lambda size: "<think></think>\n<tool_call>\n" * (size // 28),
    "think before a call": lambda size: f"<think>{'</think>' * (size // 8)}\n<tool_call>\n1\n</tool_call>",
    "many parameters": many_parameters,
}
"""Functions that return a response of about so many characters."""


@pytest.mark.parametrize("response_of_size", LONG_RESPONSES.values(), ids=LONG_RESPONSES)
def test_time_is_linear_in_the_length_of_the_response(response_of_size):
    truth = as_response([{"name": "f", "parameters": {"a": number, "b": "x"}} for number in range(5)])

    def score(response):
        compute_score("rlla", response, truth, matching="optimal", length="fixed")

    assert is_linear(score, response_of_size)
