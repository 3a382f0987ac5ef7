"""The settings under `algorithm:` in verl's YAML, one frozen dataclass a section; every default stands here once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from verl_ext.core.typed import LARGEST_WEIGHT, boolean, choice, names, number, numbers, positive, section
from verl_ext.errors import ConfigurationError

WHITEN = ("auto", "sequence", "token", "none")
SCALE = ("std", "mad", "none")
BALANCE = ("auto", "token", "sequence", "none")
ANCHOR = ("soft", "window", "fixed")
ANY_REWARD = "any_reward"
"""The metric of `algorithm.filter_groups` that keeps a group while any reward varies."""
BASE = ("grpo", "drgrpo", "gdpo", "dgpo")
VERL_NAMES: Mapping[str, str] = MappingProxyType({"keys": "gdpo_reward_keys", "weights": "gdpo_reward_weights"})
"""Entries of `algorithm.rewards`, and verl's own entries of `algorithm` that mean the same."""


@dataclass(frozen=True)
class RewardsSettings:
    """`algorithm.rewards`: which components of the reward take part, and with what weight."""

    keys: tuple[str, ...] | None = None
    """Components by name; None: the score alone."""
    weights: tuple[float, ...] | None = None
    """One a key; None: 1 each."""
    token_scores: bool = False
    """Whether the trainer writes `token_level_scores_<key>` fields into the batch."""

    def __post_init__(self) -> None:
        if self.keys is not None:
            object.__setattr__(self, "keys", names("algorithm.rewards.keys", self.keys))
        if self.weights is not None:
            object.__setattr__(self, "weights", numbers("algorithm.rewards.weights", self.weights))
        boolean("algorithm.rewards.token_scores", self.token_scores)
        if self.weights is not None and len(self.weights) != len(self.keys or ()):
            raise ConfigurationError(
                f"{len(self.weights)} reward weights for {len(self.keys or ())} reward keys: "
                f"algorithm.rewards.weights={list(self.weights)}, algorithm.rewards.keys={list(self.keys or ())}; "
                "give one weight a key"
            )
        if self.token_scores and not self.keys:
            raise ConfigurationError("algorithm.rewards.token_scores=True needs algorithm.rewards.keys=[...]")


@dataclass(frozen=True)
class GdpoSettings:
    """`algorithm.gdpo`."""

    whiten: str = "auto"
    """`sequence` (the paper), `token` (NVIDIA's verl fork and verl itself), `none`; `auto` is `token` where the rewards
    are named by verl's own `algorithm.gdpo_reward_keys`, else `sequence`."""
    scale: str = "std"
    """Divisor of each reward in its group: `std`, `mad` (mean absolute deviation), `none`."""
    epsilon: float = 1e-6
    """Added to the divisors; above 0."""
    conditions: Mapping[str, Mapping[Any, Any]] | None = None
    """`{easy: {on: hard, at_least: 1.0}}`: `easy` counts only where `hard` reached the threshold."""

    def __post_init__(self) -> None:
        choice("algorithm.gdpo.whiten", self.whiten, WHITEN)
        choice("algorithm.gdpo.scale", self.scale, SCALE)
        number("algorithm.gdpo.epsilon", self.epsilon, above=0.0)
        where = "algorithm.gdpo.conditions"
        given = {} if self.conditions is None else self.conditions
        if not isinstance(given, Mapping):
            raise ConfigurationError(f"{where} must map a reward to {{on: reward, at_least: number}}")
        # `on` is a boolean in YAML 1.1, which is how a file of the user's is read.
        conditions = {
            str(key): {"on" if name is True else name: value for name, value in needed.items()}
            if isinstance(needed, Mapping)
            else needed
            for key, needed in given.items()
        }
        for key, needed in conditions.items():
            if not isinstance(needed, Mapping) or set(needed) != {"on", "at_least"}:
                raise ConfigurationError(f"{where}.{key} must be {{on: reward, at_least: number}}, found {needed!r}")
            if not isinstance(needed["on"], str) or needed["on"] == key:
                raise ConfigurationError(f"{where}.{key}.on must name another reward, found {needed['on']!r}")
            number(f"{where}.{key}.at_least", needed["at_least"])
        frozen = {key: MappingProxyType(needed) for key, needed in conditions.items()}
        object.__setattr__(self, "conditions", MappingProxyType(frozen))


@dataclass(frozen=True)
class DgpoSettings:
    """`algorithm.dgpo`."""

    dgae: bool = True
    """Divide by the mean absolute deviation; False: by the std, as GRPO."""
    dqw: bool = True
    """Weigh groups by difficulty."""
    dqw_temp: float = 2.0
    """Temperature of that weighting."""
    balance: str = "auto"
    """`token`, `sequence`, `none`; `auto` follows the actor's `loss_agg_mode`."""
    accuracy_key: str | None = None
    """Component that is the accuracy; None: `acc` if the scorer returns it, else the score."""
    accuracy_threshold: float | None = None
    """Values above it count as right; None: the values are an accuracy in [0, 1] already."""

    def __post_init__(self) -> None:
        boolean("algorithm.dgpo.dgae", self.dgae)
        boolean("algorithm.dgpo.dqw", self.dqw)
        number("algorithm.dgpo.dqw_temp", self.dqw_temp, above=0.0)
        choice("algorithm.dgpo.balance", self.balance, BALANCE)
        _accuracy("algorithm.dgpo", self.accuracy_key, self.accuracy_threshold)


@dataclass(frozen=True)
class HadwSettings:
    """`algorithm.hadw`. A setting which the chosen anchor does not use must stay null."""

    base: str = "grpo"
    """The advantage that is reweighted."""
    anchor: str = "soft"
    """How the model's capability is estimated: `soft`, `window`, `fixed`."""
    lambda_scale: float = 1.3
    history_window: int | None = None
    """Batches remembered, by `soft` and `window`; null: 10."""
    eta: float | None = None
    """Factor of sigma in the step of the `soft` anchor; null: 0.1."""
    eta_min: float | None = None
    """Added to the step of the `soft` anchor; null: 0.05; with 0, the paper's formula, the anchor can stand still."""
    fixed_anchor: float | None = None
    """The anchor of `anchor=fixed`, in [0, 1]."""
    accuracy_key: str | None = None
    accuracy_threshold: float | None = None

    def __post_init__(self) -> None:
        where = "algorithm.hadw"
        choice(f"{where}.base", self.base, BASE)
        choice(f"{where}.anchor", self.anchor, ANCHOR)
        number(f"{where}.lambda_scale", self.lambda_scale, above=0.0, high=LARGEST_WEIGHT)
        _accuracy(where, self.accuracy_key, self.accuracy_threshold)
        used = {"soft": {"history_window", "eta", "eta_min"}, "window": {"history_window"}, "fixed": {"fixed_anchor"}}
        for name in ("history_window", "eta", "eta_min", "fixed_anchor"):
            value = getattr(self, name)
            if value is None:
                continue
            if name not in used[self.anchor]:
                homes = [anchor for anchor, names in used.items() if name in names]
                raise ConfigurationError(
                    f"{where}.{name}={value} has no effect with {where}.anchor={self.anchor}: "
                    f"remove it, or set {' or '.join(f'{where}.anchor={home}' for home in homes)}"
                )
            if name == "history_window":
                positive(f"{where}.{name}", value)
            else:
                number(f"{where}.{name}", value, low=0.0, high=1.0)
        if self.anchor == "fixed" and self.fixed_anchor is None:
            raise ConfigurationError(f"{where}.anchor=fixed needs {where}.fixed_anchor, a number in [0, 1]")


@dataclass(frozen=True)
class DrgrpoSettings:
    """`algorithm.drgrpo`."""

    check_loss: bool = True
    """Refuse to start unless the actor's loss is Dr. GRPO's: token sums divided by a constant."""

    def __post_init__(self) -> None:
        boolean("algorithm.drgrpo.check_loss", self.check_loss)


@dataclass(frozen=True)
class ComposeSettings:
    """`algorithm.compose`: an estimator as a list of steps."""

    steps: tuple[str | Mapping[str, Any], ...] | None = None
    """In order, each a name, or `{step: name, setting: value}`; `package.module:Class` is a step of one's own."""
    accuracy_key: str | None = None
    """As `dgpo.accuracy_key`."""
    accuracy_threshold: float | None = None

    def __post_init__(self) -> None:
        where = "algorithm.compose"
        _accuracy(where, self.accuracy_key, self.accuracy_threshold)
        if self.steps is None:
            return
        if isinstance(self.steps, str | Mapping) or not isinstance(self.steps, Sequence):
            raise ConfigurationError(
                f"{where}.steps must be a list of steps, found {self.steps!r}: "
                f"write {where}.steps=[weigh_and_sum,centre]"
            )
        for position, item in enumerate(self.steps):
            name = item.get("step") if isinstance(item, Mapping) else item
            if not (isinstance(name, str) and name):
                raise ConfigurationError(
                    f"{where}.steps[{position}] must be a step's name, or {{step: name, setting: value}}, found "
                    f"{dict(item) if isinstance(item, Mapping) else item!r}"
                )
        object.__setattr__(self, "steps", tuple(self.steps))


@dataclass(frozen=True)
class VerlExtSettings:
    """`algorithm.verl_ext`: what is written down about a run, nothing unless asked for, and the check of its nodes."""

    dump_dir: str | None = None
    """Folder for a parquet file an update, with the rewards, group statistics and advantage of every trajectory."""
    dump_every: int = 1
    """Steps from one file to the next."""
    dump_limit_mb: float = 200.0
    """Size of the folder's files together; the oldest go first."""
    check_nodes: bool = True
    """Guard: before training, every node of the Ray cluster must have this package and verl in the driver's version."""
    lock_folders: bool = True
    """Guard: a second run in the same `default_local_dir` or `dump_dir` is refused."""
    repair_tracker: bool = True
    """Guard: on resume, a `latest_checkpointed_iteration.txt` that a killed run left empty is repaired."""
    watch_rollouts: bool = True
    """Guard: a run whose prompts fail without end or whose workers died is ended; a stalled one logs a warning."""

    def __post_init__(self) -> None:
        where = "algorithm.verl_ext"
        for name in ("check_nodes", "lock_folders", "repair_tracker", "watch_rollouts"):
            boolean(f"{where}.{name}", getattr(self, name))
        if self.dump_dir is not None and not (isinstance(self.dump_dir, str) and self.dump_dir):
            raise ConfigurationError(f"{where}.dump_dir must be a folder, found {self.dump_dir!r}")
        positive(f"{where}.dump_every", self.dump_every)
        number(f"{where}.dump_limit_mb", self.dump_limit_mb, above=0.0)
        changed = [name for name in ("dump_every", "dump_limit_mb") if getattr(self, name) != getattr(type(self), name)]
        if self.dump_dir is None and changed:
            raise ConfigurationError(
                f"{where}.{changed[0]} has no effect without {where}.dump_dir: set it, or remove it"
            )


SECTIONS: Mapping[str, type[Any]] = MappingProxyType(
    {
        "rewards": RewardsSettings,
        "gdpo": GdpoSettings,
        "dgpo": DgpoSettings,
        "hadw": HadwSettings,
        "drgrpo": DrgrpoSettings,
        "compose": ComposeSettings,
        "verl_ext": VerlExtSettings,
    }
)


@dataclass(frozen=True)
class Settings:
    """All that an estimator reads from the configuration."""

    rewards: RewardsSettings = field(default_factory=RewardsSettings)
    gdpo: GdpoSettings = field(default_factory=GdpoSettings)
    dgpo: DgpoSettings = field(default_factory=DgpoSettings)
    hadw: HadwSettings = field(default_factory=HadwSettings)
    drgrpo: DrgrpoSettings = field(default_factory=DrgrpoSettings)
    compose: ComposeSettings = field(default_factory=ComposeSettings)
    verl_ext: VerlExtSettings = field(default_factory=VerlExtSettings)
    norm_by_std: bool = True
    """verl's `algorithm.norm_adv_by_std_in_grpo`."""
    kl_in_reward: bool = False
    """verl's `algorithm.use_kl_in_reward`."""
    loss_agg_mode: str = "token-mean"
    """verl's `actor_rollout_ref.actor.loss_agg_mode`."""
    verl_keys: bool = False
    """Whether the rewards are named by verl's own `algorithm.gdpo_reward_keys`."""

    @classmethod
    def parse(cls, algorithm: Mapping[str, Any], *, loss_agg_mode: str = "token-mean") -> Settings:
        """Read the `algorithm` section of a configuration, given as plain data.

        >>> Settings.parse({"gdpo": {"whiten": "token"}}).gdpo.whiten
        'token'
        """
        found = {name: algorithm.get(name) for name in SECTIONS} | {"rewards": _with_verl_names(algorithm)}
        return cls(
            **{name: section(kind, found[name], f"algorithm.{name}") for name, kind in SECTIONS.items()},
            norm_by_std=_verl_boolean(algorithm, "norm_adv_by_std_in_grpo", default=cls.norm_by_std),
            kl_in_reward=_verl_boolean(algorithm, "use_kl_in_reward", default=cls.kl_in_reward),
            loss_agg_mode=loss_agg_mode,
            verl_keys=algorithm.get(VERL_NAMES["keys"]) is not None,
        )


def _with_verl_names(algorithm: Mapping[str, Any]) -> object:
    """Let verl's own `gdpo_reward_keys` and `gdpo_reward_weights` mean the same as `rewards.keys` and `.weights`."""
    rewards = algorithm.get("rewards")
    given = {ours: algorithm[name] for ours, name in VERL_NAMES.items() if algorithm.get(name) is not None}
    if not given or not (rewards is None or isinstance(rewards, Mapping)):
        return rewards
    for ours, value in given.items():
        if rewards and rewards.get(ours) is not None:
            raise ConfigurationError(
                f"algorithm.rewards.{ours}={rewards[ours]} and algorithm.{VERL_NAMES[ours]}={value} are both set: "
                "they mean the same, remove one"
            )
    return {**(rewards or {}), **given}


def _verl_boolean(algorithm: Mapping[str, Any], name: str, *, default: bool) -> bool:
    found = algorithm.get(name)
    if found is None:
        return default
    boolean(f"algorithm.{name}", found)
    return bool(found)


def _accuracy(where: str, key: object, threshold: object) -> None:
    if key is not None and not (isinstance(key, str) and key):
        raise ConfigurationError(f"{where}.accuracy_key must name a reward component, found {key!r}")
    if threshold is not None:
        number(f"{where}.accuracy_threshold", threshold)
