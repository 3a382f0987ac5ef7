r"""`adv_estimator=compose`: an estimator written as a list of steps in the configuration.

    algorithm:
      adv_estimator: compose
      rewards: {keys: [correctness, format]}
      compose:
        steps: [centre, scale_by_mad, weigh_and_sum, whiten, {step: weigh_by_difficulty, dqw_temp: 1.0}]

A list may name the steps of the named estimators, which `python -m verl_ext show NAME` prints as such lists, and steps
of your own as `package.module:Class`. These need no registration, but must be importable where verl's trainer runs.
Names, settings and order are checked when the list is read.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from verl_ext.core.batch import Batch
from verl_ext.core.chain import SUM, Chain, Step
from verl_ext.core.history import WeighByHistory
from verl_ext.core.state import plain_state
from verl_ext.core.steps import (
    Balance,
    Centre,
    Condition,
    ScaleByMad,
    ScaleByStd,
    WeighAndSum,
    WeighByDifficulty,
    Whiten,
)
from verl_ext.core.typed import make
from verl_ext.errors import CheckpointError, ConfigurationError, unknown
from verl_ext.registry import estimator
from verl_ext.settings import Settings

WHERE = "algorithm.compose.steps"
STEPS: Mapping[str, type[Step]] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            Condition,
            Centre,
            ScaleByStd,
            ScaleByMad,
            WeighAndSum,
            Whiten,
            Balance,
            WeighByDifficulty,
            WeighByHistory,
        )
    }
)
"""The steps that a list may name."""
DIVIDING = frozenset({ScaleByStd.name, ScaleByMad.name})


@dataclass(frozen=True)
class ComposeSettings:
    """`algorithm.compose`."""

    steps: tuple[Any, ...] | None = None
    """In order, each a name, or `{step: name, setting: value}`; `package.module:Class` is a step of your own."""

    def __post_init__(self) -> None:
        for position, item in enumerate(self.steps or ()):
            name = item.get("step") if isinstance(item, Mapping) else item
            if not (isinstance(name, str) and name):
                raise ConfigurationError(
                    f"{WHERE}[{position}] must be a step's name, or {{step: name, setting: value}}, found "
                    f"{dict(item) if isinstance(item, Mapping) else item!r}"
                )


@estimator(section=ComposeSettings)
def compose(settings: Settings) -> Chain:
    """The chain that the list describes.

    >>> chain = compose(Settings.parse({"compose": {"steps": ["weigh_and_sum", "centre"]}}))
    >>> chain(Batch.of([[1], [0]], ["a", "a"])).advantages
    array([ 0.5, -0.5])
    """
    listed = settings.of(ComposeSettings).steps
    if not listed:
        raise ConfigurationError(
            f"algorithm.adv_estimator=compose needs a list of steps: set '{WHERE}=[...]', for example "
            "'[weigh_and_sum,centre,scale_by_std]'; `python -m verl_ext show gdpo` prints the list of gdpo"
        )
    steps = tuple(_step(item, f"{WHERE}[{at}]", settings) for at, item in enumerate(listed))
    _check_order(steps)
    chain = Chain(steps)
    _check_against(chain, settings)
    return chain


def describe(chain: Chain) -> list[str | dict[str, Any]]:
    """The list that describes a chain; settings at their defaults are left out.

    >>> describe(Chain((WeighAndSum(), Centre(), ScaleByMad(0.5))))
    ['weigh_and_sum', 'centre', {'step': 'scale_by_mad', 'epsilon': 0.5}]
    """
    named = [(_name_in_a_list(step), settings_of(step)) for step in chain.steps]
    return [{"step": name, **given} if given else name for name, given in named]


def _name_in_a_list(step: Step) -> str:
    """The name of a step in `STEPS`, the module and class of any other."""
    kind = type(step)
    return step.name if STEPS.get(step.name) is kind else f"{kind.__module__}:{kind.__qualname__}"


def settings_of(step: Step, *, defaults: bool = False) -> dict[str, Any]:
    """The settings of a step as plain data, without the weights, which are `algorithm.rewards.weights`."""
    if not dataclasses.is_dataclass(step):
        return {}
    settings = {}
    for item in dataclasses.fields(step):
        value = getattr(step, item.name)
        default = item.default_factory() if item.default_factory is not dataclasses.MISSING else item.default
        if (defaults or value != default) and (step.name, item.name) != (SUM, "weights"):
            settings[item.name] = plain(value)
    return settings


def try_out(chain: Chain, settings: Settings) -> str | None:
    """Run the chain on a made-up batch, because a step of the user may fail; return what is wrong, or None."""
    keys = settings.rewards.keys or ("score",)
    draw = np.random.default_rng(0)
    batch = Batch.of(
        draw.integers(0, 2, (12, len(keys))).astype(np.float64),
        list("aaaabbbbcccc"),
        keys=keys,
        lengths=draw.integers(1, 9, 12).astype(np.float64),
        accuracy=draw.integers(0, 2, 12).astype(np.float64) if chain.needs_accuracy else None,
    )
    values, state = batch.rewards, chain.init()
    for step in chain.steps:
        where = f"step {step.name!r} ({type(step).__module__}:{type(step).__qualname__}), tried on a made-up batch of "
        where += f"{values.shape[0]} responses and {values.shape[1]} values each"
        values.setflags(write=False)  # in a run they may be the rewards of the batch, which a step must not change
        try:
            update = step.update(values, batch, state.get(step.name))
            new = update.values
            for kept in (state.get(step.name), update.state):
                plain_state({} if kept is None else {step.name: kept})
        except CheckpointError as error:
            return f"{where}: {error}"
        except Exception as error:  # noqa: BLE001 - user code may raise anything
            return f"{where}, raises {type(error).__name__}: {error}"
        if not isinstance(new, np.ndarray) or new.ndim != 2 or len(new) != len(values):
            what = f"values of shape {new.shape}" if isinstance(new, np.ndarray) else type(new).__name__
            return f"{where}, returns {what}, expected an array with one row per response: [{len(values)}, values]"
        if not np.isfinite(new).all():
            return f"{where}, returns values that are not finite"
        values = new
    if values.shape[1] != 1:
        return f"{WHERE} returns {values.shape[1]} values per response: add weigh_and_sum"
    return None


def _step(item: str | Mapping[str, Any], where: str, settings: Settings) -> Step:
    given = {} if isinstance(item, str) else {key: value for key, value in item.items() if key != "step"}
    name = item if isinstance(item, str) else str(item["step"])
    kind = _own(name, where) if ":" in name else STEPS.get(name)
    if kind is None:
        raise ConfigurationError(
            f"{where}: {unknown('step', name, STEPS)}, or package.module:Class for one of your own"
        )
    if kind is WeighAndSum:
        if given:
            raise ConfigurationError(f"{where}: {name} has no settings here: set algorithm.rewards.weights")
        return WeighAndSum(settings.rewards.weights)
    try:
        step: Step = make(kind, given, f"{where} ({name})")
        step.init()
    except ConfigurationError:
        raise
    except Exception as error:  # user code may raise anything
        raise ConfigurationError(f"{where}: {name} cannot be created: {type(error).__name__}: {error}") from error
    try:
        complaint = kind.check(given)
    except Exception as error:  # user code may raise anything
        raise ConfigurationError(f"{where}: `check` of {name} raises {type(error).__name__}: {error}") from error
    if complaint:
        raise ConfigurationError(f"{where} ({name}): {complaint}")
    return step


def _own(path: str, where: str) -> type[Step]:
    """Import the class of a user's step, and check it."""
    module, _, name = path.partition(":")
    if not module or not name:
        raise ConfigurationError(f"{where}: {path!r} is not a step: write package.module:Class")
    try:
        home = importlib.import_module(module)
    except ImportError as error:
        raise ConfigurationError(
            f"{where}: {module!r} of {path!r} cannot be imported: {error}; install its package, or put it on "
            "PYTHONPATH, in the driver and on the node where verl's trainer runs"
        ) from error
    except Exception as error:  # a module may raise anything
        raise ConfigurationError(
            f"{where}: {module!r} of {path!r} raises {type(error).__name__} when it is imported: {error}"
        ) from error
    kind: Any = getattr(home, name, None)
    if kind is None:
        near = [key for key, value in vars(home).items() if isinstance(value, type) and issubclass(value, Step)]
        raise ConfigurationError(f"{where}: {unknown(f'step of {module}', name, near)}")
    if not (isinstance(kind, type) and issubclass(kind, Step) and isinstance(getattr(kind, "name", None), str)):
        raise ConfigurationError(
            f"{where}: {path!r} is not a step: write a frozen dataclass that inherits verl_ext.Step, with a "
            "string `name` and `apply(self, values, batch)`"
        )
    own: type[Step] = kind
    if own.name in STEPS:
        raise ConfigurationError(f"{where}: verl_ext has a step {own.name!r} already: rename {path!r}")
    return own


def _check_order(steps: Sequence[Step]) -> None:
    """Raise if a step makes no sense at its place in the list, or undoes another one."""
    passed: set[str] = set()
    side: set[str] = set()  # steps since the start of the list, or since the sum
    for at, step in enumerate(steps):
        where = f"{WHERE}[{at}]"
        for needed, reason in step.after.items():
            if needed not in passed:
                raise ConfigurationError(f"{where}: {step.name} must come after {needed}, because {reason}")
        for wrong, reason in step.not_after.items():
            if wrong in passed:
                raise ConfigurationError(f"{where}: {step.name} must not come after {wrong}, because {reason}")
        done = "a division by the group's spread" if step.name in DIVIDING else step.name
        if done in side and step.name in STEPS:
            raise ConfigurationError(
                f"{where}: {step.name} must not come after {done}: the second one has no meaning; remove one"
            )
        side = set() if step.name == SUM else side | {done}
        passed |= {step.name, *step.stands_for}
    if SUM not in passed:
        raise ConfigurationError(
            f"{WHERE} has no {SUM}: put it first to work on the total, or later to apply steps to each reward "
            "separately before"
        )


def _check_against(chain: Chain, settings: Settings) -> None:
    """Raise if the list contradicts settings of verl."""
    names = {step.name for step in chain.steps}
    if settings.kl_in_reward and chain.per_reward:
        raise ConfigurationError(
            "algorithm.use_kl_in_reward=True does not work with this list: KL is added to one combined reward, and it "
            f"works on each reward separately before {SUM}; set algorithm.use_kl_in_reward=False and, to keep a KL "
            "term, actor_rollout_ref.actor.use_kl_loss=True"
        )
    dividing = sorted(names & DIVIDING)
    if dividing and not settings.norm_by_std:
        raise ConfigurationError(
            f"algorithm.norm_adv_by_std_in_grpo=False contradicts {dividing[0]} in {WHERE}: remove the step from the "
            "list, or set norm_adv_by_std_in_grpo=True"
        )


def plain(value: Any) -> Any:
    """A setting as plain data."""
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    return list(value) if isinstance(value, tuple) else value
