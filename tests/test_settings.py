"""Settings: the defaults, what is valid for each, and what an error says."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from tests.facts import facts
from verl_ext.errors import ConfigurationError
from verl_ext.estimators import build
from verl_ext.settings import RewardsSettings, Settings, VerlExtSettings, sections

SECTIONS = sections()
TWO = {"keys": ["a", "b"]}
DEFAULTS: dict[str, dict[str, Any]] = {
    "rewards": {
        "keys": None,
        "weights": None,
        "by_turn": None,
        "turn_discount": 1.0,
        "accuracy_key": None,
        "accuracy_threshold": None,
        "token_scores": False,
        "rejected": "keep",
        "log": None,
        "accuracy_between": None,
    },
    "verl_ext": {"dump_dir": None, "skip_zero_advantage": False, "share_prompts": False},
    "gdpo": {"whiten": None, "scale": "std", "epsilon": 1e-6, "conditions": None},
    "dgpo": {"dgae": True, "dqw": True, "dqw_temp": 2.0, "balance": "auto"},
    "hadw": {
        "base": "grpo",
        "anchor": "soft",
        "lambda_scale": 1.3,
        "history_window": 10,
        "eta": 0.1,
        "eta_min": 0.05,
        "fixed_anchor": None,
    },
    "drgrpo": {"check_loss": True},
    "gd2po": {"conflict": "hard", "tau": 0.2, "whiten": "token", "epsilon": 1e-6},
    "maxrl": {"epsilon": 1e-6},
    "compose": {"steps": None},
}
# Another value of each setting, with which the steps of the estimator in this row differ.
OTHER: list[tuple[str, str, dict[str, Any]]] = [
    ("gdpo", "whiten", {"gdpo": {"whiten": "token"}}),
    ("gdpo", "scale", {"gdpo": {"scale": "mad"}}),
    ("gdpo", "epsilon", {"gdpo": {"epsilon": 1e-4}}),
    ("gdpo", "conditions", {"gdpo": {"conditions": {"a": {"on": "b", "at_least": 1}}}}),
    ("gdpo", "weights", {"rewards": {**TWO, "weights": [1, 2]}}),
    ("gdpo", "norm_adv_by_std_in_grpo", {"norm_adv_by_std_in_grpo": False}),
    ("dgpo", "dgae", {"dgpo": {"dgae": False}}),
    ("dgpo", "dqw", {"dgpo": {"dqw": False}}),
    ("dgpo", "dqw_temp", {"dgpo": {"dqw_temp": 5}}),
    ("dgpo", "balance", {"dgpo": {"balance": "sequence"}}),
    ("hadw", "base", {"hadw": {"base": "gdpo"}}),
    ("hadw", "anchor", {"hadw": {"anchor": "window"}}),
    ("hadw", "lambda_scale", {"hadw": {"lambda_scale": 1.0}}),
    ("hadw", "history_window", {"hadw": {"history_window": 3}}),
    ("hadw", "eta", {"hadw": {"eta": 0.5}}),
    ("hadw", "eta_min", {"hadw": {"eta_min": 0.0}}),
    ("hadw", "fixed_anchor", {"hadw": {"anchor": "fixed", "fixed_anchor": 0.5}}),
    ("gd2po", "conflict", {"gd2po": {"conflict": "snr"}}),
    ("gd2po", "tau", {"gd2po": {"conflict": "snr", "tau": 0.8}}),
    ("gd2po", "whiten", {"gd2po": {"whiten": "sequence"}}),
    ("gd2po", "epsilon", {"gd2po": {"epsilon": 1e-4}}),
    ("gd2po", "weights", {"rewards": {**TWO, "weights": [1, 2]}}),
    ("gd2po", "norm_adv_by_std_in_grpo", {"norm_adv_by_std_in_grpo": False}),
    ("maxrl", "epsilon", {"maxrl": {"epsilon": 1e-4}}),
    ("hadw", "gdpo.scale", {"hadw": {"base": "gdpo"}, "gdpo": {"scale": "none"}}),
]


def test_every_default_is_that_of_the_specification() -> None:
    assert {name: dataclasses.asdict(kind()) for name, kind in SECTIONS.items()} == DEFAULTS
    whole = Settings()
    assert (whole.norm_by_std, whole.kl_in_reward, whole.loss_agg_mode) == (True, False, "token-mean")
    for nothing in (DEFAULTS, dict.fromkeys(SECTIONS), {name: {} for name in SECTIONS}):
        assert Settings.parse(nothing) == whole


@pytest.mark.parametrize(("name", "algorithm"), [(name, algorithm) for name, _, algorithm in OTHER])
def test_a_setting_reaches_the_steps(name: str, algorithm: dict[str, Any]) -> None:
    assert build(name, Settings.parse(algorithm)).steps != build(name, Settings()).steps


def test_gdpo_with_the_mad_divides_by_it() -> None:
    chain = build("gdpo", Settings.parse({"gdpo": {"scale": "mad"}}))
    assert [step.name for step in chain.steps] == ["centre", "scale_by_mad", "weigh_and_sum", "whiten"]


def test_no_setting_of_an_estimator_is_without_a_row() -> None:
    rows = {(name, setting) for name, setting, _ in OTHER}
    for name in SECTIONS.keys() - {"rewards", "verl_ext", "compose", "drgrpo"}:
        assert {(name, item.name) for item in dataclasses.fields(SECTIONS[name])} <= rows


def test_settings_are_read_again_from_what_they_were_read_from() -> None:
    algorithm = {
        "rewards": {"keys": ("a", "b"), "weights": (1, 0.5), "accuracy_key": "a", "accuracy_threshold": -1},
        "gdpo": {"conditions": {"a": {True: "b", "at_least": 1}}},  # YAML reads `on` as True
        "hadw": {"base": "gdpo", "lambda_scale": 1},
        "verl_ext": {"dump_dir": "x"},
        "norm_adv_by_std_in_grpo": False,
        "use_kl_in_reward": None,
        "gamma": 1.0,
    }
    settings = Settings.parse(algorithm, loss_agg_mode="token-sum")
    assert settings.rewards == RewardsSettings(("a", "b"), (1.0, 0.5), "a", -1.0)
    assert settings.verl_ext == VerlExtSettings("x")
    stored = json.loads(json.dumps(settings.given))
    assert "gamma" not in stored
    again = Settings.parse(stored, loss_agg_mode="token-sum")
    assert (again, again.given) == (settings, settings.given)


def test_verls_names_name_the_same_rewards() -> None:
    named = Settings.parse({"gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": [1, 2]})
    assert named.rewards == Settings.parse({"rewards": {"keys": ["a", "b"], "weights": [1, 2]}}).rewards
    assert named.verl_names


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        ({"rewards": {"weight": 1}}, ("algorithm.rewards", "'weight'", "'weights'")),
        ({"gdpo": {"whitten": 1}}, ("algorithm.gdpo", "'whiten'", "'conditions', 'epsilon', 'scale', 'whiten'")),
        ({"hadw": {"accuracy_key": "acc"}}, ("algorithm.hadw", "'accuracy_key'")),
        *(({name: 3}, (f"algorithm.{name}", "section")) for name in SECTIONS),
        *(({"verl_ext": name}, ("algorithm.verl_ext", "defaults", f"+verl_ext={name}")) for name in ("gdpo", "cpu")),
        ({"gdpo": {"whiten": "tokens"}}, ("algorithm.gdpo.whiten", "'tokens'", "'token'", "'sequence'")),
        ({"dgpo": {"balance": None}}, ("algorithm.dgpo.balance", "None", "'sequence'")),
        ({"hadw": {"base": "hadw"}}, ("algorithm.hadw.base", "'hadw'", "'grpo'")),
        ({"norm_adv_by_std_in_grpo": "False"}, ("algorithm.norm_adv_by_std_in_grpo", "True or False", "'False'")),
        ({"use_kl_in_reward": 0}, ("algorithm.use_kl_in_reward", "True or False", "0")),
        ({"gdpo": {"epsilon": 0}}, ("algorithm.gdpo.epsilon", "above 0", "0")),
        ({"gd2po": {"tau": 2}}, ("algorithm.gd2po.tau", "at most 1", "2")),
        ({"hadw": {"anchor": "fixed"}}, ("algorithm.hadw.anchor=fixed", "fixed_anchor")),
        ({"hadw": {"anchor": "window", "eta": 0.2}}, ("algorithm.hadw.eta=0.2",)),
        *(({"rewards": {"keys": keys}}, ("algorithm.rewards.keys",)) for keys in ("a", [], ["a", "a"], [""])),
        ({"gdpo_reward_keys": ["a", "a"]}, ("algorithm.rewards.keys",)),
        *(
            ({"rewards": {"keys": ["a"], "weights": weights}}, ("algorithm.rewards.weights",))
            for weights in (1.0, [1e300], [0], [1, 2])
        ),
        ({"rewards": {"weights": [1.0]}}, ("1 reward weights", "0 reward keys")),
        ({"rewards": {"token_scores": True}}, ("token_scores", "algorithm.rewards.keys")),
        ({"rewards": {"rejected": "drop"}}, ("algorithm.rewards.rejected", "'leave_out'")),
        (
            {"rewards": {"keys": ["a"]}, "gdpo_reward_keys": ["a"]},
            ("algorithm.rewards.keys=['a']", "algorithm.gdpo_reward_keys=['a']"),
        ),
        ({"gdpo": {"conditions": {"x": {True: 3, "at_least": 1}}}}, ("algorithm.gdpo.conditions.x.on", "3")),
        ({"dgpo": {True: 1}}, ("algorithm.dgpo", "'on'")),
    ],
    ids=str,
)
def test_what_is_wrong_is_refused_by_the_whole_name_of_its_setting(algorithm: dict[str, Any], words: tuple) -> None:
    """What is valid by type and limits is the subject of tests/core/test_typed.py."""
    with pytest.raises(ConfigurationError, match=facts(*words)):
        Settings.parse(algorithm)
