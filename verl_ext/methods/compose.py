r"""`adv_estimator=compose`: an estimator written as a list of steps in the configuration.

    algorithm:
      adv_estimator: compose
      rewards: {keys: [correctness, format]}
      compose:
        steps: [center, scale_by_mad, weighted_sum, whiten, {step: weight_by_difficulty, dqw_temp: 1.0}]

A list names steps of the named estimators, which `python -m verl_ext show NAME` prints as such lists, and steps of your
own as `package.module:Class`. Exactly one is `weighted_sum`. A step with a field `weights` gets
`algorithm.rewards.weights`.
"""

from dataclasses import dataclass
from typing import Any

from verl_ext.core.chain import Chain
from verl_ext.core.step_lists import check_order, read_step
from verl_ext.errors import ConfigurationError
from verl_ext.settings import Settings

WHERE = "algorithm.compose.steps"


@dataclass(frozen=True)
class ComposeSettings:
    """`algorithm.compose`."""

    steps: tuple[Any, ...] | None = None
    """Steps in order, each a name or `{step: name, setting: value}`. A custom step is `package.module:Class`."""


SECTION = ComposeSettings


def compose(settings: Settings) -> Chain:
    """The chain that the list describes.

    >>> from verl_ext.core.batch import Batch
    >>> chain = compose(Settings.parse({"compose": {"steps": ["weighted_sum", "center"]}}))
    >>> chain(Batch.of([[1], [0]], ["a", "a"])).advantages
    array([ 0.5, -0.5])
    """
    items = settings.of("compose", ComposeSettings).steps
    if not items:
        raise ConfigurationError(
            f"algorithm.adv_estimator=compose needs a list of steps, but {WHERE} is not set. Set "
            f"'++{WHERE}=[weighted_sum,center,scale_by_std]', for example. `python -m verl_ext show gdpo` prints the "
            "list of gdpo."
        )
    steps = tuple(read_step(item, f"{WHERE}[{index}]", settings.rewards.weights) for index, item in enumerate(items))
    check_order(steps, WHERE)
    return Chain(steps)
