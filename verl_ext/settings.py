"""The settings under `algorithm:` in verl's configuration, one frozen dataclass per section.

The sections `rewards` and `verl_ext` are here. The section of each estimator is in the estimator's file.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from verl_ext.core.batch import SCORE, Condition
from verl_ext.core.schema import LARGEST_WEIGHT, bounded, parse_dataclass, parse_value
from verl_ext.errors import ConfigurationError, listed, nearest

VERL_NAMES: Mapping[str, str] = {"keys": "gdpo_reward_keys", "weights": "gdpo_reward_weights"}
"""Maps settings of `algorithm.rewards` to verl's equivalent settings under `algorithm`."""
ACCURACY = "acc"
"""The component that is used as the accuracy by default."""
ANY_REWARD = "any_reward"
"""The metric of `algorithm.filter_groups` that keeps every group with a nonzero learning signal."""
ACCURACY_BETWEEN = "accuracy_between"
"""The metric that keeps a group whose mean accuracy lies between two bounds."""
REWARDS = "algorithm.rewards"
"""The section of `RewardsSettings`."""
T = TypeVar("T")


@dataclass(frozen=True)
class RewardsSettings:
    """`algorithm.rewards`: which reward components are used, and how."""

    keys: tuple[str, ...] | None = None
    """Names of the reward components to use. null: the trainer's score, including what the reward manager adds to
    it."""
    weights: tuple[float, ...] | None = bounded(None, low=-LARGEST_WEIGHT, high=LARGEST_WEIGHT)
    """One weight per key. null: 1 each."""
    accuracy_key: str | None = None
    """Component used as the accuracy. null: `acc` if it exists (of several keys, if it is a key), otherwise the only
    key or the score."""
    accuracy_threshold: float | None = None
    """Values above this threshold count as correct. null: the component is an accuracy in [0, 1]."""
    per_turn: tuple[str, ...] | None = None
    """Keys of per-turn rewards, which the reward function returns as `verl_ext.per_turn([...])`."""
    rubrics: tuple[str, ...] | None = None
    """Keys of rubrics, which the reward function returns as `verl_ext.rubric([...])`."""
    turn_discount: float = bounded(1.0, low=0.0, high=1.0)
    """Discount factor of the returns per turn."""
    conditions: Mapping[str, Condition] | None = None
    """Conditions of rewards. With `{easy: {reward: hard, at_least: 1.0}}`, `easy` counts only where `hard` is at least
    1.0. null: none."""
    token_scores: bool = False
    """Whether the trainer writes each reward into the batch as `token_level_scores_<key>`, for custom code."""
    rejected: Literal["keep", "exclude"] = "keep"
    """Whether means, standard deviations and accuracies `keep` or `exclude` responses without a token in the loss, for
    example after rollout correction."""
    log: Literal["all", "keys", "none"] | None = None
    """Rewards to log: `all`, those in `keys`, or `none`. null: `all` with an estimator of verl_ext, `keys` with an
    estimator of verl."""
    accuracy_between: tuple[float, ...] | None = bounded(None, low=0.0, high=1.0)
    """Lower and upper bound of a group's mean accuracy, for `filter_groups.metric=accuracy_between`."""

    def __post_init__(self) -> None:
        self._check_keys_and_weights()
        self._check_names()
        self._check_lists()
        self._check_token_scores()
        self._check_accuracy()

    def _check_keys_and_weights(self) -> None:
        """Raise for keys that occur twice, and for weights that do not fit the keys."""
        keys = self.keys or ()
        if self.keys is not None and (not keys or len(set(keys)) != len(keys)):
            raise ConfigurationError(
                f"{REWARDS}.keys must name at least one reward, and each reward only once, found {list(keys)}. Set "
                f"'{REWARDS}.keys=[format,correctness]', for example."
            )
        if self.weights is None:
            return
        if len(self.weights) != len(keys):
            remedy = "Set one weight per key." if keys else f"Set {REWARDS}.keys, or remove {REWARDS}.weights."
            raise ConfigurationError(
                f"{REWARDS}.weights={list(self.weights)} and {REWARDS}.keys={list(keys)} differ in length. {remedy}"
            )
        if not any(self.weights):
            raise ConfigurationError(
                f"{REWARDS}.weights={list(self.weights)} are all 0, so that every advantage would be 0. Set at least "
                "one weight to a nonzero value."
            )

    def _check_names(self) -> None:
        """Raise if another setting names a reward that is not among the keys."""
        keys = self.keys or ()
        names_of_setting = {
            "per_turn": {*(self.per_turn or ())},
            "rubrics": {*(self.rubrics or ())},
            "conditions": self._easy_rewards | self._hard_rewards,
        }
        for setting, names in names_of_setting.items():
            missing = names.difference(keys)
            if not missing:
                continue
            suggestion = nearest(min(missing), keys)
            hint = "" if suggestion is None else f" (did you mean {suggestion!r}?)"
            weight = f" and a weight to {REWARDS}.weights" if self.weights is not None else ""
            raise ConfigurationError(
                f"{REWARDS}.{setting} names {listed(missing)}, which is missing in {REWARDS}.keys={list(keys)}{hint}. "
                f"Add {listed(missing)} to {REWARDS}.keys{weight}, or remove it from {REWARDS}.{setting}."
            )

    @property
    def _easy_rewards(self) -> set[str]:
        """The rewards that count only where another reward reaches a threshold."""
        return {*(self.conditions or {})}

    @property
    def _hard_rewards(self) -> set[str]:
        """The rewards that must reach a threshold."""
        return {condition.reward for condition in (self.conditions or {}).values()}

    def _check_lists(self) -> None:
        """Raise if rewards per turn or rubrics are used where one number per response is needed."""
        per_turn = {*(self.per_turn or ())}
        rubrics = {*(self.rubrics or ())}
        # An easy reward may be per turn: its turns count where the response meets the condition.
        per_turn_with_condition = self._hard_rewards & per_turn
        rubrics_with_condition = (self._easy_rewards | self._hard_rewards) & rubrics
        lists_with_condition = per_turn_with_condition | rubrics_with_condition
        if lists_with_condition:
            raise ConfigurationError(
                f"{REWARDS}.conditions names {listed(lists_with_condition)}, which {REWARDS}.per_turn or "
                f"{REWARDS}.rubrics names as well. A condition needs one number per response. Remove "
                f"{listed(lists_with_condition)} from {REWARDS}.conditions."
            )
        if per_turn and rubrics:
            raise ConfigurationError(
                f"{REWARDS}.per_turn={sorted(per_turn)} and {REWARDS}.rubrics={sorted(rubrics)} cannot be combined. "
                "Remove one of the two settings."
            )
        if self.turn_discount != 1 and not per_turn:
            raise ConfigurationError(
                f"{REWARDS}.turn_discount={self.turn_discount:g} has no effect without {REWARDS}.per_turn. Remove "
                f"{REWARDS}.turn_discount, or set {REWARDS}.per_turn."
            )

    def _check_token_scores(self) -> None:
        """Raise if the trainer cannot write one number per response and key."""
        if not self.token_scores:
            return
        if self.per_turn or self.rubrics:
            setting = "per_turn" if self.per_turn else "rubrics"
            raise ConfigurationError(
                f"{REWARDS}.token_scores=True writes one number per response, so it does not support "
                f"{listed(self.per_turn or self.rubrics or ())} of {REWARDS}.{setting}. Set "
                f"{REWARDS}.token_scores=False."
            )
        if not self.keys:
            raise ConfigurationError(
                f"{REWARDS}.token_scores=True has no effect without {REWARDS}.keys. Set '{REWARDS}.keys=[...]', or "
                f"remove {REWARDS}.token_scores."
            )

    def _check_accuracy(self) -> None:
        """Raise if the accuracy is a rubric, or if its bounds are not a lower and an upper bound."""
        rubrics = self.rubrics or ()
        if self.accuracy_key in rubrics:
            raise ConfigurationError(
                f"{REWARDS}.accuracy_key={self.accuracy_key!r} is a rubric, but the accuracy must be one number per "
                f"response. Set {REWARDS}.accuracy_key to another reward."
            )
        bounds = self.accuracy_between
        if bounds is None:
            return
        are_ordered = len(bounds) == 2 and bounds[0] < bounds[1]
        if not are_ordered:
            raise ConfigurationError(
                f"{REWARDS}.accuracy_between must be a lower bound and a larger upper bound, found {list(bounds)}. Set "
                f"'{REWARDS}.accuracy_between=[0.05,0.95]', for example."
            )

    def accuracy_in(self, names: Container[str], *, score: str = SCORE) -> str:
        """Return the component that is used as the accuracy if components of these names exist.

        >>> RewardsSettings().accuracy_in(["acc", "format"]), RewardsSettings().accuracy_in(["format"])
        ('acc', 'score')
        """
        only = self.keys[0] if self.keys and len(self.keys) == 1 else score
        return self.accuracy_key or (ACCURACY if ACCURACY in names else only)


@dataclass(frozen=True)
class VerlExtSettings:
    """`algorithm.verl_ext`: dumps of advantages, and a faster actor update."""

    dump_dir: str | None = None
    """Folder for one Parquet file per update, with the rewards and the advantage of every trajectory. null: no files.
    Estimators of verl also need `rewards.keys`."""
    skip_zero_advantage: bool = False
    """Whether the actor update skips responses whose advantages are all 0."""
    share_prompts: bool = False
    """Whether log-probabilities and the actor update compute each prompt once instead of once per response."""


COMMON: Mapping[str, type[Any]] = {"rewards": RewardsSettings, "verl_ext": VerlExtSettings}
"""The sections that apply to all estimators."""


@dataclass(frozen=True)
class Settings:
    """The settings that an estimator reads from the configuration."""

    rewards: RewardsSettings = field(default_factory=RewardsSettings)
    """The section `algorithm.rewards`."""
    verl_ext: VerlExtSettings = field(default_factory=VerlExtSettings)
    """The section `algorithm.verl_ext`."""
    norm_by_std: bool = True
    """The value of verl's `algorithm.norm_adv_by_std_in_grpo`."""
    kl_in_reward: bool = False
    """The value of verl's `algorithm.use_kl_in_reward`."""
    loss_agg_mode: str = "token-mean"
    """The value of verl's `actor_rollout_ref.actor.loss_agg_mode`."""
    given: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The entries of `algorithm` that are set, as JSON data. `of` reads an estimator's section from them.

    The entries are not compared, because a default may be set explicitly. An estimator's settings are in its chain."""
    _parsed: dict[tuple[str, type[Any]], Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The sections that `of` has read."""

    @classmethod
    def parse(cls, algorithm: Mapping[str, Any], *, loss_agg_mode: str = "token-mean") -> Settings:
        """Read the `algorithm` section of a configuration from plain data.

        >>> Settings.parse({"rewards": {"keys": ["format"]}}).rewards.keys
        ('format',)
        """
        given = entries_set(algorithm)
        return cls(
            rewards=parse_dataclass(RewardsSettings, _with_verl_names(given), "algorithm.rewards"),
            verl_ext=parse_dataclass(VerlExtSettings, given.get("verl_ext"), "algorithm.verl_ext"),
            norm_by_std=_verl_boolean(given, "norm_adv_by_std_in_grpo", default=cls.norm_by_std),
            kl_in_reward=_verl_boolean(given, "use_kl_in_reward", default=cls.kl_in_reward),
            loss_agg_mode=loss_agg_mode,
            given=given,
        )

    def of(self, name: str, kind: type[T]) -> T:
        """Return the section of an estimator as its dataclass `kind`, with defaults for settings that are not set.

        >>> from verl_ext.methods.gdpo import GdpoSettings
        >>> Settings.parse({"gdpo": {"whiten": "token"}}).of("gdpo", GdpoSettings).whiten
        'token'
        """
        if (name, kind) not in self._parsed:
            self._parsed[name, kind] = parse_dataclass(kind, self.given.get(name), f"algorithm.{name}")
        section: T = self._parsed[name, kind]
        return section


def entries_set(algorithm: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `algorithm` that are set, in the format of `Settings.given`."""
    return {name: _as_json(value) for name, value in algorithm.items() if value is not None}


def _as_json(value: Any) -> Any:
    """Return the value as JSON data."""
    if isinstance(value, Mapping):
        return {str(key): _as_json(item) for key, item in value.items()}
    return [_as_json(item) for item in value] if isinstance(value, list | tuple) else value


def _with_verl_names(given: Mapping[str, Any]) -> object:
    """Return the section `rewards`, in which verl's `gdpo_reward_keys` and `gdpo_reward_weights` are included."""
    rewards = given.get("rewards")
    theirs = {ours: given[name] for ours, name in VERL_NAMES.items() if name in given}
    if not theirs or not isinstance(rewards, Mapping | None):
        return rewards
    for ours, value in theirs.items():
        if rewards and rewards.get(ours) is not None:
            raise ConfigurationError(
                f"algorithm.rewards.{ours}={rewards[ours]} and algorithm.{VERL_NAMES[ours]}={value} are both set, but "
                "they mean the same. Remove one of the two."
            )
    return {**(rewards or {}), **theirs}


def _verl_boolean(given: Mapping[str, Any], name: str, *, default: bool) -> bool:
    return bool(parse_value(f"algorithm.{name}", given.get(name, default), bool))
