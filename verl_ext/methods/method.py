"""What an advantage estimator declares: one object per method."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_ext.core.chain import Step
from verl_ext.core.steps import ScaleByStd
from verl_ext.errors import Finding
from verl_ext.settings import Settings


def no_findings(_settings: Settings, _select: Callable[[str], Any]) -> Iterable[Finding]:
    """Accept every configuration."""
    return ()


@dataclass(frozen=True)
class Method:
    """An advantage estimator: the steps that it consists of, and what a run with it needs.

    `verl_ext.methods.METHODS` lists the methods of this package by name. Another package names its object in the
    entry-point group `verl_ext.estimators`, as `name = "package.module:OBJECT"`.

    >>> from verl_ext.core.steps import Center, WeightedSum
    >>> method = Method.from_steps("Dr. GRPO, arXiv 2503.20783", "centered rewards", (WeightedSum(), Center()))
    >>> [step.name for step in method.build(None, Settings())]
    ['weighted_sum', 'center']
    """

    paper: str
    """The publication, or another source."""
    summary: str
    """What the method does, in at most 25 words."""
    build: Callable[[Any, Settings], Sequence[Step]]
    """Returns the steps from the section of the method, an instance of `settings`, and the settings of the run.

    verl's `norm_adv_by_std_in_grpo` and `use_kl_in_reward` are `norm_by_std` and `kl_in_reward` of the run's settings.
    """
    settings: type[Any] | None = None
    """The dataclass of the section `algorithm.<name>`, or None for a method without settings. Each field has a
    description below it."""
    preset: Mapping[str, Any] = field(default_factory=dict)
    """What `+verl_ext=<name>` sets outside `algorithm`, for example the loss of the paper."""
    rule: Callable[[Settings, Callable[[str], Any]], Iterable[Finding]] = no_findings
    """Yields findings about verl's configuration, for example what the method cannot do. The second argument reads an
    entry of the configuration by its path, and returns None if the entry does not exist."""
    base_setting: str | None = None
    """The name of the setting that names another method, whose steps come first. None: the method has no base."""
    doc: str = ""
    """The docstring of the method's module. `show` prints its indented lines as the formula."""

    @classmethod
    def from_steps(
        cls,
        paper: str,
        summary: str,
        steps: Sequence[Step] | Callable[[Any], Sequence[Step]],
        settings: type[Any] | None = None,
    ) -> Method:
        """Return a method that is a list of steps, or a function from its section to a list of steps.

        With verl's `algorithm.norm_adv_by_std_in_grpo=False` the steps `scale_by_std` are left out.
        """

        def build(section: Any, run_settings: Settings) -> Sequence[Step]:
            chosen = steps(section) if callable(steps) else steps
            if run_settings.norm_by_std:
                return chosen
            return [step for step in chosen if type(step) is not ScaleByStd]

        return cls(paper, summary, build, settings)
