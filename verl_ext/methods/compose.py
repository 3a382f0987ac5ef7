r"""`adv_estimator=compose`: an estimator written as a list of steps in the configuration.

    algorithm:
      adv_estimator: compose
      rewards: {keys: [correctness, format]}
      compose:
        steps: [center, scale_by_mad, weighted_sum, whiten, {step: weight_by_difficulty, dqw_temp: 1.0}]

A list names steps of the named estimators, which `python -m verl_ext show NAME` prints as such lists, and custom steps
as `package.module:Class`. Exactly one step sums the rewards, such as `weighted_sum`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verl_ext.core.chain import Step
from verl_ext.core.step_lists import check_order, read_step
from verl_ext.errors import ConfigurationError
from verl_ext.methods.method import Method
from verl_ext.settings import Settings

WHERE = "algorithm.compose.steps"


@dataclass(frozen=True)
class ComposeSettings:
    """`algorithm.compose`."""

    steps: tuple[Any, ...] | None = None
    """Steps in order, each a name or `{step: name, setting: value}`. A custom step is `package.module:Class`.
    null: an error."""


def steps_of(section: ComposeSettings, _settings: Settings) -> Sequence[Step]:
    """Return the steps that the list describes.

    >>> section = ComposeSettings(("weighted_sum", {"step": "center", "leave_one_out": True}))
    >>> steps_of(section, Settings())
    (WeightedSum(), Center(leave_one_out=True))
    """
    if not section.steps:
        raise ConfigurationError(
            f"algorithm.adv_estimator=compose needs a list of steps, but {WHERE} is not set. Set "
            f"'++{WHERE}=[weighted_sum,center,scale_by_std]', for example. `python -m verl_ext show gdpo` prints the "
            "list of gdpo."
        )
    steps = tuple(read_step(item, f"{WHERE}[{index}]") for index, item in enumerate(section.steps))
    check_order(steps, WHERE)
    return steps


COMPOSE = Method(
    paper="A list of your own",
    summary="an estimator written as a list of steps in the configuration",
    build=steps_of,
    settings=ComposeSettings,
    doc=__doc__,
)
