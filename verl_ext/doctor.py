"""`python -m verl_ext doctor`: report whether verl loads verl_ext in this environment, and whether every hook works.

It must run where verl or torch is not installed, so most modules of verl_ext are imported inside the functions.
"""

import argparse
import importlib
import os
import platform
import sys
import warnings
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from verl_ext import __version__, hooks
from verl_ext.conf import read_yaml
from verl_ext.errors import ConfigurationError, IntegrationError

PLUGIN = "verl_ext.plugin"
POLICY = "VERL_USE_EXTERNAL_PLUGINS"
REQUIRED = ("numpy", "torch", "verl")
"""Packages without which verl_ext or verl cannot be imported."""
OTHER_PACKAGES = {
    "ray": "Install it, because verl needs it",
    "TransferQueue": "Install it if runs use verl's default trainer",
    "tensordict": "Install it, because verl needs it",
    "transformers": "Install it, because verl needs it",
    "vllm": "Install it if runs in this environment use actor_rollout_ref.rollout.name=vllm",
    "flash-attn": "Install it if runs in this environment use a GPU, because verl's default attention needs it",
}
"""Other packages of a run, with what to do if they are not installed.

A missing package is only a note. If verl cannot be imported without it, that is an error of `REQUIRED`.
"""
REINSTALL = "The installation of verl_ext is incomplete. Repeat your pip install with --force-reinstall --no-deps."

Line = tuple[str, str, str]
"""The state of a check (`ok`, `note` or `error`), what is checked, and the text."""


def doctor(_options: argparse.Namespace) -> int:
    """Print a report; return 1 if it has an error."""
    print(f"verl_ext {__version__} on Python {platform.python_version()}, tested with verl {', '.join(hooks.TESTED)}")
    states = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # verl warns about engines that are not installed
        for state, subject, text in _checks():
            print(f"{state:5}  {subject}: {text}")
            states.append(state)
    errors = states.count("error")
    if errors:
        print(f"{errors} of {len(states)} checks failed. A run that needs one of the failed parts raises an error.")
    else:
        print("No check failed.")
    return 1 if errors else 0


def _checks() -> Iterator[Line]:
    required = list(_required())
    yield from required
    yield from _optional()
    if any(state == "error" for state, _, _ in required):
        return
    yield _plugin()
    yield from _hooks()
    yield _faster_update()
    yield from _estimators()


def _required() -> Iterator[Line]:
    for package in REQUIRED:
        try:
            module: Any = importlib.import_module(package)
        except Exception as error:  # noqa: BLE001 - report any failure
            text = f"The package cannot be imported ({error!r})."
            fix = "Fix this error, and run doctor again."
            if isinstance(error, ModuleNotFoundError) and error.name == package:
                text = "The package is not installed."
                fix = "Install it with: pip install 'verl_ext[verl]'"
            yield "error", package, f"{text} {fix}"
        else:
            yield _version(package, module)


def _version(package: str, module: Any) -> Line:
    """Report the version of an imported package. A folder of the same name can be imported, but has no version."""
    if hasattr(module, "__version__"):
        return "ok", package, f"{module.__version__} in {os.path.dirname(module.__file__ or '')}"
    folders = [str(folder) for folder in getattr(module, "__path__", ())]
    fix = "Install the package again."
    if folders and not getattr(module, "__file__", None):
        fix = f"Python has found a folder of this name, {folders[0]}. Run doctor in another folder."
    return "error", package, f"The module has no __version__, so it is not the package {package}. {fix}"


def _optional() -> Iterator[Line]:
    for package, fix in OTHER_PACKAGES.items():
        try:
            yield "ok", package, version(package)
        except PackageNotFoundError:
            alternative = _without_flash_attn() if package == "flash-attn" else ""
            yield "note", package, f"The package is not installed. {fix}{alternative}."


def _without_flash_attn() -> str:
    """Return the settings with which a run does not need flash-attn; empty if torch is not installed."""
    try:
        rule: Any = importlib.import_module("verl_ext.update.rule")
    except ImportError:
        return ""
    return f". Otherwise set {rule.PACKED}"


def _plugin() -> Line:
    if PLUGIN in sys.modules:
        return "ok", "plugin", "verl has loaded the plugin of verl_ext."
    policy = os.environ.get(POLICY, "auto").strip()
    if policy.lower() != "auto":
        text = f"{POLICY}={policy} prevents verl from loading the plugin of verl_ext."
        return "error", "plugin", f"{text} Remove this environment variable on every node."
    try:
        importlib.import_module(PLUGIN)
    except Exception as error:  # noqa: BLE001 - report any failure, because verl hides it
        return "error", "plugin", f"The plugin of verl_ext cannot be imported ({error!r}). {REINSTALL}"
    return "error", "plugin", f"verl has not loaded the plugin of verl_ext, which can be imported. {REINSTALL}"


def _hooks() -> Iterator[Line]:
    """Import each module, which runs its hook. A trainer that verl does not start by default may be missing."""
    default = Path(sys.modules["verl"].__file__ or "").with_name("trainer") / "config" / "ppo_trainer.yaml"
    other_trainer = not read_yaml(default)["trainer"].get("use_v1")
    for hook in hooks.HOOKS:
        subject = f"hook into {hook.module}"
        try:
            importlib.import_module(hook.module)
        except Exception as error:  # noqa: BLE001 - report any failure
            hook.state, hook.error = "failed", error
        if hook.state == "holds":
            yield "ok", subject, hook.purpose
        elif hook.module == hooks.TRAINERS[other_trainer]:
            text = f"The hook ({hook.purpose}) failed: {_problem(hook.error)}"
            yield "note", subject, f"{text} Only runs with trainer.use_v1={other_trainer} need it."
        else:
            yield "error", subject, f"The hook ({hook.purpose}) failed: {_problem(hook.error)}"


def _faster_update() -> Line:
    from verl_ext.update import install_engine

    subject = "verl's FSDP engine"
    if problem := install_engine():
        return "error", subject, f"The faster update does not work: {_with_versions(problem)}"
    return "ok", subject, "faster update"


def _problem(error: Exception | None) -> str:
    """Write the error of a hook with the versions of verl."""
    return _with_versions(str(error) if isinstance(error, IntegrationError) else repr(error))


def _with_versions(problem: str) -> str:
    versions = hooks.versions()
    return problem if versions in problem else f"{problem.rstrip('.')}. {versions}"


def _estimators() -> Iterator[Line]:
    from verl_ext.registry import ADDED_ESTIMATORS, load
    from verl_ext.run_config import CORE, owner

    holds = any(hook.module == CORE and hook.state == "holds" for hook in hooks.HOOKS)
    for name in ADDED_ESTIMATORS:
        subject = f"estimator {name}"
        try:
            load(name)
        except ConfigurationError as error:
            yield "error", subject, str(error)
        else:
            if not holds:
                text = "The estimator is not registered with verl."
                yield "error", subject, f"{text} Fix the errors of the plugin and the hooks above."
            elif (other := owner(name)) is not None:
                text = f"{other} has registered this name with verl, so verl uses that estimator instead of verl_ext's."
                yield "note", subject, f"{text} Remove the registration to use verl_ext's."
            else:
                yield "ok", subject, "computed by verl_ext"
