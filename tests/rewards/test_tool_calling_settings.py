"""Tool calls: schedules over the steps, and the errors of settings and of ground truths."""

import pytest

from tests.facts import facts
from tests.rewards.tool_answers import ONE, RESPONSE, F, G, calls
from verl_ext.errors import ConfigurationError, DataError
from verl_ext.rewards.tool_calling import Options, check_ground_truth, compute_score


@pytest.mark.parametrize(
    ("scale", "step", "best", "worst"),
    [  # (format, correctness)
        ("two_stage", 29, (1, 1), (0, -1)),
        ("two_stage", 30, (0.5, 3), (0, -3)),
        ("linear", 1, (2 - 1 / 150, 2 + 1 / 150), (2 / 150 - 2, -2 - 1 / 150)),
        ("linear", 75, (1.5, 2.5), (-1, -2.5)),
        ("linear", 120, (1.2, 2.8), (-1, -2.8)),  # 2 * 0.8 - 2 = -0.4 is above -1
        ("linear", 999, (1, 3), (-1, -3)),
    ],
)
def test_a_scale_moves_the_ranges_with_the_step(scale, step, best, worst):
    info = {"max_global_steps": step - 1}  # steps that are finished when the answer is written
    good, bad = (compute_score("rlla", answer, ONE, info, scale=scale) for answer in (ONE, ""))
    assert (good["format"], good["correctness"]) == pytest.approx(best)
    assert (bad["format"], bad["correctness"]) == pytest.approx(worst)
    assert compute_score("rlla", RESPONSE, RESPONSE, info, scale=scale)["correctness"] == 0


@pytest.mark.parametrize(
    ("kwargs", "step", "words", "length"),
    [
        ({"length": "fixed"}, None, 0, 0),
        ({"length": "fixed"}, None, 100, 0.2),  # 100 / 512 = 0.195
        ({"length": "fixed"}, None, 2000, 1),
        ({"length": "growing"}, 0, 348, 0.9),  # the first step: 348 / 386.4 = 0.901
        ({"length": "growing"}, 104, 96, 0.15),  # step 105: 96 / 640
    ],
)
def test_length_counts_the_words_of_the_think_section(kwargs, step, words, length):
    answer = calls(F, think=" word" * words)
    score = compute_score("rlla", answer, ONE, {"max_global_steps": step}, **kwargs)
    assert score == {"format": 1, "correctness": 3, "length": length, "score": 4 + length}


def test_length_is_of_the_last_think_section_and_needs_both_tags():
    words = " word" * 128

    def length(answer: str) -> float:
        return compute_score("rlla", answer, ONE, length="fixed")["length"]

    assert length(f"<think>{words}</think><think>{words}{words}</think>{words}") == 0.5
    assert length(f"<think>{words}") == 0


@pytest.mark.parametrize("info", [None, {"global_step": 3}, {"max_global_steps": None}])
@pytest.mark.parametrize("kwargs", [{"scale": "linear"}, {"length": "growing"}])
def test_a_schedule_without_a_step_says_where_it_comes_from(info, kwargs):
    told = facts("extra_info['max_global_steps']", "reward.reward_manager.name=naive")
    with pytest.raises(ConfigurationError, match=told):
        compute_score("rlla", ONE, ONE, info, **kwargs)


@pytest.mark.parametrize(
    ("kwargs", "told"),
    [
        ({"correctness_max": 0}, ("reward_kwargs.correctness_max", "above 0", "found 0")),
        ({"correctness_max": 1, "scale": "linear"}, ("correctness_max=1.0", "no effect", "scale='linear'")),
        ({"credit": "exact", "matching": "optimal"}, ("credit='exact'", "no effect", "matching='optimal'")),
    ],
)
def test_a_wrong_setting_is_refused(kwargs, told):
    with pytest.raises(ConfigurationError, match=facts(*told)):
        compute_score("rlla", ONE, ONE, **kwargs)


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
