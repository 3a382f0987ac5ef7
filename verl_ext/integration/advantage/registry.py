"""The estimators' names in verl's registry."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from verl_ext.estimators import ESTIMATORS
from verl_ext.integration.compat import contract
from verl_ext.integration.compat.hooks import MARK


def install(core_algos: ModuleType) -> None:
    """Put our functions into verl's `ADV_ESTIMATOR_REGISTRY`, all of them or none.

    `register_adv_est` refuses a name that exists, and verl has a `gdpo` of its own (which cannot run on the default
    trainer): it is replaced, and kept as the new function's `replaced`.
    """
    contract.require("verl.trainer.ppo.core_algos", core_algos)
    registry = core_algos.ADV_ESTIMATOR_REGISTRY
    new = {name: estimator_function(name) for name in ESTIMATORS if not getattr(registry.get(name), MARK, False)}
    for name, function in new.items():
        function.replaced = registry.get(name)  # type: ignore[attr-defined]
    registry.update(new)


def estimator_function(name: str) -> Callable[..., Any]:
    """A function in verl's convention for estimators; it returns `(advantages, returns)`, one tensor twice."""

    def compute_advantage(
        token_level_rewards: Any, response_mask: Any, index: Any = None, config: Any = None, **given: Any
    ) -> tuple[Any, Any]:
        from verl_ext.integration.advantage.estimator import compute

        return compute(name, token_level_rewards, response_mask, index=index, config=config, **given)

    compute_advantage.__name__ = compute_advantage.__qualname__ = f"compute_{name}_advantage"
    setattr(compute_advantage, MARK, True)
    return compute_advantage
