"""The settings under `algorithm:` in verl's YAML: one frozen dataclass per section.

`rewards` and `verl_ext` are here. The section of each estimator is in the estimator's file.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from verl_ext.core.batch import SCORE, Condition
from verl_ext.core.typed import LARGEST_WEIGHT, bounded, make, value_of
from verl_ext.errors import ConfigurationError, listed

VERL_NAMES: Mapping[str, str] = {"keys": "gdpo_reward_keys", "weights": "gdpo_reward_weights"}
"""Settings of `algorithm.rewards` to the settings of verl under `algorithm` that mean the same."""
ACCURACY = "acc"
"""The component that is the accuracy unless a setting names another."""
ANY_REWARD = "any_reward"
"""The metric of `algorithm.filter_groups` that keeps a group whose rewards do not cancel in the estimator."""
ACCURACY_BETWEEN = "accuracy_between"
"""The metric that keeps a group whose mean accuracy lies between two bounds."""
T = TypeVar("T")


@dataclass(frozen=True)
class RewardsSettings:
    """`algorithm.rewards`: which reward components are used, and how."""

    keys: tuple[str, ...] | None = None
    """Names of the components; null: the trainer's score, with everything that the reward manager adds to it."""
    weights: tuple[float, ...] | None = bounded(None, low=-LARGEST_WEIGHT, high=LARGEST_WEIGHT)
    """One weight per key; null: 1 each."""
    accuracy_key: str | None = None
    """The component that is the accuracy; null: `acc` if the reward function returns it, else a single key, else the
    `score` that the function returns, else the trainer's score."""
    accuracy_threshold: float | None = None
    """Values above it count as right; null: the values are an accuracy in [0, 1] already."""
    per_turn: tuple[str, ...] | None = None
    """Those of the keys that have an entry for each turn of a response, as `verl_ext.per_turn([...])` returns them."""
    rubrics: tuple[str, ...] | None = None
    """Those of the keys that are lists of criteria, a number for each, as `verl_ext.rubric([...])` returns them."""
    turn_discount: float = bounded(1.0, low=0.0, high=1.0)
    """What a reward counts one turn before it is earned."""
    conditions: Mapping[str, Condition] | None = None
    """`{easy: {reward: hard, at_least: 1.0}}`: `easy` counts only where `hard` reached the threshold."""
    token_scores: bool = False
    """Whether the trainer writes each reward into the batch as `token_level_scores_<key>`, for code of yours."""
    rejected: Literal["keep", "exclude"] = "keep"
    """`keep`: responses that rollout correction rejected count in means, spreads and the accuracy; else they do not."""
    log: Literal["all", "keys", "none"] | None = None
    """Which rewards have metrics: all that the reward function returns, or those of `keys`; null: `all` with an
    estimator of this package, `keys` with one of verl's."""
    accuracy_between: tuple[float, ...] | None = bounded(None, low=0.0, high=1.0)
    """The least and the largest mean accuracy of a group that `filter_groups.metric=accuracy_between` keeps."""

    def __post_init__(self) -> None:
        where, keys = "algorithm.rewards", self.keys or ()
        if self.keys is not None and (not keys or len(set(keys)) != len(keys)):
            raise ConfigurationError(
                f"{where}.keys must name at least one reward, each once, found {list(keys)}: write "
                f"'{where}.keys=[format,correctness]'"
            )
        if self.weights is not None and len(self.weights) != len(keys):
            raise ConfigurationError(
                f"{len(self.weights)} reward weights for {len(keys)} reward keys: "
                f"{where}.weights={list(self.weights)}, {where}.keys={list(keys)}; give one weight per key"
            )
        if self.weights is not None and not any(self.weights):
            raise ConfigurationError(
                f"{where}.weights={list(self.weights)} are all 0, and so would be every advantage: give at least one "
                "reward a weight"
            )
        per_turn, on = set(self.per_turn or ()), {needed.reward for needed in (self.conditions or {}).values()}
        rubrics, conditioned = set(self.rubrics or ()), on.union(self.conditions or ())
        for setting, names in {"per_turn": per_turn, "rubrics": rubrics, "conditions": conditioned}.items():
            if missing := names - set(keys):
                raise ConfigurationError(
                    f"{where}.{setting} names {listed(missing)}: add it to {where}.keys={list(keys)}"
                )
        if other := (on & per_turn) | (conditioned & rubrics):
            raise ConfigurationError(
                f"{where}.conditions name {listed(other)}, of {where}.per_turn or rubrics: name "
                "rewards that are numbers"
            )
        lists = per_turn | rubrics
        clashes = {"per_turn": per_turn and rubrics, "accuracy_key": {self.accuracy_key} & rubrics}
        clashes["token_scores"] = lists if self.token_scores else set()
        if wrong := [setting for setting, clash in clashes.items() if clash]:
            raise ConfigurationError(
                f"{where}.{wrong[0]} does not work with the rewards {listed(lists)}, which are lists: remove one"
            )
        if self.turn_discount != 1 and not self.per_turn:
            raise ConfigurationError(f"{where}.turn_discount has no effect without {where}.per_turn: remove it")
        bounds = self.accuracy_between
        if bounds is not None and (len(bounds) != 2 or bounds[0] >= bounds[1]):
            raise ConfigurationError(
                f"{where}.accuracy_between must be a lower and an upper bound, found {list(bounds)}: write "
                f"'{where}.accuracy_between=[0.05,0.95]'"
            )
        if self.token_scores and not keys:
            raise ConfigurationError(f"{where}.token_scores=True needs '{where}.keys=[...]'")

    def accuracy_in(self, names: Container[str], *, score: str = SCORE) -> str:
        """The component that is the accuracy, where components of these names exist.

        >>> RewardsSettings().accuracy_in(["acc", "format"]), RewardsSettings().accuracy_in(["format"])
        ('acc', 'score')
        """
        only = self.keys[0] if self.keys and len(self.keys) == 1 else score
        return self.accuracy_key or (ACCURACY if ACCURACY in names else only)


@dataclass(frozen=True)
class VerlExtSettings:
    """`algorithm.verl_ext`: dumps of advantages, and a shorter update."""

    dump_dir: str | None = None
    """Folder for one parquet file per update, with the rewards, group statistics and advantage of every trajectory.

    With an estimator of verl's own, `rewards.keys` must be set."""
    skip_zero_advantage: bool = False
    """Whether the actor's update leaves out responses whose advantages are all 0, which have no gradient."""
    share_prompts: bool = False
    """Whether log-probabilities and the actor's update compute each prompt once for all its responses."""


COMMON: Mapping[str, type[Any]] = {"rewards": RewardsSettings, "verl_ext": VerlExtSettings}
"""The sections that all estimators share."""


@dataclass(frozen=True)
class Settings:
    """All that an estimator reads from the configuration."""

    rewards: RewardsSettings = field(default_factory=RewardsSettings)
    verl_ext: VerlExtSettings = field(default_factory=VerlExtSettings)
    norm_by_std: bool = True
    """verl's `algorithm.norm_adv_by_std_in_grpo`."""
    kl_in_reward: bool = False
    """verl's `algorithm.use_kl_in_reward`."""
    loss_agg_mode: str = "token-mean"
    """verl's `actor_rollout_ref.actor.loss_agg_mode`."""
    verl_names: bool = False
    """Whether verl's own `algorithm.gdpo_reward_keys` or `gdpo_reward_weights` are set."""
    given: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The entries of `algorithm` that are set, as JSON can hold them; `of` reads an estimator's section from them.

    Not compared, because defaults may be written out: what an estimator's section says is in its chain."""

    @classmethod
    def parse(cls, algorithm: Mapping[str, Any], *, loss_agg_mode: str = "token-mean") -> Settings:
        """Read the `algorithm` section of a configuration from plain data.

        >>> Settings.parse({"rewards": {"keys": ["format"]}}).rewards.keys
        ('format',)
        """
        given = entries_set(algorithm)
        return cls(
            rewards=make(RewardsSettings, _with_verl_names(given), "algorithm.rewards"),
            verl_ext=make(VerlExtSettings, given.get("verl_ext"), "algorithm.verl_ext"),
            norm_by_std=_verl_boolean(given, "norm_adv_by_std_in_grpo", default=cls.norm_by_std),
            kl_in_reward=_verl_boolean(given, "use_kl_in_reward", default=cls.kl_in_reward),
            loss_agg_mode=loss_agg_mode,
            verl_names=not given.keys().isdisjoint(VERL_NAMES.values()),
            given=given,
        )

    def of(self, name: str, kind: type[T]) -> T:
        """The section of an estimator, whose dataclass is `kind`; the defaults where nothing is set.

        >>> from verl_ext.estimators.gdpo import GdpoSettings
        >>> Settings.parse({"gdpo": {"whiten": "token"}}).of("gdpo", GdpoSettings).whiten
        'token'
        """
        return make(kind, self.given.get(name), f"algorithm.{name}")


def entries_set(algorithm: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of `algorithm` that are set, as `Settings.given` holds them."""
    return {name: _as_json(value) for name, value in algorithm.items() if value is not None}


def _as_json(value: Any) -> Any:
    """Data that JSON can hold."""
    if isinstance(value, Mapping):
        return {str(key): _as_json(item) for key, item in value.items()}
    return [_as_json(item) for item in value] if isinstance(value, list | tuple) else value


def _with_verl_names(given: Mapping[str, Any]) -> object:
    """The section `rewards`, with verl's own `gdpo_reward_keys` and `gdpo_reward_weights` as `keys` and `weights`."""
    rewards = given.get("rewards")
    theirs = {ours: given[name] for ours, name in VERL_NAMES.items() if name in given}
    if not theirs or not isinstance(rewards, Mapping | None):
        return rewards
    for ours, value in theirs.items():
        if rewards and rewards.get(ours) is not None:
            raise ConfigurationError(
                f"algorithm.rewards.{ours}={rewards[ours]} and algorithm.{VERL_NAMES[ours]}={value} are both set: "
                "they mean the same, remove one"
            )
    return {**(rewards or {}), **theirs}


def _verl_boolean(given: Mapping[str, Any], name: str, *, default: bool) -> bool:
    return bool(value_of(f"algorithm.{name}", given.get(name, default), bool))
