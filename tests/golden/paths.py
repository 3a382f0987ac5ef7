"""The ways to the numbers, each a function from a case to one outcome a batch, imported where it is used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType

from tests.golden.cases import Case, Outcome

PATHS: Mapping[str, str] = MappingProxyType(
    {
        "direct": "tests.golden.package:direct",
        "registry": "tests.golden.package:registry",
        "default_trainer": "tests.golden.default_trainer:through_default_trainer",
        "ray_trainer": "tests.golden.ray_trainer:through_ray_trainer",
    }
)
NEEDS = {
    "registry": "verl.trainer.ppo.core_algos",
    "default_trainer": "verl.trainer.ppo.v1.trainer_base",
    "ray_trainer": "verl.trainer.ppo.ray_trainer",
}
"""Modules of verl that a path goes through; where there is none, nothing is tested there."""
LEFT_OUT = {"default_trainer": 1, "ray_trainer": 2}


def through(path: str) -> Callable[[Case], list[Outcome]]:
    module, _, function = PATHS[path].partition(":")
    return getattr(importlib.import_module(module), function)


def has(path: str, case: Case) -> bool:
    """Each trainer runs two thirds of the cases; verl's own `grpo`, whose rewards are only logged, runs in no other."""
    if path not in LEFT_OUT:
        return case.estimator != "grpo"
    return case.number % 3 != LEFT_OUT[path]
