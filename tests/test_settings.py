from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from verl_ext.core.steps import Requirement
from verl_ext.errors import ConfigurationError
from verl_ext.estimators import ESTIMATORS, build
from verl_ext.estimators.dgpo import DgpoSettings
from verl_ext.estimators.drgrpo import DrgrpoSettings
from verl_ext.estimators.gdpo import GdpoSettings
from verl_ext.estimators.hadw import HadwSettings
from verl_ext.settings import RewardsSettings, Settings, sections

SECTIONS = sections()


def refused(algorithm: dict[str, Any], *wanted: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        Settings.parse(algorithm)
    for text in wanted:
        assert text in str(error.value)


def plain(section: object) -> dict[str, Any]:
    return {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}


def test_every_default_is_that_of_the_specification():
    assert plain(RewardsSettings()) == {
        "keys": None,
        "weights": None,
        "accuracy_key": None,
        "accuracy_threshold": None,
        "token_scores": False,
    }
    assert plain(GdpoSettings()) == {"whiten": "auto", "scale": "std", "epsilon": 1e-6, "conditions": None}
    assert plain(DgpoSettings()) == {
        "dgae": True,
        "dqw": True,
        "dqw_temp": 2.0,
        "balance": "auto",
    }
    assert plain(HadwSettings()) == {
        "base": "grpo",
        "anchor": "soft",
        "lambda_scale": 1.3,
        "history_window": 10,
        "eta": 0.1,
        "eta_min": 0.05,
        "fixed_anchor": None,
    }
    assert plain(DrgrpoSettings()) == {"check_loss": True}
    whole = Settings()
    assert (whole.norm_by_std, whole.kl_in_reward, whole.loss_agg_mode) == (True, False, "token-mean")
    history = build("hadw", whole).steps[-1]
    assert (history.anchor, history.lambda_scale) == ("soft", 1.3)
    assert (history.history_window, history.eta, history.eta_min) == (10, 0.1, 0.05)


def test_nothing_given_is_all_defaults():
    assert Settings.parse({}) == Settings()
    assert Settings.parse(dict.fromkeys(SECTIONS)) == Settings()
    assert Settings.parse({name: {} for name in SECTIONS}) == Settings()
    assert Settings.parse({"norm_adv_by_std_in_grpo": None, "use_kl_in_reward": None}) == Settings()


def test_what_is_given_is_kept():
    algorithm = {
        "rewards": {
            "keys": ["a", "b"],
            "weights": [1, 0.5],
            "accuracy_key": "a",
            "accuracy_threshold": -1,
            "token_scores": True,
        },
        "gdpo": {"whiten": "token", "scale": "mad", "epsilon": 0.5, "conditions": {"a": {"on": "b", "at_least": 1}}},
        "dgpo": {"dgae": False, "dqw": False, "dqw_temp": 5, "balance": "none"},
        "hadw": {"base": "gdpo", "anchor": "window", "lambda_scale": 1, "history_window": 3},
        "drgrpo": {"check_loss": False},
        "norm_adv_by_std_in_grpo": False,
        "use_kl_in_reward": True,
    }
    found = Settings.parse(algorithm, loss_agg_mode="seq-mean-token-sum")
    assert found.rewards == RewardsSettings(("a", "b"), (1.0, 0.5), "a", -1.0, True)
    algorithm["gdpo"]["conditions"] = {"a": Requirement("b", 1.0)}
    for name in ("gdpo", "dgpo", "hadw", "drgrpo"):
        section = plain(found.of(SECTIONS[name]))
        assert {key: section[key] for key in algorithm[name]} == algorithm[name]
    assert (found.norm_by_std, found.kl_in_reward, found.loss_agg_mode) == (False, True, "seq-mean-token-sum")


def test_settings_cannot_be_changed():
    for section in (Settings(), *(kind() for kind in SECTIONS.values())):
        with pytest.raises(dataclasses.FrozenInstanceError):
            section.keys = ()


@pytest.mark.parametrize(
    ("section", "key", "nearest"),
    [
        ("rewards", "weight", "weights"),
        ("gdpo", "whitten", "whiten"),
        ("dgpo", "dqw_temperature", "dqw_temp"),
        ("hadw", "lambda", "lambda_scale"),
        ("hadw", "eta_minimum", "eta_min"),
        ("drgrpo", "checkloss", "check_loss"),
    ],
)
def test_an_unknown_key_names_the_nearest_and_all_that_are_valid(section, key, nearest):
    valid = [repr(field.name) for field in dataclasses.fields(SECTIONS[section])]
    refused(
        {section: {key: 1}},
        f"algorithm.{section}: unknown setting {key!r} (did you mean {nearest!r}?)",
        f"valid: {', '.join(sorted(valid))}",
    )


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("found", [3, "gdpo", ["a"], True])
def test_a_section_must_be_a_section(section, found):
    refused({section: found}, f"algorithm.{section} must be a section", repr(found))


CHOICES = [
    ("gdpo", "whiten", ("auto", "sequence", "token", "none")),
    ("gdpo", "scale", ("std", "mad", "none")),
    ("dgpo", "balance", ("auto", "token", "sequence", "none")),
    ("hadw", "anchor", ("soft", "window", "fixed")),
    ("hadw", "base", ("grpo", "drgrpo", "gdpo", "dgpo")),
]


@pytest.mark.parametrize(("section", "key", "valid"), CHOICES)
@pytest.mark.parametrize("wrong", ["sequences", "", None, False, 1, ["token"]])
def test_a_choice_lists_what_can_be_chosen(section, key, valid, wrong):
    refused(
        {section: {key: wrong}},
        f"algorithm.{section}.{key}",
        str(wrong),
        *(map(repr, valid) if key != "base" or isinstance(wrong, str) else ()),
    )


@pytest.mark.parametrize(("section", "key", "valid"), CHOICES)
def test_each_choice_is_accepted(section, key, valid):
    for value in valid:
        more = {"fixed_anchor": 0.5} if value == "fixed" else {}
        assert getattr(Settings.parse({section: {key: value} | more}).of(SECTIONS[section]), key) == value


@pytest.mark.parametrize(
    ("section", "key"),
    [("rewards", "token_scores"), ("dgpo", "dgae"), ("dgpo", "dqw"), ("drgrpo", "check_loss")],
)
@pytest.mark.parametrize("wrong", ["True", 1, None, 0.0])
def test_a_switch_is_true_or_false(section, key, wrong):
    refused({section: {key: wrong}}, f"algorithm.{section}.{key} must be True or False, found {wrong!r}")


@pytest.mark.parametrize("key", ["norm_adv_by_std_in_grpo", "use_kl_in_reward"])
@pytest.mark.parametrize("wrong", ["False", 0, 1.0])
def test_a_switch_of_verls_is_true_or_false(key, wrong):
    refused({key: wrong}, f"algorithm.{key} must be True or False, found {wrong!r}")


NUMBERS = [
    ("gdpo", "epsilon"),
    ("dgpo", "dqw_temp"),
    ("rewards", "accuracy_threshold"),
    ("hadw", "lambda_scale"),
    ("hadw", "eta"),
    ("hadw", "eta_min"),
]


@pytest.mark.parametrize(("section", "key"), NUMBERS)
@pytest.mark.parametrize("wrong", ["0.1", True, [0.1], math.nan, math.inf])
def test_a_number_is_finite_and_a_number(section, key, wrong):
    refused({section: {key: wrong}}, f"algorithm.{section}.{key} must be a finite number, found {wrong!r}")


@pytest.mark.parametrize(
    ("section", "key", "wrong", "message"),
    [
        ("gdpo", "epsilon", 0, "above 0"),
        ("gdpo", "epsilon", -1e-9, "above 0"),
        ("dgpo", "dqw_temp", 0, "above 0"),
        ("dgpo", "dqw_temp", -1, "above 0"),
        ("hadw", "lambda_scale", 0, "above 0"),
        ("hadw", "eta", -0.1, "at least 0"),
        ("hadw", "eta", 1.1, "at most 1"),
        ("hadw", "eta_min", -0.1, "at least 0"),
        ("hadw", "eta_min", 1.1, "at most 1"),
        ("hadw", "history_window", -1, "at least 1"),
        ("hadw", "history_window", 0, "at least 1"),
        ("hadw", "history_window", 2.0, "an integer"),
    ],
)
def test_a_number_out_of_range_says_the_range(section, key, wrong, message):
    refused({section: {key: wrong}}, f"algorithm.{section}.{key}", message, f"found {wrong}")


@pytest.mark.parametrize(
    "algorithm",
    [
        {"gdpo": {"epsilon": 5e-324}},
        {"hadw": {"eta": 0, "eta_min": 0, "history_window": 1}},
        {"hadw": {"eta": 1, "eta_min": 1}},
        {"hadw": {"anchor": "fixed", "fixed_anchor": 0}},
        {"hadw": {"anchor": "fixed", "fixed_anchor": 1}},
    ],
)
def test_the_ends_of_a_range_are_in_it(algorithm):
    steps = {"compose": {"steps": ["weigh_and_sum"]}}
    for name in ESTIMATORS:
        assert build(name, Settings.parse(algorithm | steps))


@pytest.mark.parametrize("value", [-0.1, 1.1])
def test_a_fixed_anchor_is_an_accuracy(value):
    refused({"hadw": {"anchor": "fixed", "fixed_anchor": value}}, "algorithm.hadw.fixed_anchor must be at")


def test_a_fixed_anchor_is_needed_where_it_is_chosen():
    refused({"hadw": {"anchor": "fixed"}}, "algorithm.hadw.anchor=fixed needs algorithm.hadw.fixed_anchor")


@pytest.mark.parametrize(
    ("anchor", "key", "homes"),
    [
        ("window", "eta", "soft"),
        ("window", "eta_min", "soft"),
        ("window", "fixed_anchor", "fixed"),
        ("soft", "fixed_anchor", "fixed"),
        ("fixed", "eta", "soft"),
        ("fixed", "eta_min", "soft"),
        ("fixed", "history_window", "soft or window"),
    ],
)
def test_a_setting_which_the_anchor_does_not_use_is_an_error(anchor, key, homes):
    given = {"anchor": anchor, "fixed_anchor": 0.5} if anchor == "fixed" else {"anchor": anchor}
    value = 3 if key == "history_window" else 0.5
    refused(
        {"hadw": given | {key: value}},
        f"algorithm.hadw.{key}={value} has no effect with algorithm.hadw.anchor={anchor}",
        "or set " + " or ".join(f"algorithm.hadw.anchor={home}" for home in homes.split(" or ")),
    )


@pytest.mark.parametrize(
    ("algorithm", "over"),
    [
        ({"gdpo_reward_keys": ["a", "b"]}, "token"),
        ({"gdpo_reward_keys": ["a", "b"], "rewards": {"keys": None, "token_scores": True}}, "token"),
        ({"gdpo_reward_keys": ["a", "b"], "gdpo": {"whiten": "auto"}}, "token"),
        ({"gdpo_reward_keys": ["a", "b"], "gdpo": {"whiten": "sequence"}}, "sequence"),
        ({"gdpo_reward_keys": ["a", "b"], "gdpo": {"whiten": "none"}}, None),
        ({"rewards": {"keys": ["a", "b"]}}, "sequence"),
        ({"rewards": {"keys": ["a", "b"]}, "gdpo_reward_keys": None}, "sequence"),
        ({"rewards": {"keys": ["a", "b"]}, "gdpo_reward_weights": [1, 2]}, "sequence"),
        ({"rewards": {"keys": ["a", "b"]}, "gdpo": {"whiten": "token"}}, "token"),
    ],
)
@pytest.mark.parametrize("name", ["gdpo", "hadw"])
def test_whitening_goes_by_who_named_the_rewards(name, algorithm, over):
    """verl's own names keep verl's numbers, over tokens."""
    steps = build(name, Settings.parse(algorithm | {"hadw": {"base": "gdpo"}})).steps
    assert [step.over for step in steps if step.name == "whiten"] == ([over] if over else [])


def test_settings_reach_the_step():
    soft = build("hadw", Settings.parse({"hadw": {"history_window": 3, "eta": 0.5, "eta_min": 0.25}})).steps[-1]
    assert (soft.history_window, soft.eta, soft.eta_min) == (3, 0.5, 0.25)
    fixed = build("hadw", Settings.parse({"hadw": {"anchor": "fixed", "fixed_anchor": 0.7}})).steps[-1]
    assert (fixed.anchor, fixed.fixed_anchor) == ("fixed", 0.7)


# --- rewards


def test_a_weight_that_would_overflow_is_refused():
    with pytest.raises(
        ConfigurationError, match=r"algorithm.rewards.weights\[1\] must be at most 1e\+30, found 1e\+300"
    ):
        Settings.parse({"rewards": {"keys": ["a", "b"], "weights": [1, 1e300]}})


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
        "algorithm.rewards.keys=['a'] and algorithm.gdpo_reward_keys=['a'] are both set",
        "remove one",
    )
    refused(
        {"rewards": {"keys": ["a"], "weights": [1]}, "gdpo_reward_weights": [2]},
        "algorithm.rewards.weights=[1] and algorithm.gdpo_reward_weights=[2] are both set",
    )


@pytest.mark.parametrize("keys", ["format", [], ["a", "a"], [1, 2], 7, [None]])
@pytest.mark.parametrize("ours", [True, False])
def test_keys_are_a_list_of_different_names(keys, ours):
    refused({"rewards": {"keys": keys}} if ours else {"gdpo_reward_keys": keys}, "algorithm.rewards.keys", "must")


@pytest.mark.parametrize("weights", ["1", 1.0, ["1"], [True], [math.nan], [math.inf], [None]])
@pytest.mark.parametrize("ours", [True, False])
def test_weights_are_a_list_of_finite_numbers(weights, ours):
    given = {"keys": ["a"], "weights": weights}
    algorithm = {"rewards": given} if ours else {THEIRS[name]: value for name, value in given.items()}
    refused(algorithm, "algorithm.rewards.weights", "must be a")


@pytest.mark.parametrize("weights", [[1.0], [1.0, 2.0, 3.0], []])
def test_weights_are_one_a_key(weights):
    refused(
        {"rewards": {"keys": ["a", "b"], "weights": weights}},
        f"{len(weights)} reward weights for 2 reward keys",
        f"algorithm.rewards.weights={weights}",
        "algorithm.rewards.keys=['a', 'b']",
    )


def test_weights_and_token_scores_need_keys():
    refused({"rewards": {"weights": [1.0]}}, "1 reward weights for 0 reward keys")
    refused({"rewards": {"token_scores": True}}, "token_scores=True needs algorithm.rewards.keys")


@pytest.mark.parametrize("key", ["", 3, ["acc"], True])
def test_an_accuracy_key_is_a_name(key):
    refused({"rewards": {"accuracy_key": key}}, "algorithm.rewards.accuracy_key", repr(key))


@pytest.mark.parametrize("section", ["dgpo", "hadw", "compose"])
@pytest.mark.parametrize(("key", "value"), [("accuracy_key", "acc"), ("accuracy_threshold", 0)])
def test_an_accuracy_of_one_estimator_ends_in_an_error_with_the_new_line(section, key, value):
    refused({section: {key: value}}, f"algorithm.{section}", f"algorithm.rewards.{key}={value}")


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        (["easy"], "['easy']"),
        ("easy", "'easy'"),
        ({"easy": "hard"}, ".easy must be a section of settings, found 'hard'"),
        ({"easy": {"on": "hard"}}, ".easy needs the setting 'at_least'"),
        ({"easy": {"on": "hard", "at_least": 1, "at_most": 2}}, ".easy: unknown setting 'at_most'"),
        ({"easy": {"on": "easy", "at_least": 1}}, ".easy.on must name another reward, found 'easy'"),
        ({"easy": {"on": 3, "at_least": 1}}, ".easy.on must be a string, found 3"),
        ({"easy": {"on": "hard", "at_least": "1"}}, ".easy.at_least must be a finite number"),
    ],
)
def test_a_condition_says_on_what_and_how_much(conditions, message):
    refused(
        {"gdpo": {"conditions": conditions}}, f"algorithm.gdpo.conditions{message}" if message[0] == "." else message
    )
