"""Methods that are a list of built-in steps.

To add a method, add a `Method` to `SIMPLE_METHODS`. Its settings, if it has any, are a frozen dataclass with a
description below each field, and a function maps the settings to the steps. To add a step, write a class in
`verl_ext/core/`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from verl_ext.core.chain import Step
from verl_ext.core.cross_reward import (
    DropConflicts,
    ScaleByCommonStd,
    ScaleByCorrelation,
    SoftMin,
    WeightByDensity,
    WeightByVariation,
)
from verl_ext.core.post_sum import WeightByFocal
from verl_ext.core.schema import bounded
from verl_ext.core.steps import (
    Center,
    DivideByBatchStd,
    DivideByMean,
    ScaleByStd,
    WeightedSum,
    Whiten,
)
from verl_ext.methods.method import Method

_STD = ScaleByStd(1e-6)
_GRPO = (WeightedSum(), Center(), _STD)

SIMPLE_METHODS: dict[str, Method] = {}
"""The methods of this file by name."""

SIMPLE_METHODS["corrgrpo"] = Method.from_steps(
    "CorrGRPO, arXiv 2609.36820",
    "sum of the centered rewards, divided by the square root of their summed correlations",
    (Center(), ScaleByCorrelation(), WeightedSum()),
)


@dataclass(frozen=True)
class DaraSettings:
    """`algorithm.dara`."""

    variant: Literal["symmetric", "positive"] = "symmetric"
    """Values that get a weight: `symmetric` weights all values, `positive` only values above 0."""
    whiten: Literal["token", "sequence"] = "token"
    """Unit of the final whitening: `token`, or `sequence` (each response counts once)."""


def _dara(section: DaraSettings) -> Sequence[Step]:
    return Center(), _STD, WeightByDensity(section.variant), WeightedSum(), Whiten(section.whiten)


SIMPLE_METHODS["dara"] = Method.from_steps(
    "DARA, arXiv 2610.00574",
    "gdpo with larger weights for rewards that vary in few groups",
    _dara,
    DaraSettings,
)

SIMPLE_METHODS["dvao"] = Method.from_steps(
    "DVAO, arXiv 2605.25604",
    "sum of the centered rewards, divided by the weighted sum of their standard deviations in the group",
    (Center(), ScaleByCommonStd(), WeightedSum()),
)


@dataclass(frozen=True)
class FgrpoSettings:
    """`algorithm.fgrpo`."""

    gamma: float = bounded(1.0, low=0.0)
    """Exponent of the weight `(1 - accuracy)^gamma`. With 0, every prompt has weight 1."""


def _fgrpo(section: FgrpoSettings) -> Sequence[Step]:
    return *_GRPO, WeightByFocal(section.gamma)


SIMPLE_METHODS["fgrpo"] = Method.from_steps(
    "F-GRPO, arXiv 2602.06717",
    "grpo with smaller weights for prompts with high mean accuracy",
    _fgrpo,
    FgrpoSettings,
)


@dataclass(frozen=True)
class Gd2poSettings:
    """`algorithm.gd2po`."""

    conflict: Literal["hard", "snr"] = "hard"
    """Responses to drop: `hard` drops every response with a conflict, `snr` only those whose rewards nearly cancel."""
    tau: float = bounded(0.2, low=0.0, high=1.0, only_with={"conflict": ("snr",)})
    """Threshold of `conflict=snr`: responses with a smaller ratio are dropped. The authors use 0.2, 0.5 and 0.8."""
    whiten: Literal["token", "sequence"] = "token"
    """Unit of the final whitening: `token`, or `sequence` (each response counts once)."""


def _gd2po(section: Gd2poSettings) -> Sequence[Step]:
    return Center(), _STD, DropConflicts(section.conflict, section.tau), WeightedSum(), Whiten(section.whiten)


SIMPLE_METHODS["gd2po"] = Method.from_steps(
    "GD2PO, arXiv 2606.16771",
    "gdpo without the responses whose rewards conflict",
    _gd2po,
    Gd2poSettings,
)

SIMPLE_METHODS["grpo"] = Method.from_steps(
    "GRPO, arXiv 2402.03300",
    "grpo as the base of hadw (`adv_estimator=grpo` selects verl's implementation)",
    _GRPO,
)

SIMPLE_METHODS["liteppo"] = Method.from_steps(
    "Lite PPO, arXiv 2508.08221",
    "reward minus the group mean, divided by the standard deviation over the batch",
    (WeightedSum(), DivideByBatchStd(1e-6), Center()),
)


@dataclass(frozen=True)
class MaxrlSettings:
    """`algorithm.maxrl`."""

    epsilon: float = bounded(1e-6, above=0.0)
    """Constant added to the group mean."""


def _maxrl(section: MaxrlSettings) -> Sequence[Step]:
    return WeightedSum(), DivideByMean(section.epsilon), Center()


SIMPLE_METHODS["maxrl"] = Method.from_steps(
    "MaxRL, arXiv 2602.02710",
    "reward minus the group mean, divided by the group mean",
    _maxrl,
    MaxrlSettings,
)


@dataclass(frozen=True)
class RvpoSettings:
    """`algorithm.rvpo`."""

    k: float = bounded(1.0, above=0.0)
    """Sharpness of the soft minimum. A large value gives the minimum of the rewards, a small value their mean."""


def _rvpo(section: RvpoSettings) -> Sequence[Step]:
    return Center(), _STD, SoftMin(section.k), Whiten("token")


SIMPLE_METHODS["rvpo"] = Method.from_steps(
    "RVPO, arXiv 2605.05750",
    "gdpo with a soft minimum of the rewards instead of their sum",
    _rvpo,
    RvpoSettings,
)


@dataclass(frozen=True)
class SawSettings:
    """`algorithm.saw`."""

    min_values: tuple[float, ...]
    """Minimum value of each reward, in the order of `algorithm.rewards.keys`."""


def _saw(section: SawSettings) -> Sequence[Step]:
    return Center(), _STD, WeightByVariation(section.min_values), WeightedSum(), Whiten("token")


SIMPLE_METHODS["saw"] = Method.from_steps(
    "SAW, arXiv 2606.07705",
    "gdpo with weights from each batch: rewards with a larger coefficient of variation get more weight",
    _saw,
    SawSettings,
)

SIMPLE_METHODS["weighted_grpo"] = Method.from_steps(
    "GRPO, arXiv 2402.03300",
    "grpo on the weighted sum of the rewards in algorithm.rewards.keys",
    _GRPO,
)
