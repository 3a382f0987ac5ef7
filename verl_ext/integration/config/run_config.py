"""A run's configuration, as the rules need it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl_ext.core.chain import Chain
from verl_ext.estimators.hadw import HadwSettings
from verl_ext.integration.config.read import select
from verl_ext.settings import Settings


@dataclass(frozen=True)
class RunConfig:
    """One run: its estimator, the parsed settings, the chain and verl's whole configuration."""

    name: str
    settings: Settings
    chain: Chain | None
    config: Any

    @property
    def per_reward(self) -> bool:
        """Whether the estimator normalises each reward separately."""
        return self.chain is not None and self.chain.per_reward

    @property
    def used(self) -> set[str]:
        """The estimators whose settings apply: hadw and its base, or the estimator alone."""
        return {self.name, self.settings.of(HadwSettings).base} if self.name == "hadw" else {self.name}

    def select(self, path: str) -> Any:
        """An entry of the configuration, or None."""
        return select(self.config, path)
