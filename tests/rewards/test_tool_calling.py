"""Tool calls: how an answer is scored against the ground truth."""

import itertools
import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.facts import facts
from tests.linear import is_linear
from tests.rewards.tool_answers import BOTH, ONE, RESPONSE, THINK, TWO, F, G, call, calls
from verl_ext.errors import ConfigurationError, DataError
from verl_ext.rewards.tool_calling import Options, check_ground_truth, compute_score

# The arithmetic is 6 * s / t - 3 with t = 1 + 3 = 4 for ONE and t = 1 + 3 + 3 = 7 for TWO.
EDGES = {
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


WORDS = " word" * 128


@pytest.mark.parametrize(
    ("answer", "length"),
    [
        (calls(F, think=""), 0),
        (calls(F, think=" word" * 100), 0.2),  # 100 / 512 = 0.195
        (calls(F, think=" word" * 2000), 1),
        (f"<think>{WORDS}</think><think>{WORDS}{WORDS}</think>{WORDS}", 0.5),
        (f"<think>{WORDS}", 0),
    ],
)
def test_length_counts_the_words_of_the_last_think_section_with_both_tags(answer, length):
    assert compute_score("rlla", answer, ONE, length="fixed")["length"] == length


def test_optimal_matching_without_scipy_names_the_package(monkeypatch):
    monkeypatch.setattr("verl_ext.rewards.options.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=facts("matching='optimal'", "'scipy'", "pip install 'scipy>=1.10'")):
        Options(matching="optimal")


@pytest.mark.parametrize(
    ("truth", "words"),
    [
        (None, ("non-empty string", None)),
        (" \n", ("non-empty string", repr(" \n"))),
        (F, ("well-formed", "<think>...</think>, found")),
        (ONE.replace("</think>\n", "</think>"), ("well-formed", r"<think>...</think>\n<tool_call>\n...\n</tool_call>")),
        (f"{ONE}\n<tool_call>\n{G}\n</tool_call>", ("well-formed", r"<tool_call>\n...\n</tool_call>")),
        (calls(F[:-1]), ("tool call 1", "JSON")),
        (calls(F, "", G), ("tool call 2", "JSON")),
        (calls('{"name": 1, "parameters": {}}'), ("tool call 1", "string 'name'")),
        (calls('{"name": "f", "arguments": {}}'), ("tool call 1", "object 'parameters'")),
    ],
)
def test_a_malformed_ground_truth_is_an_error_that_names_the_row(truth, words):
    with pytest.raises(DataError, match=facts("row 17 of 'rlla'", *words)):
        compute_score("rlla", ONE, truth, {"index": 17})
    with pytest.raises(DataError, match=facts("a row", *words)):
        check_ground_truth(truth)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
# Few names and values, so that calls compete for each other.
CALL = st.fixed_dictionaries(
    {
        "name": st.sampled_from("fg"),
        "parameters": st.dictionaries(st.sampled_from("abc"), st.integers(0, 2) | VALUES, max_size=3),
    }
)
CALLS = st.lists(CALL, min_size=1, max_size=4)
TAGS = [f"<{slash}{tag}>" for tag in ("think", "tool_call", "response") for slash in ("", "/")]
LINES = ['{"name": "f", "parameters": {"a": 1}}', '{"name": [1], "parameters": {}}', '{"name": "f", "parameters": 1}']
ODDITIES = ["\n", " ", "{", "}", "[", '"', "\\", "NaN", "null", "\ud800", "9" * 5000, "[" * 2000]
PIECES = st.sampled_from([*TAGS, *LINES, *ODDITIES])
TEXT = st.text() | st.lists(PIECES | st.text(max_size=3), max_size=20).map("".join)
KWARGS = st.fixed_dictionaries(
    {"matching": st.sampled_from(["greedy", "optimal"]), "length": st.sampled_from(["omitted", "fixed"])}
)


def written(made: list[dict], *, ascii_only: bool = True) -> str:
    return calls(*(json.dumps(each, ensure_ascii=ascii_only) for each in made))


@given(truth=CALLS.map(written) | st.just(RESPONSE), answer=TEXT | CALLS.map(written), kwargs=KWARGS)
def test_any_answer_gets_a_score_in_range(truth, answer, kwargs):
    for text in (answer, calls(answer)):
        score = compute_score("rlla", text, truth, **kwargs)
        assert score["format"] in (0, 1)
        assert -3 <= score["correctness"] <= 3
        assert 0 <= score.get("length", 0) <= 1
        assert score["score"] == sum(value for name, value in score.items() if name != "score")


@given(CALLS, KWARGS, st.booleans())
def test_a_truth_scores_full_marks_against_itself(made, kwargs, ascii_only):
    truth = written(made, ascii_only=ascii_only)
    score = compute_score("rlla", truth, truth, **kwargs)
    assert (score["format"], score["correctness"]) == (1, 3)


def jaccard(left: list, right: list) -> float:
    """Multiset Jaccard, the other way round: intersection over union."""
    if not left and not right:
        return 1.0
    return (Counter(left) & Counter(right)).total() / (Counter(left) | Counter(right)).total()


def pair_score(true: dict, other: dict) -> float:
    if true["name"] != other["name"]:
        return 0.0
    wanted, given_ = true["parameters"], other["parameters"]
    return jaccard(list(wanted), list(given_)) + sum(k in given_ and given_[k] == v for k, v in wanted.items())


def expected(true: list[dict], predicted: list[dict], matching: str) -> float:
    scores = [[pair_score(t, p) for p in predicted] for t in true]
    if matching == "optimal":  # every way to give the true calls different predicted calls, or none
        places = [*range(len(predicted)), *[None] * len(true)]
        found = max(
            sum(0 if p is None else scores[t][p] for t, p in enumerate(chosen))
            for chosen in itertools.permutations(places, len(true))
        )
    else:
        free, found = list(range(len(predicted))), 0.0
        for row in scores:
            best = max(free, key=lambda p: row[p], default=None)
            if best is not None and row[best] > 0:
                free.remove(best)
                found += row[best]
    full = 1 + sum(1 + len(call["parameters"]) for call in true)
    return 6 * (jaccard([c["name"] for c in true], [c["name"] for c in predicted]) + found) / full - 3


SMALL_PARAMETERS = st.dictionaries(st.sampled_from("abc"), st.integers(0, 1), max_size=3)
SMALL_CALL = st.fixed_dictionaries({"name": st.sampled_from("fg"), "parameters": SMALL_PARAMETERS})
SMALL_CALLS = st.lists(SMALL_CALL, min_size=1, max_size=3)


@pytest.mark.parametrize("matching", ["greedy", "optimal"])
@given(true=SMALL_CALLS, predicted=SMALL_CALLS)
def test_correctness_is_what_a_plain_enumeration_gives(matching, true, predicted):
    found = compute_score("rlla", written(predicted), written(true), matching=matching)["correctness"]
    assert found == pytest.approx(3 if true == predicted else expected(true, predicted, matching))
    assert type(found) is float


ADVERSARIAL = {
    "calls": lambda size: calls('{"name": "f", "parameters": {"a": 1}}\n' * (size // 38)).replace("\n\n", "\n"),
    "open brackets": lambda size: calls("[" * size),
    "digits": lambda size: calls("1" * size),
    "tags": lambda size: "<think></think>\n<tool_call>\n" * (size // 28),
    "think before a call": lambda size: f"<think>{'</think>' * (size // 8)}\n<tool_call>\n1\n</tool_call>",
    "many parameters": lambda size: calls(
        json.dumps({"name": "f", "parameters": {f"parameter {n}": n for n in range(size // 25)}})
    ),
}


@pytest.mark.parametrize("answer", ADVERSARIAL.values(), ids=ADVERSARIAL)
def test_time_is_linear_in_the_length_of_the_answer(answer):
    truth = written([{"name": "f", "parameters": {"a": n, "b": "x"}} for n in range(5)])
    assert is_linear(lambda text: compute_score("rlla", text, truth, matching="optimal", length="fixed"), answer)
