"""Settings of the rewards: keys, weights, the accuracy, and conditions between rewards."""

from __future__ import annotations

import math

import pytest

from tests.test_settings import refused
from verl_ext.settings import RewardsSettings, Settings


def test_a_weight_that_would_overflow_is_refused():
    given = {"keys": ["a", "b"], "weights": [1, 1e300]}
    refused({"rewards": given}, "algorithm.rewards.weights[1]", "at most 1e+30", "found 1e+300")


THEIRS = {"keys": "gdpo_reward_keys", "weights": "gdpo_reward_weights"}


@pytest.mark.parametrize(
    "algorithm",
    [
        {"rewards": {"keys": ["a", "b"], "weights": [1, 2]}},
        {"gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": [1, 2]},
        {"rewards": {"keys": ("a", "b")}, "gdpo_reward_weights": (1, 2)},
        {"rewards": {"weights": [1, 2]}, "gdpo_reward_keys": ["a", "b"]},
        {"rewards": {"keys": None, "weights": None}, "gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": [1, 2]},
        {"rewards": None, "gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": [1, 2]},
    ],
)
def test_keys_and_weights_may_bear_verls_names(algorithm):
    assert Settings.parse(algorithm).rewards == RewardsSettings(("a", "b"), (1.0, 2.0))


def test_token_scores_go_with_verls_names():
    found = Settings.parse({"rewards": {"token_scores": True}, "gdpo_reward_keys": ["a"]})
    assert found.rewards == RewardsSettings(("a",), token_scores=True)


def test_both_names_at_once_are_an_error():
    refused(
        {"rewards": {"keys": ["a"]}, "gdpo_reward_keys": ["a"]},
        "algorithm.rewards.keys=['a']",
        "algorithm.gdpo_reward_keys=['a']",
        "remove one",
    )
    refused(
        {"rewards": {"keys": ["a"], "weights": [1]}, "gdpo_reward_weights": [2]},
        "algorithm.rewards.weights=[1]",
        "algorithm.gdpo_reward_weights=[2]",
        "remove one",
    )


@pytest.mark.parametrize("keys", ["format", [], ["a", "a"], [1, 2], 7, [None]])
@pytest.mark.parametrize("ours", [True, False])
def test_keys_are_a_list_of_different_names(keys, ours):
    refused({"rewards": {"keys": keys}} if ours else {"gdpo_reward_keys": keys}, "algorithm.rewards.keys", "found")


@pytest.mark.parametrize("weights", ["1", 1.0, ["1"], [True], [math.nan], [math.inf], [None]])
@pytest.mark.parametrize("ours", [True, False])
def test_weights_are_a_list_of_finite_numbers(weights, ours):
    given = {"keys": ["a"], "weights": weights}
    algorithm = {"rewards": given} if ours else {THEIRS[name]: value for name, value in given.items()}
    refused(algorithm, "algorithm.rewards.weights", "finite" if isinstance(weights, list) else "list")


@pytest.mark.parametrize("weights", [[1.0], [1.0, 2.0, 3.0], []])
def test_weights_are_one_a_key(weights):
    refused(
        {"rewards": {"keys": ["a", "b"], "weights": weights}},
        f"{len(weights)} reward weights",
        "2 reward keys",
        f"algorithm.rewards.weights={weights}",
        "algorithm.rewards.keys=['a', 'b']",
    )


def test_weights_and_token_scores_need_keys():
    refused({"rewards": {"weights": [1.0]}}, "1 reward weights", "0 reward keys")
    refused({"rewards": {"token_scores": True}}, "token_scores=True", "algorithm.rewards.keys")


@pytest.mark.parametrize("key", ["", 3, ["acc"], True])
def test_an_accuracy_key_is_a_name(key):
    refused({"rewards": {"accuracy_key": key}}, "algorithm.rewards.accuracy_key", repr(key))


@pytest.mark.parametrize("section", ["dgpo", "hadw", "compose"])
@pytest.mark.parametrize(("key", "value"), [("accuracy_key", "acc"), ("accuracy_threshold", 0)])
def test_an_accuracy_of_one_estimator_ends_in_an_error_with_the_new_line(section, key, value):
    refused({section: {key: value}}, f"algorithm.{section}", f"algorithm.rewards.{key}={value}")


@pytest.mark.parametrize(
    ("conditions", "place", "told"),
    [
        (["easy"], "", ("section", "['easy']")),
        ("easy", "", ("section", "'easy'")),
        ({"easy": "hard"}, ".easy", ("section", "'hard'")),
        ({"easy": {"on": "hard"}}, ".easy", ("needs", "'at_least'")),
        ({"easy": {"on": "hard", "at_least": 1, "at_most": 2}}, ".easy", ("unknown", "'at_most'")),
        ({"easy": {"on": "easy", "at_least": 1}}, ".easy.on", ("another", "'easy'")),
        ({"easy": {"on": 3, "at_least": 1}}, ".easy.on", ("string", 3)),
        ({"easy": {"on": "hard", "at_least": "1"}}, ".easy.at_least", ("finite", "'1'")),
    ],
)
def test_a_condition_says_on_what_and_how_much(conditions, place, told):
    refused({"gdpo": {"conditions": conditions}}, f"algorithm.gdpo.conditions{place}", *told)
