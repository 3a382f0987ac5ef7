"""Print the steps, the formula and the settings of an estimator, and the list of steps that equals it."""

import argparse
import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from verl_ext.core.chain import Chain
from verl_ext.core.step_lists import as_list
from verl_ext.errors import ConfigurationError
from verl_ext.files import say
from verl_ext.registry import ESTIMATORS, build, changed_sections, load, method_and_base, section_of
from verl_ext.settings import Settings
from verl_ext.tools.arguments import LOSS, parse_settings


def show(options: argparse.Namespace) -> int:
    """Print the estimator, or the list of estimators if none is named."""
    name = options.estimator
    if name is None:
        say("\n".join(_all_estimators()))
        return 0
    settings = parse_settings(options.overrides)
    chain = build(name, settings)
    formula = _formula(name)
    has_default_settings = not changed_sections(settings) and settings.norm_by_std
    lines = [_description(name)]
    if formula and has_default_settings:  # with other settings only the formulas of the steps are correct
        lines += ["", "formula", *formula]
    lines += ["", "steps", *_steps(chain)]
    lines += ["", "effective settings", *_settings(name, settings)]
    lines += ["", "equivalent list of steps", _as_overrides(chain, settings)]
    say("\n".join(lines))
    return 0


def _all_estimators() -> Iterator[str]:
    """Yield each estimator with its description."""
    for name in sorted(ESTIMATORS):
        yield f"{name:13}  {_description(name)}"


def _description(name: str) -> str:
    """Return the description of an estimator in one line."""
    try:
        method = load(name)
    except ConfigurationError as error:  # the package of the estimator is broken
        return str(error)
    return f"{method.paper}: {method.summary}."


def _formula(name: str) -> list[str]:
    """Return the formula of an estimator: the indented lines of the documentation of its method."""
    if name == "compose":  # whose indented lines are an example of a configuration
        return []
    formula = [line for line in load(name).doc.splitlines() if line.startswith("    ")]
    return [f"  {line.strip()}" for line in formula]


def _steps(chain: Chain) -> Iterator[str]:
    """Yield each step with the first paragraph of its docstring, and below it the settings."""
    width = max(len(step.name) for step in chain.steps)
    for number, step in enumerate(chain.steps, start=1):
        first_paragraph = (type(step).__doc__ or "").split("\n\n")[0]
        description = " ".join(first_paragraph.split())
        yield f"  {number}  {step.name.ljust(width)}  {description}"
        settings = [f"{key}={as_text(value)}" for key, value in dataclasses.asdict(step).items()]
        if settings:
            yield f"     {' ' * width}  {', '.join(settings)}"


def _settings(name: str, settings: Settings) -> Iterator[str]:
    """Yield the settings that the estimator reads, as on verl's command line."""
    sections = {"rewards": settings.rewards}
    for method_name in method_and_base(name, settings):
        section = section_of(method_name, settings)
        if method_name != "compose" and section is not None:
            sections[method_name] = section
    for section_name, section in sections.items():
        for key, value in dataclasses.asdict(section).items():
            text = f"algorithm.{section_name}.{key}={as_text(value)}"
            needs_quotes = "[" in text or "{" in text
            yield f"  '{text}'" if needs_quotes else f"  {text}"
    yield f"  algorithm.norm_adv_by_std_in_grpo={settings.norm_by_std}"
    yield f"  algorithm.use_kl_in_reward={settings.kl_in_reward}"
    yield f"  {LOSS}={settings.loss_agg_mode}"


def _as_overrides(chain: Chain, settings: Settings) -> str:
    """Return the list of steps that equals a chain, as overrides on verl's command line."""
    steps = as_text(as_list(chain))
    overrides = ["algorithm.adv_estimator=compose", f"'+algorithm.compose.steps={steps}'"]
    if chain.needs_accuracy:
        for key in ("accuracy_key", "accuracy_threshold"):
            value = getattr(settings.rewards, key)
            if value is not None:
                overrides.append(f"+algorithm.rewards.{key}={as_text(value)}")
    return f"  {' '.join(overrides)}"


def as_text(value: Any) -> str:
    """Write a value as on verl's command line.

    >>> as_text({"step": "whiten", "epsilon": 0.5}), as_text(("a", None)), as_text(True)
    ('{step:whiten,epsilon:0.5}', '[a,null]', 'True')
    """
    if isinstance(value, Mapping):
        entries = [f"{key}:{as_text(entry)}" for key, entry in value.items()]
        return "{" + ",".join(entries) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(as_text, value)) + "]"
    if value is None:
        return "null"
    if isinstance(value, str | bool):
        return str(value)
    return json.dumps(value)
