from __future__ import annotations

import random
from importlib import import_module

import pytest

from tests.facts import facts
from verl_ext.cpu.tiny import sums, tools
from verl_ext.cpu.tiny.make import rows, score
from verl_ext.cpu.tiny.tasks import task_named
from verl_ext.errors import ConfigurationError


def drawn(task, count=4000):
    rng = random.Random(0)
    return [task.draw(rng) for _ in range(count)]


def test_every_ground_truth_is_one_that_the_reward_accepts(task):
    reward = import_module(task.reward)
    for row in rows(task, 300, seed="train-0"):
        reward.check_ground_truth(row["reward_model"]["ground_truth"])
        assert row["data_source"] == task.data_source


def test_the_same_seed_draws_the_same_rows_and_another_split_others(task):
    assert rows(task, 50, seed="train-0") == rows(task, 50, seed="train-0")
    assert rows(task, 50, seed="train-0") != rows(task, 50, seed="val-0")


def test_every_reward_is_earned_by_some_answers_to_imitate_and_missed_by_others(task):
    reward = import_module(task.reward)
    scores = [reward.compute_score("", example.answer, example.ground_truth) for example in drawn(task)]
    for key in task.keys:
        best = max(found[key] for found in scores)
        share = sum(found[key] == best for found in scores) / len(scores)
        assert 0.5 < share < 0.95, (key, share)


def test_of_the_tool_calls_20_percent_are_right_and_40_percent_wrong_in_each_of_the_two_things():
    reward = import_module(tools.TASK.reward)
    examples = drawn(tools.TASK)
    scores = [reward.compute_score("", example.answer, example.ground_truth) for example in examples]
    right = sum(found == {"correctness": 3.0, "format": 1.0, "score": 4.0} for found in scores) / len(scores)
    wrong_format = sum(found["correctness"] == 3.0 and found["format"] == 0.0 for found in scores) / len(scores)
    wrong_call = sum(found["correctness"] < 3.0 and found["format"] == 1.0 for found in scores) / len(scores)
    # A share p of 4000 draws has standard deviation sqrt(p(1-p)/4000) < 0.008.
    assert right == pytest.approx(0.2, abs=0.03)
    assert wrong_format == pytest.approx(0.4, abs=0.03)
    assert wrong_call == pytest.approx(0.4, abs=0.03)
    # One wrong call in four has a wrong number, 6 * (1 + 1 + 1) / 4 - 3 = 1.5; the others have -3.
    # 0.6 * 3 + 0.4 * (1.5 / 4 - 3 * 3 / 4) = 1.05
    assert score(tools.TASK, [(e, e.answer) for e in examples])["correctness"] == pytest.approx(1.05, abs=0.2)


def test_of_the_sums_a_wrong_answer_is_wrong_in_one_reward_alone():
    reward = import_module(sums.TASK.reward)
    scores = [reward.compute_score("", example.answer, example.ground_truth) for example in drawn(sums.TASK)]
    assert {found["score"] for found in scores} == {2.0, 3.0}
    assert sum(found["score"] == 3.0 for found in scores) / len(scores) == pytest.approx(0.65, abs=0.03)


def test_a_right_answer_earns_every_reward():
    reward = import_module(sums.TASK.reward)
    assert reward.compute_score("", sums.answer("91", "19"), "#### 19")["score"] == 3.0


def test_an_unknown_task_is_refused_with_the_names_of_all():
    with pytest.raises(ConfigurationError, match=facts("'tool'", "did you mean 'tools'", "'sums'")):
        task_named("tool")
