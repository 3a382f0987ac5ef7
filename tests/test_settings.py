"""Settings: each has a description and reaches the steps, what is valid for each, and what an error says."""

import dataclasses
import json
import runpy
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from tests.facts import NEEDED, facts
from verl_ext.core.batch import Condition
from verl_ext.errors import ConfigurationError
from verl_ext.registry import ESTIMATORS, build, changed_sections, sections
from verl_ext.settings import RewardsSettings, Settings, VerlExtSettings

SECTIONS = sections()
DOCSTRINGS = runpy.run_path(str(Path(__file__).parents[1] / "scripts/quality/make_docs.py"))["docstrings"]
NOT_A_STEP = {("compose", "steps"), ("drgrpo", "check_loss")}
# A value other than the default, where the type does not give one.
SPECIAL = {("gdpo", "epsilon"): 1e-4, ("hadw", "base"): "gdpo", ("saw", "min_values"): [0.0]}
PLACES = [
    (name, item.name)
    for name, kind in SECTIONS.items()
    for item in dataclasses.fields(kind)
    if name in ESTIMATORS and (name, item.name) not in NOT_A_STEP
]


def another(name: str, item: dataclasses.Field[Any]) -> Any:
    """A valid value of a setting that is not its default."""
    if (name, item.name) in SPECIAL:
        return SPECIAL[name, item.name]
    if isinstance(item.default, bool):
        return not item.default
    if isinstance(item.default, int | float):
        return item.default * 2
    kind = get_type_hints(SECTIONS[name])[item.name]
    literal = next((part for part in get_args(kind) if get_origin(part) is Literal), kind)
    return next(value for value in reversed(get_args(literal)) if value != item.default)


@pytest.mark.parametrize("name", SECTIONS)
def test_each_setting_has_a_description(name: str) -> None:
    """Its own or that of a base class. docs/pages/settings.md is made from the descriptions."""
    kind = SECTIONS[name]
    descriptions: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if dataclasses.is_dataclass(base):
            descriptions |= DOCSTRINGS(base)
    for item in dataclasses.fields(kind):
        assert descriptions[item.name].endswith("."), item.name


@pytest.mark.parametrize(("name", "setting"), PLACES)
def test_a_setting_reaches_the_steps(name: str, setting: str) -> None:
    (item,) = (item for item in dataclasses.fields(SECTIONS[name]) if item.name == setting)
    given = {other: valid[0] for other, valid in item.metadata.get("only_with", {}).items()} | NEEDED.get(name, {})
    usual, changed = ({name: given | more} for more in ({}, {setting: another(name, item)}))
    assert build(name, Settings.parse(changed)).steps != build(name, Settings.parse(usual)).steps


def test_defaults_may_be_written_out_or_left_out() -> None:
    whole = Settings()
    assert (whole.norm_by_std, whole.kl_in_reward, whole.loss_agg_mode) == (True, False, "token-mean")
    sections = {name: kind for name, kind in SECTIONS.items() if name not in NEEDED}
    written = {name: dataclasses.asdict(kind()) for name, kind in sections.items()}
    for nothing in (written, dict.fromkeys(SECTIONS), {name: {} for name in sections}):
        assert Settings.parse(nothing) == whole
        assert changed_sections(Settings.parse(nothing)) == {}


def test_settings_can_be_stored_and_read_again() -> None:
    algorithm = {
        "rewards": {"keys": ("a", "b"), "weights": (1, 0.5), "accuracy_key": "a", "accuracy_threshold": -1}
        | {"conditions": {"a": {"reward": "b", "at_least": 1}}},
        "gdpo": {"epsilon": 1e-4},
        "hadw": {"base": "gdpo", "lambda_scale": 1},
        "verl_ext": {"dump_dir": "x"},
        "norm_adv_by_std_in_grpo": False,
        "use_kl_in_reward": None,
    }
    settings = Settings.parse(algorithm, loss_agg_mode="token-sum")
    conditions = {"a": Condition("b", 1.0)}
    assert settings.rewards == RewardsSettings(("a", "b"), (1.0, 0.5), "a", -1.0, conditions=conditions)
    assert settings.verl_ext == VerlExtSettings("x")
    stored = json.loads(json.dumps(settings.given))
    again = Settings.parse(stored, loss_agg_mode="token-sum")
    assert (again, again.given) == (settings, settings.given)


def test_the_names_of_verl_set_the_same_rewards() -> None:
    named = Settings.parse({"gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": [1, 2]})
    assert named.rewards == Settings.parse({"rewards": {"keys": ["a", "b"], "weights": [1, 2]}}).rewards


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        ({"rewards": {"weight": 1}}, ("algorithm.rewards", "'weight'", "'weights'")),
        ({"gdpo": {"whitten": 1}}, ("algorithm.gdpo", "'whiten'", "'epsilon', 'scale', 'whiten'")),
        *(({name: 3}, (f"algorithm.{name}", "section")) for name in SECTIONS),
        ({"gdpo": {"whiten": "tokens"}}, ("algorithm.gdpo.whiten", "'tokens'", "'token'", "'sequence'")),
        ({"dgpo": {"balance": None}}, ("algorithm.dgpo.balance", "None", "'sequence'")),
        ({"hadw": {"base": "hadw"}}, ("algorithm.hadw.base", "'hadw'", "'grpo'")),
        ({"norm_adv_by_std_in_grpo": "False"}, ("algorithm.norm_adv_by_std_in_grpo", "True or False", "'False'")),
        ({"use_kl_in_reward": 0}, ("algorithm.use_kl_in_reward", "True or False", "0")),
        ({"gdpo": {"epsilon": 0}}, ("algorithm.gdpo.epsilon", "above 0", "0")),
        *(({"rewards": {"keys": keys}}, ("algorithm.rewards.keys",)) for keys in ("a", [], ["a", "a"], [""])),
        ({"rewards": {"accuracy_key": ""}}, ("algorithm.rewards.accuracy_key", "empty")),
        ({"verl_ext": {"dump_dir": ""}}, ("algorithm.verl_ext.dump_dir", "empty")),
        *(
            ({"rewards": {"keys": ["a"], "weights": weights}}, ("algorithm.rewards.weights",))
            for weights in (1.0, [1e300], [0], [1, 2])
        ),
        ({"rewards": {"weights": [1.0]}}, ("algorithm.rewards.weights=[1.0]", "algorithm.rewards.keys=[]")),
        ({"rewards": {"token_scores": True}}, ("token_scores", "algorithm.rewards.keys")),
        ({"rewards": {"keys": ["a"], "per_turn": ["a"], "token_scores": True}}, ("token_scores",)),
        ({"rewards": {"keys": ["a"], "turn_discount": 0.9}}, ("turn_discount",)),
        ({"rewards": {"rubrics": ["b"]}}, ("algorithm.rewards.rubrics", "'b'")),
        *(
            ({"rewards": {"keys": ["a", "b"], "rubrics": ["b"], **more}}, (f"algorithm.rewards.{name}", "'b'"))
            for name, more in (
                ("per_turn", {"per_turn": ["a"]}),
                ("accuracy_key", {"accuracy_key": "b"}),
                ("token_scores", {"token_scores": True}),
                ("conditions", {"conditions": {"b": {"reward": "a", "at_least": 1}}}),
                ("conditions", {"conditions": {"a": {"reward": "b", "at_least": 1}}}),
            )
        ),
        ({"rewards": {"per_turn": ["b"]}}, ("algorithm.rewards.per_turn", "'b'")),
        ({"rewards": {"rejected": "drop"}}, ("algorithm.rewards.rejected", "'exclude'")),
        (
            {"rewards": {"keys": ["a"]}, "gdpo_reward_keys": ["a"]},
            ("algorithm.rewards.keys=['a']", "algorithm.gdpo_reward_keys=['a']"),
        ),
        *(
            ({"rewards": {"keys": ["x", "y"], "per_turn": ["y"], "conditions": conditions}}, words)
            for conditions, words in (
                ({"x": {"reward": 3, "at_least": 1}}, ("algorithm.rewards.conditions.x.reward", "3")),
                (
                    {"x": {"reward": "xx", "at_least": 1}},
                    ("algorithm.rewards.conditions", "'xx'", "algorithm.rewards.keys=['x', 'y']"),
                ),
                ({"z": {"reward": "x", "at_least": 1}}, ("algorithm.rewards.conditions", "'z'", "'y'")),
                (
                    {"x": {"reward": "y", "at_least": 1}},
                    ("algorithm.rewards.conditions", "'y'", "algorithm.rewards.per_turn"),
                ),
            )
        ),
        ({"dgpo": {True: 1}}, ("algorithm.dgpo", "'True'")),
    ],
    ids=str,
)
def test_a_wrong_setting_is_rejected_by_its_full_name(algorithm: dict[str, Any], words: tuple) -> None:
    """Types and limits are the subject of tests/core/test_schema.py."""
    with pytest.raises(ConfigurationError, match=facts(*words)):
        changed_sections(Settings.parse(algorithm))
