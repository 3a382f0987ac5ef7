"""Print the steps, the formula and the settings of an estimator, and the list of steps that equals it."""

import argparse
import dataclasses
import importlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from verl_ext.core.chain import Chain
from verl_ext.core.step_lists import as_list, step_settings
from verl_ext.files import say
from verl_ext.methods.simple import ROWS
from verl_ext.registry import ESTIMATORS, build, changed, load, used
from verl_ext.settings import Settings
from verl_ext.tools.arguments import LOSS, parse_settings


def show(options: argparse.Namespace) -> int:
    """Print the estimator, or the list of estimators if none is named."""
    name = options.estimator
    if name is None:
        say("\n".join(f"{known:13}  {_about(known)[0]}" for known in sorted(ESTIMATORS)))
        return 0
    settings = parse_settings(options.overrides)
    chain = build(name, settings)
    heading, *rest = _about(name)
    formula = [f"  {line.strip()}" for line in rest if line.startswith("    ") and name != "compose"]
    usual = not changed(settings) and settings.norm_by_std  # otherwise only the formulas of the steps are correct
    lines = [heading, *(["", "formula", *formula] if formula and usual else [])]
    lines += ["", "steps", *_steps(chain), "", "effective settings", *_settings(name, settings)]
    say("\n".join([*lines, "", "equivalent list of steps", _as_overrides(chain, settings)]))
    return 0


def _about(name: str) -> list[str]:
    """Return the description of an estimator: one line, or the lines of its module's docstring."""
    if name in ROWS:
        return [f"{ROWS[name].paper}: {ROWS[name].line}."]
    module = ESTIMATORS[name]
    return (importlib.import_module(module).__doc__ or f"{module} (no docstring)").splitlines()


def _steps(chain: Chain) -> Iterator[str]:
    width = max(len(step.name) for step in chain.steps)
    for number, step in enumerate(chain.steps, start=1):
        given = ", ".join(f"{key}={as_text(value)}" for key, value in step_settings(step).items())
        says = " ".join((type(step).__doc__ or "").split("\n\n")[0].split())
        yield f"  {number}  {step.name.ljust(width)}  {says}"
        if given:
            yield f"     {' ' * width}  {given}"


def _settings(name: str, settings: Settings) -> Iterator[str]:
    shown = (other for other in used(name, settings) if other != "compose")
    sections = {other: settings.of(other, load(other).section) for other in shown}
    for part, section in {"rewards": settings.rewards, **sections}.items():
        for key, value in dataclasses.asdict(section).items():
            text = f"algorithm.{part}.{key}={as_text(value)}"
            yield f"  '{text}'" if "[" in text or "{" in text else f"  {text}"
    yield f"  algorithm.norm_adv_by_std_in_grpo={settings.norm_by_std}"
    yield f"  algorithm.use_kl_in_reward={settings.kl_in_reward}"
    yield f"  {LOSS}={settings.loss_agg_mode}"


def _as_overrides(chain: Chain, settings: Settings) -> str:
    steps = ",".join(as_text(item) for item in as_list(chain))
    accuracy = {name: getattr(settings.rewards, name) for name in ("accuracy_key", "accuracy_threshold")}
    used = [f" +algorithm.rewards.{key}={as_text(value)}" for key, value in accuracy.items() if value is not None]
    more = "".join(used) if chain.needs_accuracy else ""
    return f"  algorithm.adv_estimator=compose '+algorithm.compose.steps=[{steps}]'{more}"


def as_text(value: Any) -> str:
    """Write a value as on verl's command line.

    >>> as_text({"step": "whiten", "epsilon": 0.5}), as_text(("a", None)), as_text(True)
    ('{step:whiten,epsilon:0.5}', '[a,null]', 'True')
    """
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{as_text(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(as_text, value)) + "]"
    if value is None:
        return "null"
    return value if isinstance(value, str) else str(value) if isinstance(value, bool) else json.dumps(value)
