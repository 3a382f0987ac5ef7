import itertools
import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.linear import is_linear
from tests.rewards.tool_answers import RESPONSE
from tests.rewards.tool_answers import calls as wrapped
from verl_ext.rewards.tool_calling import compute_score

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


def written(calls: list[dict], *, ascii_only: bool = True) -> str:
    return wrapped(*(json.dumps(call, ensure_ascii=ascii_only) for call in calls))


@given(truth=CALLS.map(written) | st.just(RESPONSE), answer=TEXT | CALLS.map(written), kwargs=KWARGS)
def test_any_answer_gets_a_score_in_range(truth, answer, kwargs):
    for text in (answer, wrapped(answer)):
        score = compute_score("rlla", text, truth, **kwargs)
        assert score["format"] in (0, 1)
        assert -3 <= score["correctness"] <= 3
        assert 0 <= score.get("length", 0) <= 1
        assert score["score"] == sum(value for name, value in score.items() if name != "score")


@given(CALLS, KWARGS, st.booleans())
def test_a_truth_scores_full_marks_against_itself(calls, kwargs, ascii_only):
    truth = written(calls, ascii_only=ascii_only)
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
    "calls": lambda size: wrapped('{"name": "f", "parameters": {"a": 1}}\n' * (size // 38)).replace("\n\n", "\n"),
    "open brackets": lambda size: wrapped("[" * size),
    "digits": lambda size: wrapped("1" * size),
    "tags": lambda size: "<think></think>\n<tool_call>\n" * (size // 28),
    "think before a call": lambda size: f"<think>{'</think>' * (size // 8)}\n<tool_call>\n1\n</tool_call>",
    "many parameters": lambda size: wrapped(
        json.dumps({"name": "f", "parameters": {f"parameter {n}": n for n in range(size // 25)}})
    ),
}


@pytest.mark.parametrize("answer", ADVERSARIAL.values(), ids=ADVERSARIAL)
def test_time_is_linear_in_the_length_of_the_answer(answer):
    truth = written([{"name": "f", "parameters": {"a": n, "b": "x"}} for n in range(5)])
    assert is_linear(lambda text: compute_score("rlla", text, truth, matching="optimal", length="fixed"), answer)
