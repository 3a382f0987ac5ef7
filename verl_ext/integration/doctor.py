"""`python -m verl_ext doctor`: check that verl loads this package here and that all hooks hold."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys
import traceback
import warnings
from importlib.metadata import PackageNotFoundError, entry_points, version

from verl_ext import __version__
from verl_ext.errors import ConfigurationError
from verl_ext.integration import hooks
from verl_ext.integration.run import in_place_of
from verl_ext.registry import ESTIMATORS, declaration

PLUGIN = "verl_ext.integration.plugin"
POLICY = "VERL_USE_EXTERNAL_PLUGINS"
_PACKAGES = ("verl", "torch", "numpy", "ray", "TransferQueue", "tensordict", "transformers", "hydra-core", "vllm")
# verl_ext is not on a package index; a package of that name there would not be ours.
_INSTALL = "pip install -e '.[verl]' in a clone of verl_ext"
_REINSTALL = "the installation of verl_ext is incomplete: pip install --force-reinstall --no-deps -e . in a clone of it"
TRAINERS = ("verl.trainer.ppo.v1.trainer_base", "verl.trainer.ppo.ray_trainer", "verl.experimental.")
"""Modules that this verl, or this installation, may lack: a run has one of these trainers."""


class Report:
    """Prints lines and counts the failures."""

    def __init__(self, *, verbose: bool) -> None:
        self.verbose, self.failures = verbose, 0

    def ok(self, text: str) -> None:
        """Print a check that passed."""
        print(f"  ok    {text}")

    def note(self, text: str) -> None:
        """Print information."""
        print(f"  note  {text}")

    def fail(self, text: str, remedy: str, error: BaseException | None = None) -> None:
        """Print a problem that would break a run, and its remedy."""
        self.failures += 1
        print(f"  FAIL  {text}\n        {remedy}")
        if self.verbose and error is not None:
            traceback.print_exception(error, file=sys.stdout)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("--verbose", action="store_true", help="show the tracebacks of what failed")


def doctor(options: argparse.Namespace) -> int:
    """Print a report; return 1 if something is wrong."""
    report = Report(verbose=options.verbose)
    print(f"verl_ext {__version__} on Python {platform.python_version()}, tested with verl {', '.join(hooks.TESTED)}")
    print("versions")
    for package in _PACKAGES:
        try:
            print(f"        {package} {version(package)}")
        except PackageNotFoundError:
            print(f"        {package} is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # verl warns about engines that are not installed
        try:
            verl = importlib.import_module("verl")
            # A folder called verl has no version.
            found = f"verl {verl.__version__} from {os.path.dirname(verl.__file__ or '')}"
        except Exception as error:  # noqa: BLE001 - report any failure
            report.fail(f"verl cannot be imported: {error!r}", f"install it: {_INSTALL}", error)
        else:
            report.ok(found)
            _plugin(report)
            _hooks(report)
            _registry(report)
    if report.failures:
        print(f"{report.failures} problem(s): a run with these estimators would not work here")
    else:
        print("no problems found")
    return 1 if report.failures else 0


def _plugin(report: Report) -> None:
    print("plugin")
    points = [point for point in entry_points(group="verl.plugins") if point.value == PLUGIN]
    if not points:
        report.fail(f"no entry point in the group verl.plugins has the value {PLUGIN}", _INSTALL)
    policy = os.environ.get(POLICY, "auto").strip()
    if PLUGIN in sys.modules:
        if (error := sys.modules[PLUGIN].broken) is None:
            report.ok("verl loaded the plugin")
        else:
            report.fail(f"the plugin could not be set up: {type(error).__name__}: {error}", _REINSTALL, error)
    elif policy.lower() != "auto":
        report.fail(f"{POLICY}={policy} keeps verl from loading the plugin", "unset it on every node")
    elif points:
        try:
            points[0].load()
        except Exception as error:  # noqa: BLE001 - report any failure, because verl hides it
            report.fail(f"the plugin cannot be imported: {type(error).__name__}: {error}", _REINSTALL, error)
        else:
            report.fail("verl did not load the plugin although it can be imported", "this verl loads no plugins")


def _hooks(report: Report) -> None:
    """Import each module, which runs its hook, then look for callers that hold verl's own functions."""
    print("hooks into verl")
    holding = []
    for hook in hooks.HOOKS.values():
        try:
            importlib.import_module(hook.module)
        except ImportError as error:
            if hook.module.startswith(TRAINERS):
                report.note(f"{hook.module}: not here ({error})")
            else:
                report.fail(f"{hook.module} cannot be imported: {error}", hooks.versions(), error)
        except Exception as error:  # noqa: BLE001 - report any failure
            report.fail(f"{hook.module} cannot be imported: {type(error).__name__}: {error}", _INSTALL, error)
        else:
            if hook.state == "holds":
                holding.append(hook.module)
                report.ok(f"{hook.module}: {hook.purpose}")
            else:
                report.fail(f"{hook.module}: {hook.purpose}: {hook.error}", hooks.versions(), hook.error)
    if hooks.HOOKS and not any(module.startswith(TRAINERS) for module in holding):
        report.fail("no trainer of this verl can be used", _INSTALL)
    for path in hooks.unwrapped("compute_advantage"):
        report.fail(f"{path} is verl's own function, without verl_ext's wrapper", hooks.versions())


def _registry(report: Report) -> None:
    print("estimators in verl's registry")
    try:
        registry = importlib.import_module("verl.trainer.ppo.core_algos").ADV_ESTIMATOR_REGISTRY
    except (ImportError, AttributeError) as error:
        report.fail(f"verl's registry of estimators is missing: {error}", hooks.versions(), error)
        return
    for name in ESTIMATORS:
        function = registry.get(name)
        try:
            declaration(name)
        except ConfigurationError as error:
            report.fail(f"{name} is broken: {error}", "mend or uninstall its package", error)
            continue
        if hasattr(function, hooks.MARK):
            report.ok(f"{name} by verl_ext{in_place_of(function)}")
        else:
            report.fail(f"{name} is not registered", "see the plugin and the hooks above")
