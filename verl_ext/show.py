"""`verl-ext show NAME`: print the steps, the formula and the settings of an estimator."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_ext.conf import GROUP
from verl_ext.core.chain import Chain
from verl_ext.errors import ConfigurationError, listed, unknown
from verl_ext.estimators import ESTIMATORS, build
from verl_ext.estimators.compose import describe, plain, settings_of
from verl_ext.registry import declaration
from verl_ext.settings import VERL_NAMES, Settings, misspelt, sections

_LOSS = "actor_rollout_ref.actor.loss_agg_mode"


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
    parser.add_argument("--config", type=Path, metavar="FILE", help="read `algorithm` from this YAML file first")


def show(options: argparse.Namespace) -> str:
    """Return the text to print."""
    name = options.estimator or ""
    if name not in ESTIMATORS:
        problem = unknown("estimator", name, ESTIMATORS) if name else f"name an estimator: {listed(ESTIMATORS)}"
        raise ConfigurationError(f"{problem}; for example python -m verl_ext show gdpo algorithm.gdpo.scale=mad")
    algorithm, mode = configured(options.config, options.overrides)
    settings = Settings.parse(algorithm, loss_agg_mode=mode)
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


def configured(path: Path | None, overrides: Sequence[str]) -> tuple[Mapping[str, Any], str]:
    """Read the section `algorithm` and the actor's `loss_agg_mode` from a file and from `KEY=VALUE`."""
    if path is None and not overrides:
        return {}, "token-mean"
    try:
        from hydra.core.override_parser.overrides_parser import OverridesParser
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        from verl_ext.integration.checks import read
    except ImportError as error:
        raise ConfigurationError("reading settings needs Hydra, as in verl: pip install hydra-core") from error
    config = _loaded(path)
    parser = OverridesParser.create()
    for text in overrides:
        key, value = _override(text, parser)
        try:
            OmegaConf.update(config, key, value, force_add=True)
        except (OmegaConfBaseException, ValueError) as error:
            raise ConfigurationError(f"{text!r} does not fit the settings before it: {error}") from error
    algorithm, mode = read.select(config, "algorithm"), read.select(config, _LOSS)
    if not (algorithm is None or OmegaConf.is_dict(algorithm)) or not (mode is None or isinstance(mode, str)):
        raise ConfigurationError(f"algorithm must be a section and {_LOSS} a string, found {algorithm!r} and {mode!r}")
    for complaint in misspelt(algorithm or ()):
        raise ConfigurationError(complaint)
    return read.plain(algorithm), mode or "token-mean"


def _loaded(path: Path | None) -> Any:
    """Load the file of settings with OmegaConf."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        config = OmegaConf.create({}) if path is None else OmegaConf.load(path)
    except (OSError, OmegaConfBaseException, YAMLError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"--config={path}: the settings cannot be read: {error}") from error
    if not OmegaConf.is_dict(config):
        raise ConfigurationError(f"--config={path}: the settings cannot be read: the file must be a mapping")
    return config


def _override(text: str, parser: Any) -> tuple[str, Any]:
    """Parse one setting; raise unless it is one that an estimator reads."""
    from hydra.errors import HydraException

    try:
        override = parser.parse_override(text)
    except (HydraException, ValueError, RecursionError) as error:
        wrong = f"{text[:200]!r} is not KEY=VALUE, such as algorithm.gdpo.scale=mad"
        if any(text.count(left) != text.count(right) for left, right in ("[]", "{}", "()")):
            wrong = f"{text!r} has a bracket without its other half; lists are written as [a,b], mappings as {{a:1}}"
        raise ConfigurationError(f"the settings cannot be read: {wrong}") from error
    if override.is_delete() or override.is_sweep_override():
        raise ConfigurationError(f"the settings cannot be read: {text!r} does not give one setting one value")
    key = override.key_or_group
    if key in (GROUP, "algorithm.adv_estimator"):
        raise ConfigurationError(
            f"{text!r}: the estimator is given by its name alone ({listed(ESTIMATORS)}): write the name in its place, "
            "or remove it if the name is there"
        )
    known = sections()
    valid = [*known, *VERL_NAMES.values(), "norm_adv_by_std_in_grpo", "use_kl_in_reward"]
    valid = [*(f"algorithm.{name}" for name in valid), _LOSS]
    if key not in valid and not key.startswith(tuple(f"algorithm.{name}." for name in known)):
        raise ConfigurationError(f"{text!r}: {unknown('setting', key, valid)}")
    return key, override.value()


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
