"""What the figures share: groups of answers, the package's estimators on them, and panels in the report's style."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from verl_ext import Batch, Settings, build
from verl_ext.core.groups import Array
from verl_ext.estimators.grpo import grpo
from verl_ext.tools.picture import COLOURS, STYLES, dress

WITHOUT_STD = {"norm_adv_by_std_in_grpo": False}


def right_or_wrong(size: int) -> Array:
    """Rewards `[size - 1, size, 1]` of the groups that vary, with 1 to size - 1 right answers, the right ones first.

    >>> right_or_wrong(3)[:, :, 0].tolist()
    [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]]
    """
    return (np.arange(size) < np.arange(1, size)[:, None]).astype(np.float64)[:, :, None]


def advantages(estimator: str, rewards: Array, algorithm: Mapping[str, Any] | None = None) -> Array:
    """Advantages `[groups, answers]` of one batch with the rewards `[groups, answers, rewards]`.

    An answer is right if its first reward is above 0. `algorithm` is that section of the configuration.

    >>> advantages("drgrpo", np.array([[[1.0], [0.0]]])).tolist()
    [[0.5, -0.5]]
    """
    groups, size, keys = rewards.shape
    rows = rewards.reshape(groups * size, keys)
    labels = np.repeat(np.arange(groups), size).tolist()
    settings = Settings.parse(algorithm or {})
    names, conditions = [f"reward {key}" for key in range(keys)], settings.rewards.conditions
    batch = Batch.of(rows, labels, keys=names, conditions=conditions, accuracy=rows[:, 0] > 0)
    chain = grpo(settings) if estimator == "grpo" else build(estimator, settings)
    return chain(batch).advantages.reshape(groups, size)


def lines(ax: Any, x: Any, curves: Mapping[str, Any], **look: Any) -> None:
    """Draw named curves in the report's colours and line styles."""
    for (name, y), colour, style in zip(curves.items(), COLOURS, STYLES, strict=False):
        ax.plot(x, y, label=name, color=colour, linestyle=style, linewidth=1.8, markersize=4, **look)


def panel(ax: Any, title: str, x: str, y: str, **legend: Any) -> None:
    """Title, units and legend."""
    dress(ax, title, y)
    ax.set_xlabel(x)
    ax.set_axisbelow(True)
    ax.legend(frameon=False, fontsize=9, handlelength=3.2, **legend)
