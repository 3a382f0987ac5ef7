"""Register the estimators with verl."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

from verl_ext.integration.advantage.estimator import compute
from verl_ext.integration.compat import contract
from verl_ext.integration.compat.hooks import MARK
from verl_ext.registry import BUILT_IN, ESTIMATORS, GROUP

logger = logging.getLogger("verl_ext")


def install(core_algos: ModuleType) -> None:
    """Put our functions into verl's `ADV_ESTIMATOR_REGISTRY`, all of them or none.

    verl has its own `gdpo`, which cannot run on the default trainer. It is replaced, and kept as the new function's
    attribute `replaced`. `register_adv_est` is not used because it raises for a name that exists.
    """
    contract.require("verl.trainer.ppo.core_algos", core_algos)
    registry = core_algos.ADV_ESTIMATOR_REGISTRY
    new = {name: estimator_function(name) for name in ESTIMATORS if not getattr(registry.get(name), MARK, False)}
    for name in new:
        if name not in BUILT_IN and name in registry:
            logger.warning(
                "the entry point %s=%s of the group %s replaces verl's own estimator %r in every run: rename it, "
                "unless that is meant",
                name,
                ESTIMATORS[name],
                GROUP,
                name,
            )
    for name, function in new.items():
        function.replaced = registry.get(name)  # type: ignore[attr-defined]
    registry.update(new)


def estimator_function(name: str) -> Callable[..., Any]:
    """An estimator in verl's convention; it returns `(advantages, returns)`, the same tensor twice."""

    def compute_advantage(
        token_level_rewards: Any, response_mask: Any, index: Any = None, config: Any = None, **given: Any
    ) -> tuple[Any, Any]:
        return compute(name, token_level_rewards, response_mask, index=index, config=config, **given)

    compute_advantage.__name__ = compute_advantage.__qualname__ = f"compute_{name}_advantage"
    setattr(compute_advantage, MARK, True)
    return compute_advantage
