"""Settings: the defaults, what is valid for each, and what an error says."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from tests.facts import facts
from verl_ext.core.steps import Requirement
from verl_ext.errors import ConfigurationError
from verl_ext.estimators import build
from verl_ext.estimators.dgpo import DgpoSettings
from verl_ext.estimators.drgrpo import DrgrpoSettings
from verl_ext.estimators.gdpo import GdpoSettings
from verl_ext.estimators.hadw import HadwSettings
from verl_ext.registry import BUILT_IN
from verl_ext.settings import RewardsSettings, Settings, sections

SECTIONS = sections()


def refused(algorithm: dict[str, Any], *wanted: object) -> None:
    with pytest.raises(ConfigurationError, match=facts(*wanted)):
        Settings.parse(algorithm)


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
        ("compose", "step", "steps"),
    ],
)
def test_an_unknown_key_names_the_nearest_and_all_that_are_valid(section, key, nearest):
    valid = [repr(field.name) for field in dataclasses.fields(SECTIONS[section])]
    refused(
        {section: {key: 1}},
        f"algorithm.{section}",
        f"setting {key!r}",
        f"did you mean {nearest!r}",
        ", ".join(sorted(valid)),
    )


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("found", [3, "gdpo", ["a"], True])
def test_a_section_must_be_a_section(section, found):
    refused({section: found}, f"algorithm.{section}", "section", repr(found))


CHOICES = [
    ("gdpo", "whiten", ("auto", "sequence", "token", "none")),
    ("gdpo", "scale", ("std", "mad", "none")),
    ("dgpo", "balance", ("auto", "token", "sequence", "none")),
    ("hadw", "anchor", ("soft", "window", "fixed")),
    ("hadw", "base", ("grpo", *sorted(set(BUILT_IN) - {"compose", "hadw"}))),
]


@pytest.mark.parametrize(("section", "key", "valid"), CHOICES)
@pytest.mark.parametrize("wrong", ["sequences", "", None, False, 1, ["token"]])
def test_a_choice_lists_what_can_be_chosen(section, key, valid, wrong):
    refused(
        {section: {key: wrong}},
        f"algorithm.{section}.{key}",
        repr(wrong) if key == "base" else repr(str(wrong)),
        *(map(repr, valid) if key != "base" or isinstance(wrong, str) else ()),
    )


@pytest.mark.parametrize("key", ["norm_adv_by_std_in_grpo", "use_kl_in_reward"])
@pytest.mark.parametrize("wrong", ["False", 0, 1.0])
def test_a_switch_of_verls_is_true_or_false(key, wrong):
    refused({key: wrong}, f"algorithm.{key}", "True or False", f"found {wrong!r}")


@pytest.mark.parametrize(
    ("algorithm", "told"),
    [
        ({"gdpo": {"epsilon": 0}}, ("algorithm.gdpo.epsilon", "above 0", "found 0")),
        ({"gdpo": {"epsilon": "0.1"}}, ("algorithm.gdpo.epsilon", "finite", "found '0.1'")),
        ({"dgpo": {"dqw_temp": 0}}, ("algorithm.dgpo.dqw_temp", "above 0", "found 0")),
        ({"dgpo": {"dqw": 1}}, ("algorithm.dgpo.dqw", "True or False", "found 1")),
        ({"rewards": {"accuracy_threshold": math.nan}}, ("algorithm.rewards.accuracy_threshold", "finite", "nan")),
        ({"hadw": {"history_window": 2.0}}, ("algorithm.hadw.history_window", "integer", "found 2.0")),
        ({"hadw": {"anchor": "fixed"}}, ("algorithm.hadw.anchor=fixed", "algorithm.hadw.fixed_anchor", "[0, 1]")),
        (
            {"hadw": {"anchor": "fixed", "fixed_anchor": 0.5, "history_window": 3}},
            (
                "algorithm.hadw.history_window=3",
                *(f"algorithm.hadw.anchor={one}" for one in ("fixed", "soft", "window")),
            ),
        ),
    ],
)
def test_a_wrong_value_is_refused_with_the_whole_name_of_its_setting(algorithm, told):
    """What is valid by type and limits is the subject of tests/core/test_typed.py and test_history_settings.py."""
    refused(algorithm, *told)


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
