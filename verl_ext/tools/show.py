"""`verl-ext show NAME`: print the steps, the formula and the settings of an estimator."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from verl_ext.core.chain import Chain
from verl_ext.errors import ConfigurationError, listed, unknown
from verl_ext.estimators import ESTIMATORS, build
from verl_ext.estimators.compose import describe, plain, settings_of
from verl_ext.registry import declaration
from verl_ext.settings import Settings
from verl_ext.tools.arguments import parse_settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("estimator", nargs="?", help=", ".join(ESTIMATORS))
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="settings as on verl's command line, such as algorithm.gdpo.scale=mad: those of this package, and "
        "those of verl that an estimator reads",
    )


def show(options: argparse.Namespace) -> str:
    """Return the text to print."""
    name = options.estimator or ""
    if name not in ESTIMATORS:
        problem = unknown("estimator", name, ESTIMATORS) if name else f"name an estimator: {listed(ESTIMATORS)}"
        raise ConfigurationError(f"{problem}; for example python -m verl_ext show gdpo algorithm.gdpo.scale=mad")
    settings = parse_settings(options.overrides)
    chain = build(name, settings)
    home = importlib.import_module(ESTIMATORS[name].split(":")[0])
    # Not `inspect.cleandoc`: it takes the indent away where the formula is all that follows the heading.
    heading, _, rest = (home.__doc__ or "").expandtabs().strip().partition("\n")
    lines = [f"{name}: {heading}"]
    if name != "compose" and (formula := list(_indented(rest))):
        lines += ["", "formula", *formula]
    lines += ["", "steps", *_steps(chain), "", "settings in force", *_settings(name, settings)]
    lines += ["", "the same as a list", *_as_list(chain, settings)]
    return "\n".join(lines)


def _indented(text: str) -> Iterator[str]:
    """The formulas in a docstring: paragraphs of indented lines, and lines indented by four spaces."""
    for paragraph in re.split(r"\n\s*\n", text):
        lines = [line for line in paragraph.splitlines() if line.strip()]
        formula = all(line.startswith(" ") for line in lines)
        for line in lines:
            if formula or line.startswith("    "):
                yield f"  {line.strip()}"


def _steps(chain: Chain) -> Iterator[str]:
    width = max(len(step.name) for step in chain.steps)
    for at, step in enumerate(chain.steps, start=1):
        given = ", ".join(f"{key}={_text(value)}" for key, value in settings_of(step, defaults=True).items())
        doc = inspect.getdoc(type(step)) or ""
        says = " ".join(doc.split("\n\n")[0].split()) if type(step).__doc__ else ""
        yield f"  {at}  {step.name.ljust(width)}  {says}"
        if given:
            yield f"     {' ' * width}  {given}"


def _settings(name: str, settings: Settings) -> Iterator[str]:
    own = declaration(name).section
    shown: list[tuple[str, Any]] = [("rewards", settings.rewards)]
    if own is not None and name != "compose":
        shown.append((name, settings.of(own)))
    base = str(getattr(settings.of(own), "base", None)) if own is not None else ""
    if base in ESTIMATORS and (section := declaration(base).section) is not None:
        shown.append((base, settings.of(section)))
    for part, section in shown:
        for item in dataclasses.fields(section):
            text = f"algorithm.{part}.{item.name}={_text(plain(getattr(section, item.name)))}"
            yield f"  '{text}'" if "[" in text or "{" in text else f"  {text}"
    yield f"  algorithm.norm_adv_by_std_in_grpo={settings.norm_by_std}"
    yield f"  algorithm.use_kl_in_reward={settings.kl_in_reward}"
    yield f"  actor_rollout_ref.actor.loss_agg_mode={settings.loss_agg_mode}"


def _as_list(chain: Chain, settings: Settings) -> Iterator[str]:
    written = ",".join(_text(item) for item in describe(chain))
    more = ""
    for key in ("accuracy_key", "accuracy_threshold") if chain.needs_accuracy else ():
        value = getattr(settings.rewards, key)
        more += "" if value is None else f" +algorithm.rewards.{key}={_text(value)}"
    yield f"  algorithm.adv_estimator=compose '+algorithm.compose.steps=[{written}]'{more}"


def _text(value: Any) -> str:
    """Write a value as on verl's command line.

    >>> _text({"step": "whiten", "epsilon": 0.5}), _text(("a", None)), _text(True)
    ('{step:whiten,epsilon:0.5}', '[a,null]', 'True')
    """
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_text(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_text, value)) + "]"
    if value is None:
        return "null"
    return value if isinstance(value, str) else str(value) if isinstance(value, bool) else json.dumps(value)
