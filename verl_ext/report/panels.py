"""Which curves a report shows, and their units."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from verl_ext.report.curves import Experiments, logged, rewards, title


@dataclass(frozen=True)
class Panel:
    """One plot: a curve per run of the first metric, and thinner curves of the others."""

    title: str
    unit: str
    metrics: tuple[str, ...]
    share: bool = False
    """Whether the values lie between 0 and 1."""
    skip: int = 0
    """Number of steps at the start to leave out."""


CAPABILITY = ("hadw", "weigh_by_history")
"""Prefixes of the capability metrics: the estimator, or the step in a user's list."""

_BESIDE = (
    Panel("advantage: std", "std over responses", ("advantage/std",)),
    Panel("advantage: largest and least", "advantage", ("critic/advantages/max", "critic/advantages/min")),
    Panel("advantage: exactly 0", "share of responses", ("advantage/zero_share",), share=True),
    *(
        Panel(
            f"{name}: capability (thin: accuracy)",
            "mean accuracy",
            (f"{name}/capability_posterior", f"{name}/batch_accuracy"),
            share=True,
        )
        for name in CAPABILITY
    ),
    Panel("length of a response", "tokens, batch mean", ("response_length/mean",)),
    # The first step includes start-up.
    Panel("time of a step, after the first", "seconds", ("timing_s/step",), skip=1),
)


def panels(experiments: Experiments) -> list[Panel]:
    """All panels for which the runs have logged something: rewards first."""
    metrics = logged(experiments)
    names = rewards(experiments)
    out = of_metrics(names)
    for name in names:
        dead = name.removesuffix("/mean") + "/dead_groups"
        if dead in metrics:
            out.append(Panel(f"{title(name)}: dead groups", "share of prompts", (dead,), share=True))
    return out + [panel for panel in _BESIDE if panel.metrics[0] in metrics]


def of_metrics(metrics: Iterable[str]) -> list[Panel]:
    """A panel for each metric."""
    units = {metric: panel.unit for panel in _BESIDE for metric in panel.metrics}
    return [Panel(title(metric), units.get(metric, _unit(metric)), (metric,)) for metric in metrics]


def _unit(metric: str) -> str:
    if metric.startswith("timing_s/"):
        return "seconds"
    return "reward, batch mean" if title(metric) != metric else "value"


def columns(count: int) -> int:
    """The number of panels side by side that leaves the fewest gaps.

    >>> columns(1), columns(8), columns(9)
    (1, 4, 3)
    """
    return min(count, min((4, 3), key=lambda across: -count % across))
