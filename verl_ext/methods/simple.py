"""Estimators that are defined as a list of steps, one row each.

With verl's `algorithm.norm_adv_by_std_in_grpo=False` they omit the step `scale_by_std`. `corrgrpo`, `dvao` and
`liteppo` reject that setting, because another step divides by a standard deviation (`divides_by_std`).

To add an estimator, add a row. To add a step, write a class in `verl_ext/core/`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from verl_ext.core import cross_reward, post_sum, steps
from verl_ext.core.chain import Step


@dataclass(frozen=True)
class Row:
    """An estimator: its paper, a one-line summary, and its steps. The weights of the steps are those of the run."""

    paper: str
    line: str
    steps: tuple[Step, ...]
    settings: tuple[str, ...] = ()
    """Settings of its steps that are settings of `algorithm.<name>`, with the values of the steps as defaults.

    A setting without a default in the step must be set."""


_STD = steps.ScaleByStd(1e-6)
_WHITEN = post_sum.Whiten("token")
_GRPO = (steps.WeightedSum(), steps.Center(), _STD)

ROWS: Mapping[str, Row] = {
    "corrgrpo": Row(
        "CorrGRPO, arXiv 2609.36820",
        "sum of the centered rewards, divided by the square root of their summed correlations",
        (steps.Center(), cross_reward.ScaleByCorrelation(), steps.WeightedSum()),
    ),
    "dara": Row(
        "DARA, arXiv 2610.00574",
        "gdpo with larger weights for rewards that vary in few groups",
        (steps.Center(), _STD, cross_reward.WeightByDensity(), steps.WeightedSum(), _WHITEN),
        ("of", "over"),
    ),
    "dvao": Row(
        "DVAO, arXiv 2605.25604",
        "sum of the centered rewards, divided by the weighted sum of their standard deviations in the group",
        (steps.Center(), cross_reward.ScaleByCommonStd(), steps.WeightedSum()),
    ),
    "fgrpo": Row(
        "F-GRPO, arXiv 2602.06717",
        "grpo with smaller weights for prompts with high mean accuracy",
        (*_GRPO, post_sum.WeightByFocal()),
        ("gamma",),
    ),
    "gd2po": Row(
        "GD2PO, arXiv 2606.16771",
        "gdpo without the responses whose rewards conflict",
        (steps.Center(), _STD, steps.DropConflicts(), steps.WeightedSum(), _WHITEN),
        ("conflict", "tau", "over"),
    ),
    "grpo": Row(
        "GRPO, arXiv 2402.03300", "grpo as the base of hadw (`adv_estimator=grpo` selects verl's implementation)", _GRPO
    ),
    "liteppo": Row(
        "Lite PPO, arXiv 2508.08221",
        "reward minus the group mean, divided by the standard deviation over the batch",
        (steps.WeightedSum(), steps.DivideByBatchStd(1e-6), steps.Center()),
    ),
    "maxrl": Row(
        "MaxRL, arXiv 2602.02710",
        "reward minus the group mean, divided by the group mean",
        (steps.WeightedSum(), steps.DivideByMean(), steps.Center()),
        ("epsilon",),
    ),
    "rvpo": Row(
        "RVPO, arXiv 2605.05750",
        "gdpo with a soft minimum of the rewards instead of their sum",
        (steps.Center(), _STD, cross_reward.SoftMin(), _WHITEN),
        ("k",),
    ),
    "saw": Row(
        "SAW, arXiv 2606.07705",
        "gdpo with weights from each batch: rewards with a larger coefficient of variation get more weight",
        (steps.Center(), _STD, steps.WeightByVariation(min_values=()), steps.WeightedSum(), _WHITEN),
        ("min_values",),
    ),
    "weighted_grpo": Row(
        "GRPO, arXiv 2402.03300", "grpo on the weighted sum of the rewards in algorithm.rewards.keys", _GRPO
    ),
}
"""By name."""
