"""Translate settings into the vocabulary of a version, by asking the version which spelling it accepts."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import product
from typing import Any

from same_as import renamed

Algorithm = Mapping[str, Any]
KEYS = {"keys": ["a", "b"]}
BY_TURN = {**KEYS, "per_turn": ["a"]}
SUMMED = ["weighted_sum", "center"]


def of_list(steps: list[Any], **rewards: Any) -> tuple[str, Algorithm]:
    """Return the probe of a list of steps."""
    return "compose", {"rewards": {**KEYS, **rewards}, "compose": {"steps": steps}}


def of_rewards(**rewards: Any) -> tuple[str, Algorithm]:
    """Return the probe of settings under `algorithm.rewards`."""
    return "gdpo", {"rewards": {**KEYS, **rewards}}


def of_section(method: str, **section: Any) -> tuple[str, Algorithm]:
    """Return the probe of settings in the section of a method."""
    return method, {"rewards": {**KEYS, "accuracy_key": "a"}, method: section}


PLAIN = (
    *("gdpo", "dgpo", "hadw", "drgrpo", "gd2po", "maxrl", "dara", "dvao", "corrgrpo", "rvpo"),
    *("weighted_grpo", "liteppo", "fgrpo", "grpo"),
)
"""Methods that need no setting of their own."""
BETWEEN = ["center", "scale_by_std", "weighted_sum"]
# Every feature that a case may use, with the smallest configuration that has it. A version knows a feature if it builds
# that configuration in one of its spellings.
PROBES: Mapping[str, tuple[str, Algorithm]] = {
    "rewards.keys": of_rewards(),
    "rewards.weights": of_rewards(weights=[1, 2]),
    "rewards.accuracy_key": of_rewards(accuracy_key="a"),
    "rewards.accuracy_threshold": of_rewards(accuracy_threshold=0.5),
    "rewards.per_turn": of_rewards(per_turn=["a"]),
    "rewards.rubrics": of_rewards(rubrics=["a"]),
    "rewards.turn_discount": of_rewards(per_turn=["a"], turn_discount=0.5),
    "rewards.conditions": of_rewards(conditions={"a": {"reward": "b", "at_least": 1.0}}),
    "rewards.token_scores": of_rewards(token_scores=True),
    "rewards.rejected": of_rewards(rejected="exclude"),
    "rewards.log": of_rewards(log="all"),
    "rewards.accuracy_between": of_rewards(accuracy_between=[0.1, 0.9]),
    "verl_ext.dump_dir": ("gdpo", {"rewards": KEYS, "verl_ext": {"dump_dir": "/nowhere"}}),
    **{f"method.{name}": of_section(name) for name in PLAIN},
    "method.saw": of_section("saw", min_values=[0, 0]),
    "method.compose": of_list(SUMMED),
    "gdpo.whiten": of_section("gdpo", whiten="token"),
    "gdpo.scale": of_section("gdpo", scale="mad"),
    "gdpo.epsilon": of_section("gdpo", epsilon=1e-4),
    "dgpo.dgae": of_section("dgpo", dgae=False),
    "dgpo.dqw": of_section("dgpo", dqw=False),
    "dgpo.dqw_temp": of_section("dgpo", dqw_temp=1.0),
    "dgpo.balance": of_section("dgpo", balance="token"),
    "hadw.base": of_section("hadw", base="gdpo"),
    "hadw.anchor": of_section("hadw", anchor="window"),
    "hadw.lambda_scale": of_section("hadw", lambda_scale=1.0),
    "hadw.history_window": of_section("hadw", history_window=2),
    "hadw.eta": of_section("hadw", eta=0.3),
    "hadw.eta_min": of_section("hadw", eta_min=0.0),
    "hadw.fixed_anchor": of_section("hadw", anchor="fixed", fixed_anchor=0.4),
    "drgrpo.check_loss": of_section("drgrpo", check_loss=False),
    "gd2po.conflict": of_section("gd2po", conflict="snr"),
    "gd2po.tau": of_section("gd2po", conflict="snr", tau=0.5),
    "gd2po.over": of_section("gd2po", over="sequence"),
    "maxrl.epsilon": of_section("maxrl", epsilon=1e-3),
    "dara.of": of_section("dara", of="positive"),
    "dara.over": of_section("dara", over="sequence"),
    "rvpo.k": of_section("rvpo", k=2.0),
    "saw.min_values": of_section("saw", min_values=[0, 0]),
    "fgrpo.gamma": of_section("fgrpo", gamma=2.0),
    "steps.weighted_sum": of_list(SUMMED),
    "steps.center": of_list(SUMMED),
    "steps.center.leave_one_out": of_list(["weighted_sum", {"step": "center", "leave_one_out": True}]),
    "steps.scale_by_std": of_list([*SUMMED, "scale_by_std"]),
    "steps.scale_by_std.epsilon": of_list([*SUMMED, {"step": "scale_by_std", "epsilon": 1e-3}]),
    "steps.scale_by_mad": of_list([*SUMMED, "scale_by_mad"]),
    "steps.scale_by_mad.epsilon": of_list([*SUMMED, {"step": "scale_by_mad", "epsilon": 1e-3}]),
    "steps.whiten": of_list([*BETWEEN, "whiten"]),
    "steps.whiten.over": of_list([*BETWEEN, {"step": "whiten", "over": "token"}]),
    "steps.balance": of_list([*SUMMED, "balance"]),
    "steps.balance.over": of_list([*SUMMED, {"step": "balance", "over": "sequence"}]),
    "steps.weight_by_difficulty": of_list([*SUMMED, "weight_by_difficulty"]),
    "steps.weight_by_difficulty.dqw_temp": of_list([*SUMMED, {"step": "weight_by_difficulty", "dqw_temp": 1.0}]),
    "steps.weight_by_focal": of_list([*SUMMED, "weight_by_focal"]),
    "steps.weight_by_focal.gamma": of_list([*SUMMED, {"step": "weight_by_focal", "gamma": 2.0}]),
    "steps.weight_by_history": of_list([*SUMMED, "weight_by_history"]),
    "steps.weight_by_history.anchor": of_list([*SUMMED, {"step": "weight_by_history", "anchor": "window"}]),
    "steps.length_penalty": of_list(["weighted_sum", {"step": "length_penalty", "weight": 0.5}, "center"]),
    "steps.length_penalty.weight": of_list(["weighted_sum", {"step": "length_penalty", "weight": 0.5}, "center"]),
    "steps.divide_by_mean": of_list(["weighted_sum", "divide_by_mean", "center"]),
    "steps.divide_by_batch_std": of_list(["weighted_sum", "divide_by_batch_std", "center"]),
    "steps.drop_conflicts": of_list(["center", "drop_conflicts", "weighted_sum"]),
    "steps.drop_conflicts.conflict": of_list(["center", {"step": "drop_conflicts", "conflict": "snr"}, "weighted_sum"]),
    "steps.drop_conflicts.tau": of_list(
        ["center", {"step": "drop_conflicts", "conflict": "snr", "tau": 0.5}, "weighted_sum"]
    ),
    "steps.weight_by_variation": of_list(
        ["center", {"step": "weight_by_variation", "min_values": [0, 0]}, "weighted_sum"]
    ),
    "steps.weight_by_variation.min_values": of_list(
        ["center", {"step": "weight_by_variation", "min_values": [0, 0]}, "weighted_sum"]
    ),
    "steps.weight_by_density": of_list(["center", "weight_by_density", "weighted_sum"]),
    "steps.weight_by_density.of": of_list(["center", {"step": "weight_by_density", "of": "positive"}, "weighted_sum"]),
    "steps.scale_by_common_std": of_list(["center", "scale_by_common_std", "weighted_sum"]),
    "steps.scale_by_correlation": of_list(["center", "scale_by_correlation", "weighted_sum"]),
    "steps.soft_min": of_list(["center", "scale_by_std", "soft_min"]),
    "steps.soft_min.k": of_list(["center", "scale_by_std", {"step": "soft_min", "k": 2.0}]),
    "steps.same_as.own_steps:BySource": of_list(["weighted_sum", "same_as.own_steps:BySource", "center"]),
    "steps.same_as.own_steps:Halve": of_list(["weighted_sum", "center", "same_as.own_steps:Halve"]),
}
# Entries of `algorithm` that are verl's, which every version reads alike.
OF_VERL = frozenset(
    {
        *("filter_groups", "gdpo_reward_keys", "gdpo_reward_weights", "kl_penalty", "kl_ctrl"),
        *("norm_adv_by_std_in_grpo", "rollout_correction", "use_kl_in_reward", "use_pf_ppo", "gamma", "lam"),
    }
)


class Spelling:
    """The vocabulary of one version. `accepts(method, algorithm)` says whether the version builds a configuration."""

    def __init__(self, accepts: Callable[[str, Algorithm], bool]) -> None:
        self.accepts = accepts
        self.chosen: dict[Any, Any] = {}
        """The spelling in this version of each name that has several."""
        self.known: dict[str, bool] = {}

    def knows(self, feature: str) -> bool:
        """Return whether this version has a feature, whatever it calls it."""
        if feature not in self.known:
            method, algorithm = PROBES[feature]
            self.known[feature] = self._find_spelling(method, algorithm)
        return self.known[feature]

    def missing(self, method: str, algorithm: Algorithm) -> list[str]:
        """Return the features of a configuration that this version lacks."""
        return [feature for feature in features(method, algorithm) if not self.knows(feature)]

    def translate(self, method: str, algorithm: Algorithm) -> tuple[str, dict[str, Any]]:
        """Return a configuration in the vocabulary of this version."""
        return spelled(method, algorithm, self.spell)

    def spell(self, name: Any) -> Any:
        """Return a name in the spelling of this version; a value is asked for when it first occurs."""
        if name[0] == "value" and name not in self.chosen and len(spellings(name)) > 1:
            _, path, value = name
            self._find_spelling(*with_value(probed(("setting", path), path), value))
        return self.chosen.get(name, name)

    def _find_spelling(self, method: str, algorithm: Algorithm) -> bool:
        names: list[Any] = []
        spelled(method, algorithm, lambda name: names.append(name) or name)
        open_names = [name for name in dict.fromkeys(names) if name not in self.chosen and len(spellings(name)) > 1]
        for choice in product(*map(spellings, open_names)):
            chosen = {**self.chosen, **dict(zip(open_names, choice, strict=True))}
            if self.accepts(*spelled(method, algorithm, lambda name, chosen=chosen: chosen.get(name, name))):
                self.chosen = chosen
                return True
        return False


def with_value(feature: str, value: Any) -> tuple[str, dict[str, Any]]:
    """Return the probe of a setting with another value."""
    method, algorithm = PROBES[feature]
    section, _, rest = feature.partition(".")
    changed = dict(algorithm)
    if section != "steps":
        changed[section] = {**algorithm[section], rest: value}
        return method, changed
    step, _, setting = rest.rpartition(".")
    items = algorithm["compose"]["steps"]
    named = [{**item, setting: value} if isinstance(item, Mapping) and item["step"] == step else item for item in items]
    changed["compose"] = {"steps": named}
    return method, changed


@cache
def spellings(name: Any) -> tuple[Any, ...]:
    """Return all spellings of a name: `("setting", path)`, `("value", path, value)`, `("method", name)`, ..."""
    kind, *rest = name
    if kind == "value":
        path, value = rest
        found = next(
            (group for at, group in renamed.VALUES if path in same(renamed.SETTINGS, at) and value in group), ()
        )
        return tuple(("value", path, other) for other in found) or (name,)
    tables = {"setting": renamed.SETTINGS, "method": renamed.METHODS, "step": renamed.STEPS}
    return tuple((kind, other) for other in same(tables[kind], rest[0]))


def same(table: Iterable[tuple[str, ...]], name: str) -> tuple[str, ...]:
    """Return all spellings of a name in a table."""
    return next((group for group in table if name in group), (name,))


def spelled(method: str, algorithm: Algorithm, spell: Callable[[Any], Any]) -> tuple[str, dict[str, Any]]:
    """Return a configuration in which `spell` has replaced each name."""
    result: dict[str, Any] = {}
    for section, given in algorithm.items():
        if section in OF_VERL or not isinstance(given, Mapping):
            result[section] = given
        elif section == "compose":
            result[section] = {"steps": [_step(item, spell) for item in given["steps"]]}
        else:
            for name, value in given.items():
                path, new = _setting(f"{section}.{name}", value, spell)
                new_section, new_name = path.split(".", 1)
                result.setdefault(new_section, {})[new_name] = new
            result.setdefault(section, {})
    return spell(("method", method))[1], {name: given for name, given in result.items() if given != {}}


def _setting(path: str, value: Any, spell: Callable[[Any], Any]) -> tuple[str, Any]:
    """Return the path and the value of a setting in another spelling."""
    if path == "hadw.base":
        value = spell(("method", value))[1]
    elif path == "rewards.conditions":
        entries = {
            name: spell(("setting", f"{path}.*.{name}"))[1].rpartition(".")[2] for name in ("reward", "at_least")
        }
        value = {key: {entries[name]: item for name, item in needed.items()} for key, needed in value.items()}
    elif isinstance(value, str | bool | int | float):
        value = spell(("value", path, value))[2]
    return spell(("setting", path))[1], value


def _step(item: Any, spell: Callable[[Any], Any]) -> Any:
    """Return an entry of a list of steps in another spelling."""
    given = dict(item) if isinstance(item, Mapping) else {"step": item}
    name = given.pop("step")
    new = {"step": spell(("step", name))[1]}
    for setting, value in given.items():
        path, new_value = _setting(f"steps.{name}.{setting}", value, spell)
        new[path.rpartition(".")[2]] = new_value
    return new if len(new) > 1 else new["step"]


def features(method: str, algorithm: Algorithm) -> Iterator[str]:
    """Yield the features of a configuration, each a key of `PROBES`, but for those that are verl's."""
    if method not in renamed.OF_VERL_ALONE:
        yield probed(("method", method), f"method.{method}")
    for section, given in algorithm.items():
        if section in OF_VERL or not isinstance(given, Mapping):
            continue
        if section == "compose":
            for item in given["steps"]:
                yield from _features_of_step(item)
            continue
        for name in given:
            yield probed(("setting", f"{section}.{name}"), f"{section}.{name}")
        if "base" in given:
            yield probed(("method", given["base"]), f"method.{given['base']}")


def _features_of_step(item: Any) -> Iterator[str]:
    """Yield the features of an entry of a list of steps."""
    given = item if isinstance(item, Mapping) else {"step": item}
    step = probed(("step", given["step"]), f"steps.{given['step']}")
    yield step
    for name in given:
        if name != "step":
            yield probed(("setting", f"{step}.{name}"), f"{step}.{name}")


def probed(name: Any, feature: str) -> str:
    """Return the key in `PROBES` of a feature, which may have another spelling there."""
    kind = {"method": "method.", "step": "steps.", "setting": ""}[name[0]]
    for _, other in spellings(name):
        if kind + other in PROBES:
            return kind + other
    return feature


def newest(table: Iterable[tuple[str, ...]], name: str) -> str:
    """Return the newest spelling of a name; `*` in a table stands for any text without `/` or `.`."""
    for first, *others in table:
        for pattern in others:
            found = _matcher(pattern).fullmatch(name)
            if found:
                parts = iter(found.groups())
                return re.sub(r"\*", lambda _, parts=parts: next(parts), first)
    return name


@cache
def _matcher(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", "([^/]*)"))


def matches(patterns: Iterable[str], name: str) -> bool:
    """Return whether a name matches one of the patterns."""
    return any(_matcher(pattern).fullmatch(name) for pattern in patterns)
