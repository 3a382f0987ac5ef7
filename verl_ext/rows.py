"""Estimators that are a list of steps: one row each, whose name is valid wherever an estimator's is.

verl's `algorithm.norm_adv_by_std_in_grpo=False` leaves `scale_by_std` out of them.

To add one write a row here. A step that does not exist yet is a class in `verl_ext/core/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """An estimator: its paper, one line, and its steps as `adv_estimator=compose` takes them."""

    paper: str
    line: str
    steps: tuple[str | Mapping[str, Any], ...]
    settings: tuple[str, ...] = ()
    """Settings of its steps that are those of `algorithm.<name>`, with the list's values as defaults."""


_STD = {"step": "scale_by_std", "epsilon": 1e-6}
_WHITEN = {"step": "whiten", "over": "token"}
_GRPO = ("weigh_and_sum", "centre", _STD)

ROWS: Mapping[str, Row] = {
    "corrgrpo": Row(
        "CorrGRPO, arXiv 2609.36820",
        "the centred sum of the rewards, divided by their correlations",
        ("centre", "scale_by_correlation", "weigh_and_sum"),
    ),
    "dara": Row(
        "DARA, arXiv 2610.00574",
        "gdpo, in which a reward that varies in few groups counts more",
        ("centre", _STD, "weigh_by_density", "weigh_and_sum", _WHITEN),
        ("of", "over"),
    ),
    "dvao": Row(
        "DVAO, arXiv 2605.25604",
        "the centred sum of the rewards, divided by the sum of their spreads",
        ("centre", "scale_by_common_std", "weigh_and_sum"),
    ),
    "fgrpo": Row(
        "F-GRPO, arXiv 2602.06717",
        "grpo, in which prompts that are mostly solved count less",
        (*_GRPO, "weigh_by_focal"),
        ("gamma",),
    ),
    "gd2po": Row(
        "GD2PO, arXiv 2606.16771",
        "gdpo without the responses whose rewards conflict",
        ("centre", _STD, "drop_conflicts", "weigh_and_sum", _WHITEN),
        ("conflict", "tau", "over"),
    ),
    "grpo": Row("GRPO, arXiv 2402.03300", "the base of hadw; `adv_estimator=grpo` is verl's own", _GRPO),
    "liteppo": Row(
        "Lite PPO, arXiv 2508.08221",
        "the mean of the group, the std of the batch",
        ("weigh_and_sum", {"step": "divide_by_batch_std", "epsilon": 1e-6}, "centre"),
    ),
    "maxrl": Row(
        "MaxRL, arXiv 2602.02710",
        "the centred reward, divided by the mean of the group",
        ("weigh_and_sum", "divide_by_mean", "centre"),
        ("epsilon",),
    ),
    "rvpo": Row(
        "RVPO, arXiv 2605.05750",
        "gdpo with a soft minimum of the rewards in the place of their sum",
        ("centre", _STD, "soft_min", _WHITEN),
        ("k",),
    ),
    "saw": Row(
        "SAW, arXiv 2606.07705",
        "gdpo with weights that follow the batch: a reward that varies much beside its mean counts more",
        ("centre", _STD, "weigh_by_variation", "weigh_and_sum", _WHITEN),
        ("lowest",),
    ),
    "weighted_grpo": Row("GRPO, arXiv 2402.03300", "grpo on the weighted sum of the named rewards", _GRPO),
}
"""By name."""
