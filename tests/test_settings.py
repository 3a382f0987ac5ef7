"""Settings: each has a description and changes the steps of its estimator. Errors name the setting and valid values."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from tests.facts import NEEDED, says
from verl_ext.core.batch import Condition
from verl_ext.errors import ConfigurationError
from verl_ext.registry import ESTIMATORS, build, changed_sections, sections
from verl_ext.settings import RewardsSettings, Settings, VerlExtSettings

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts/quality"))

from generated_pages.settings import descriptions

SECTIONS = sections()
NOT_READ_BY_STEPS = {("compose", "steps"), ("drgrpo", "check_loss")}
VALUES_THAT_THE_TYPE_DOES_NOT_GIVE = {
    ("gdpo", "epsilon"): 1e-4,
    ("hadw", "base"): "gdpo",
    ("saw", "min_values"): [0.0],
}
"""A valid value other than the default for these settings."""


def estimator_settings() -> list[tuple[str, str]]:
    """Return (estimator, setting) for each setting that the estimator's steps read."""
    pairs = []
    for estimator in SECTIONS:
        if estimator in ESTIMATORS:
            pairs += [(estimator, field.name) for field in dataclasses.fields(SECTIONS[estimator])]
    return [pair for pair in pairs if pair not in NOT_READ_BY_STEPS]


def field_of(estimator: str, setting: str) -> dataclasses.Field[Any]:
    """Return the dataclass field of a setting."""
    return {field.name: field for field in dataclasses.fields(SECTIONS[estimator])}[setting]


def value_other_than_default(estimator: str, setting: str) -> Any:
    """Return a valid value of a setting that is not its default."""
    if (estimator, setting) in VALUES_THAT_THE_TYPE_DOES_NOT_GIVE:
        return VALUES_THAT_THE_TYPE_DOES_NOT_GIVE[estimator, setting]
    default = field_of(estimator, setting).default
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return default * 2
    # The type is `Literal[...]`, or a union such as `Literal[...] | None`.
    setting_type = get_type_hints(SECTIONS[estimator])[setting]
    members = [setting_type, *get_args(setting_type)]
    literal = next(member for member in members if get_origin(member) is Literal)
    return next(value for value in reversed(get_args(literal)) if value != default)


def required_settings(estimator: str, setting: str) -> dict[str, Any]:
    """Return what must be set in the section, so that the setting may be set."""
    required: dict[str, Any] = dict(NEEDED.get(estimator, {}))
    only_with = field_of(estimator, setting).metadata.get("only_with", {})
    for other, valid_values in only_with.items():
        required.setdefault(other, valid_values[0])
    return required


@pytest.mark.parametrize("name", SECTIONS)
def test_each_setting_has_a_description(name: str) -> None:
    """The description stands in the class or in a base class. docs/pages/reference/settings.md is made from it."""
    description_of_setting = descriptions(SECTIONS[name])
    for field in dataclasses.fields(SECTIONS[name]):
        assert description_of_setting[field.name].endswith("."), field.name


@pytest.mark.parametrize(("name", "setting"), estimator_settings())
def test_each_setting_changes_the_steps(name: str, setting: str) -> None:
    default_section = required_settings(name, setting)
    changed_section = default_section | {setting: value_other_than_default(name, setting)}
    default_chain = build(name, Settings.parse({name: default_section}))
    changed_chain = build(name, Settings.parse({name: changed_section}))
    assert changed_chain.steps != default_chain.steps


def test_defaults_of_verl() -> None:
    settings = Settings()
    assert settings.norm_by_std is True
    assert settings.kl_in_reward is False
    assert settings.loss_agg_mode == "token-mean"


SECTIONS_WITH_DEFAULTS = [name for name in SECTIONS if name not in NEEDED]
UNCHANGED = {
    "defaults written out": {name: dataclasses.asdict(SECTIONS[name]()) for name in SECTIONS_WITH_DEFAULTS},
    "null sections": dict.fromkeys(SECTIONS),
    "empty sections": {name: {} for name in SECTIONS_WITH_DEFAULTS},
}


@pytest.mark.parametrize("algorithm", UNCHANGED.values(), ids=UNCHANGED)
def test_written_defaults_and_empty_sections_change_nothing(algorithm: dict[str, Any]) -> None:
    settings = Settings.parse(algorithm)
    assert settings == Settings()
    assert changed_sections(settings) == {}


CONFIGURED = {
    "rewards": {
        "keys": ("a", "b"),
        "weights": (1, 0.5),
        "accuracy_key": "a",
        "accuracy_threshold": -1,
        "conditions": {"a": {"reward": "b", "at_least": 1}},
    },
    "gdpo": {"epsilon": 1e-4},
    "hadw": {"base": "gdpo", "lambda_scale": 1},
    "verl_ext": {"dump_dir": "x"},
    "norm_adv_by_std_in_grpo": False,
    "use_kl_in_reward": None,
}


def test_sections_are_parsed_into_dataclasses() -> None:
    settings = Settings.parse(CONFIGURED)
    expected_rewards = RewardsSettings(
        keys=("a", "b"),
        weights=(1.0, 0.5),
        accuracy_key="a",
        accuracy_threshold=-1.0,
        conditions={"a": Condition("b", 1.0)},
    )
    assert settings.rewards == expected_rewards
    assert settings.verl_ext == VerlExtSettings("x")


def test_settings_survive_storing_as_json() -> None:
    settings = Settings.parse(CONFIGURED, loss_agg_mode="token-sum")
    stored = json.loads(json.dumps(settings.given))
    restored = Settings.parse(stored, loss_agg_mode="token-sum")
    assert restored == settings
    assert restored.given == settings.given


def test_names_of_verl_set_the_same_rewards() -> None:
    by_names_of_verl = Settings.parse({"gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": [1, 2]})
    by_names_of_verl_ext = Settings.parse({"rewards": {"keys": ["a", "b"], "weights": [1, 2]}})
    assert by_names_of_verl.rewards == by_names_of_verl_ext.rewards


def rejection_of(algorithm: dict[str, Any]) -> str:
    """Return the message of the error with which a section `algorithm` is rejected."""
    with pytest.raises(ConfigurationError) as caught:
        changed_sections(Settings.parse(algorithm))
    return str(caught.value)


# The section `algorithm`, and facts of the message.
MISSPELLED = [
    ({"rewards": {"weight": 1}}, ("algorithm.rewards", "'weight'", "'weights'")),
    ({"gdpo": {"whitten": 1}}, ("algorithm.gdpo", "'whiten'", "'epsilon', 'scale', 'whiten'")),
    ({"dgpo": {True: 1}}, ("algorithm.dgpo", "'True'")),
]


@pytest.mark.parametrize(("algorithm", "facts"), MISSPELLED, ids=str)
def test_unknown_setting_is_rejected_with_the_valid_names(algorithm: dict[str, Any], facts: tuple[str, ...]) -> None:
    assert says(rejection_of(algorithm), *facts)


@pytest.mark.parametrize("name", SECTIONS)
def test_section_that_is_a_number_is_rejected(name: str) -> None:
    assert says(rejection_of({name: 3}), f"algorithm.{name}", "section")


INVALID_VALUES = [
    ({"gdpo": {"whiten": "tokens"}}, ("algorithm.gdpo.whiten", "'tokens'", "'token'", "'sequence'")),
    ({"dgpo": {"balance": None}}, ("algorithm.dgpo.balance", "None", "'sequence'")),
    ({"hadw": {"base": "hadw"}}, ("algorithm.hadw.base", "'hadw'", "'grpo'")),
    ({"norm_adv_by_std_in_grpo": "False"}, ("algorithm.norm_adv_by_std_in_grpo", "True or False", "'False'")),
    ({"use_kl_in_reward": 0}, ("algorithm.use_kl_in_reward", "True or False", "0")),
    ({"gdpo": {"epsilon": 0}}, ("algorithm.gdpo.epsilon", "above 0", "0")),
    ({"rewards": {"keys": "a"}}, ("algorithm.rewards.keys",)),
    ({"rewards": {"keys": []}}, ("algorithm.rewards.keys",)),
    ({"rewards": {"keys": ["a", "a"]}}, ("algorithm.rewards.keys",)),
    ({"rewards": {"keys": [""]}}, ("algorithm.rewards.keys",)),
    ({"rewards": {"accuracy_key": ""}}, ("algorithm.rewards.accuracy_key", "empty")),
    ({"rewards": {"rejected": "drop"}}, ("algorithm.rewards.rejected", "'exclude'")),
    ({"verl_ext": {"dump_dir": ""}}, ("algorithm.verl_ext.dump_dir", "empty")),
    ({"rewards": {"keys": ["a"], "weights": 1.0}}, ("algorithm.rewards.weights",)),
    ({"rewards": {"keys": ["a"], "weights": [1e300]}}, ("algorithm.rewards.weights",)),
    ({"rewards": {"keys": ["a"], "weights": [0]}}, ("algorithm.rewards.weights",)),
    ({"rewards": {"keys": ["a"], "weights": [1, 2]}}, ("algorithm.rewards.weights",)),
]


@pytest.mark.parametrize(("algorithm", "facts"), INVALID_VALUES, ids=str)
def test_invalid_value_is_rejected_by_its_full_name(algorithm: dict[str, Any], facts: tuple[str, ...]) -> None:
    """Types and limits are the subject of tests/core/test_schema.py."""
    assert says(rejection_of(algorithm), *facts)


CONDITION_ON_A = {"b": {"reward": "a", "at_least": 1}}
CONDITION_ON_B = {"a": {"reward": "b", "at_least": 1}}
# The section `algorithm.rewards`, and facts of the message.
CONTRADICTIONS = [
    ({"weights": [1.0]}, ("algorithm.rewards.weights=[1.0]", "algorithm.rewards.keys=[]")),
    ({"token_scores": True}, ("token_scores", "algorithm.rewards.keys")),
    ({"keys": ["a"], "per_turn": ["a"], "token_scores": True}, ("token_scores",)),
    ({"keys": ["a"], "turn_discount": 0.9}, ("turn_discount",)),
    ({"per_turn": ["b"]}, ("algorithm.rewards.per_turn", "'b'")),
    ({"rubrics": ["b"]}, ("algorithm.rewards.rubrics", "'b'")),
    # With rubrics, b is not a single number.
    ({"keys": ["a", "b"], "rubrics": ["b"], "per_turn": ["a"]}, ("algorithm.rewards.per_turn", "'b'")),
    ({"keys": ["a", "b"], "rubrics": ["b"], "accuracy_key": "b"}, ("algorithm.rewards.accuracy_key", "'b'")),
    ({"keys": ["a", "b"], "rubrics": ["b"], "token_scores": True}, ("algorithm.rewards.token_scores", "'b'")),
    ({"keys": ["a", "b"], "rubrics": ["b"], "conditions": CONDITION_ON_A}, ("algorithm.rewards.conditions", "'b'")),
    ({"keys": ["a", "b"], "rubrics": ["b"], "conditions": CONDITION_ON_B}, ("algorithm.rewards.conditions", "'b'")),
]


@pytest.mark.parametrize(("rewards", "facts"), CONTRADICTIONS, ids=str)
def test_rewards_settings_that_contradict_each_other_are_rejected(
    rewards: dict[str, Any], facts: tuple[str, ...]
) -> None:
    assert says(rejection_of({"rewards": rewards}), *facts)


def test_keys_by_both_names_are_rejected() -> None:
    message = rejection_of({"rewards": {"keys": ["a"]}, "gdpo_reward_keys": ["a"]})
    assert says(message, "algorithm.rewards.keys=['a']", "algorithm.gdpo_reward_keys=['a']")


# The section `algorithm.rewards.conditions` of a run with the per-turn reward y, and facts of the message.
INVALID_CONDITIONS = [
    ({"x": {"reward": 3, "at_least": 1}}, ("algorithm.rewards.conditions.x.reward", "3")),
    (
        {"x": {"reward": "xx", "at_least": 1}},
        ("algorithm.rewards.conditions", "'xx'", "algorithm.rewards.keys=['x', 'y']"),
    ),
    ({"z": {"reward": "x", "at_least": 1}}, ("algorithm.rewards.conditions", "'z'", "'y'")),
    ({"x": {"reward": "y", "at_least": 1}}, ("algorithm.rewards.conditions", "'y'", "algorithm.rewards.per_turn")),
]


@pytest.mark.parametrize(("conditions", "facts"), INVALID_CONDITIONS, ids=str)
def test_invalid_condition_is_rejected(conditions: dict[str, Any], facts: tuple[str, ...]) -> None:
    rewards = {"keys": ["x", "y"], "per_turn": ["y"], "conditions": conditions}
    assert says(rejection_of({"rewards": rewards}), *facts)
