"""Estimators that are a list of steps: one row each, whose name is valid wherever an estimator's is.

verl's `algorithm.norm_adv_by_std_in_grpo=False` leaves `scale_by_std` out of them. It is refused for `corrgrpo`, `dvao`
and `liteppo`, which have another division (`divides_by_std`).

To add one write a row here. A step that does not exist yet is a class in `verl_ext/core/`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from verl_ext.core import many, steps, totals
from verl_ext.core.chain import Step


@dataclass(frozen=True)
class Row:
    """An estimator: its paper, one line, and its steps, whose weights are those of the run."""

    paper: str
    line: str
    steps: tuple[Step, ...]
    settings: tuple[str, ...] = ()
    """Settings of its steps that are those of `algorithm.<name>`, with the steps' values as defaults.

    One that has no default in the step itself must be set."""


_STD = steps.ScaleByStd(1e-6)
_WHITEN = totals.Whiten("token")
_GRPO = (steps.WeightedSum(), steps.Center(), _STD)

ROWS: Mapping[str, Row] = {
    "corrgrpo": Row(
        "CorrGRPO, arXiv 2609.36820",
        "the centered sum of the rewards, divided by their correlations",
        (steps.Center(), many.ScaleByCorrelation(), steps.WeightedSum()),
    ),
    "dara": Row(
        "DARA, arXiv 2610.00574",
        "gdpo, in which a reward that varies in few groups counts more",
        (steps.Center(), _STD, many.WeightByDensity(), steps.WeightedSum(), _WHITEN),
        ("of", "over"),
    ),
    "dvao": Row(
        "DVAO, arXiv 2605.25604",
        "the centered sum of the rewards, divided by the sum of their spreads",
        (steps.Center(), many.ScaleByCommonStd(), steps.WeightedSum()),
    ),
    "fgrpo": Row(
        "F-GRPO, arXiv 2602.06717",
        "grpo, in which prompts that are mostly solved count less",
        (*_GRPO, totals.WeightByFocal()),
        ("gamma",),
    ),
    "gd2po": Row(
        "GD2PO, arXiv 2606.16771",
        "gdpo without the responses whose rewards conflict",
        (steps.Center(), _STD, steps.DropConflicts(), steps.WeightedSum(), _WHITEN),
        ("conflict", "tau", "over"),
    ),
    "grpo": Row("GRPO, arXiv 2402.03300", "the base of hadw; `adv_estimator=grpo` is verl's own", _GRPO),
    "liteppo": Row(
        "Lite PPO, arXiv 2508.08221",
        "the mean of the group, the std of the batch",
        (steps.WeightedSum(), steps.DivideByBatchStd(1e-6), steps.Center()),
    ),
    "maxrl": Row(
        "MaxRL, arXiv 2602.02710",
        "the centered reward, divided by the mean of the group",
        (steps.WeightedSum(), steps.DivideByMean(), steps.Center()),
        ("epsilon",),
    ),
    "rvpo": Row(
        "RVPO, arXiv 2605.05750",
        "gdpo with a soft minimum of the rewards in the place of their sum",
        (steps.Center(), _STD, many.SoftMin(), _WHITEN),
        ("k",),
    ),
    "saw": Row(
        "SAW, arXiv 2606.07705",
        "gdpo with weights that follow the batch: a reward that varies much beside its mean counts more",
        (steps.Center(), _STD, steps.WeightByVariation(min_values=()), steps.WeightedSum(), _WHITEN),
        ("min_values",),
    ),
    "weighted_grpo": Row("GRPO, arXiv 2402.03300", "grpo on the weighted sum of the named rewards", _GRPO),
}
"""By name."""
