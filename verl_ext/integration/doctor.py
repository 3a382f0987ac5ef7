"""`python -m verl_ext doctor`: check that verl loads this package here and that all hooks work."""

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
from verl_ext.errors import ConfigurationError, IntegrationError
from verl_ext.estimators import ESTIMATORS
from verl_ext.integration.compat import contract, hooks, versions
from verl_ext.registry import declaration

PLUGIN = "verl_ext.integration.plugin"
POLICY = "VERL_USE_EXTERNAL_PLUGINS"
_PACKAGES = ("verl", "torch", "numpy", "ray", "TransferQueue", "tensordict", "transformers", "hydra-core", "vllm")
# verl_ext is not on a package index; a package of that name there would not be ours.
_INSTALL = "pip install -e '.[verl]' in a clone of verl_ext"
_REINSTALL = "the installation of verl_ext is incomplete: pip install --force-reinstall --no-deps -e . in a clone of it"
_SUPPORTED = f"supported: verl>={versions.OLDEST}, tested with {' and '.join(versions.TESTED)}"
# Runs that do not use these modules do not need the hooks into them.
_OPTIONAL = "verl.experimental."
# Packages that verl's default trainer imports and verl's base requirements lack.
_NEEDED = ("transfer_queue", "cachetools", "fastapi", "uvicorn")


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
    """Print a report and return the exit status."""
    return diagnose(verbose=options.verbose)


def diagnose(*, verbose: bool = False) -> int:
    """Print a report; 1 if something is wrong."""
    report = Report(verbose=verbose)
    print(f"verl_ext {__version__} on Python {platform.python_version()}")
    print("versions")
    for package in _PACKAGES:
        try:
            print(f"        {package} {version(package)}")
        except PackageNotFoundError:
            print(f"        {package} is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # verl warns about engines that are not installed
        if _verl(report):
            _plugin(report)
            _modules(report)
            _registry(report)
            _hooks(report)
            _contract(report)
            _callers(report)
    if report.failures:
        print(f"{report.failures} problem(s): a run with these estimators would not work here")
    else:
        print("no problems found")
    return 1 if report.failures else 0


def _verl(report: Report) -> bool:
    print("verl")
    try:
        module = importlib.import_module("verl")
        found = str(module.__version__)
    except Exception as error:  # noqa: BLE001 - report any failure
        remedy = "install it" if isinstance(error, ImportError) else "reinstall it"
        report.fail(f"verl cannot be imported: {error!r}", f"{remedy}: {_INSTALL}", error)
        return False
    if versions.order(found) < versions.order(versions.OLDEST):
        report.fail(f"verl {found} has no plugins", f"install verl>={versions.OLDEST}")
        return False
    report.ok(f"verl {found} from {os.path.dirname(module.__file__ or '')}")
    if versions.order(found) > versions.order(versions.TESTED[-1]):
        report.note(f"verl {found} is newer than the last tested release {versions.TESTED[-1]}")
    return True


def _plugin(report: Report) -> None:
    print("plugin")
    points = [point for point in entry_points(group="verl.plugins") if point.value == PLUGIN]
    if not points:
        report.fail(
            f"no entry point in the group verl.plugins has the value {PLUGIN}",
            f"install the package instead of putting it on PYTHONPATH: {_INSTALL}",
        )
    policy = os.environ.get(POLICY, "auto").strip()
    if PLUGIN in sys.modules:
        error = sys.modules[PLUGIN].broken
        if error is None:
            report.ok("verl loaded the plugin")
        else:
            report.fail(f"the plugin could not be set up: {type(error).__name__}: {error}", _REINSTALL, error)
    elif policy.lower() != "auto":
        names = ", ".join(sorted({point.name for point in points})) or "verl_ext"
        report.fail(
            f"{POLICY}={policy} keeps verl from loading the plugin", f"unset it, or add {names} to it, on every node"
        )
    elif points:
        try:
            points[0].load()
        except Exception as error:  # noqa: BLE001 - report any failure, because verl hides it
            report.fail(
                f"the plugin cannot be imported: {type(error).__name__}: {error}",
                f"verl hides this error: {_REINSTALL}",
                error,
            )
        else:
            report.fail("verl did not load the plugin although it can be imported", "this verl loads no plugins")
    others = sorted({p.name for p in entry_points(group="verl.plugins") if p.value != PLUGIN})
    if others:
        report.note(f"other plugins of verl: {', '.join(others)}")


def _modules(report: Report) -> None:
    print("modules of verl")
    for name in _NEEDED:
        try:
            importlib.import_module(name)
        except ImportError as error:
            report.fail(f"{name} is missing: {error}", f"verl's default trainer imports it: {_INSTALL}")
    for name in dict.fromkeys([*(hook.module for hook in hooks.HOOKS.values()), "verl.trainer.ppo.v1"]):
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - report any failure to import
            if name.startswith(_OPTIONAL) and contract.lacks_package(name, error):
                report.note(f"{name} cannot be used here: {error}")
            else:
                report.fail(f"{name} cannot be imported: {type(error).__name__}: {error}", "see --verbose", error)
        else:
            report.ok(name)


def _registry(report: Report) -> None:
    print("estimators in verl's registry")
    try:
        registry = importlib.import_module("verl.trainer.ppo.core_algos").ADV_ESTIMATOR_REGISTRY
    except (ImportError, AttributeError) as error:
        report.fail(f"verl's registry of estimators is missing: {error}", "see --verbose", error)
        return
    for name in ESTIMATORS:
        function = registry.get(name)
        if function is None:
            report.fail(f"{name} is not registered", "see the plugin and hooks sections")
        elif function.__module__ == PLUGIN:
            report.fail(f"{name} raises an error when it is called", "see the plugin section")
        elif not getattr(function, hooks.MARK, False):
            report.fail(f"{name} is registered by {function.__module__}", "another package replaced it, or see above")
        elif (broken := _broken(name)) is not None:
            report.fail(f"{name} is broken: {broken}", "mend or uninstall its package", broken)
        else:
            report.ok(f"{name} by verl_ext{hooks.in_place_of(function)}")
    report.note(f"others: {', '.join(sorted(set(registry) - set(ESTIMATORS)))}")


def _broken(name: str) -> Exception | None:
    """What keeps an estimator from being declared, if anything."""
    try:
        declaration(name)
    except ConfigurationError as error:
        return error
    return None


def _hooks(report: Report) -> None:
    print("hooks into verl")
    for hook in hooks.HOOKS.values():
        if hook.state == "failed" and hook.guard is not None:
            report.note(f"{hook.module}: {hook.purpose}: the guard {hook.guard} is off: {hook.error}")
        elif hook.state == "holds":
            report.ok(f"{hook.module}: {hook.purpose}")
        elif hook.state == "pending" and hook.module.startswith(_OPTIONAL) and hook.module not in sys.modules:
            report.note(f"{hook.module}: {hook.purpose}: not used here")
        else:
            reason = hook.error if hook.error is not None else "it never ran"
            moved = isinstance(hook.error, IntegrationError | AttributeError)
            remedy = _SUPPORTED if moved or hook.error is None else _REINSTALL
            report.fail(f"{hook.module}: {hook.purpose}: {reason}", remedy, hook.error)


def _contract(report: Report) -> None:
    print("what verl_ext touches of verl")
    for text in contract.moved():
        report.fail(text, _SUPPORTED)
    for switch, missing in contract.guards_off().items():
        report.note(f"the guard {switch} is off with this verl: {'; '.join(missing)}")
    for text in contract.moved(cpu=True):
        if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
            report.fail(text, _SUPPORTED)
        else:
            report.note(f"{text}: runs without a GPU (+verl_ext=cpu) would not work")
    report.ok(f"{contract.size()} functions, classes and settings checked")


def _callers(report: Report) -> None:
    """Check what verl's modules call. Runs last, because the other checks import these modules."""
    print("what verl's modules call")
    name = "compute_advantage"
    bare = hooks.unwrapped(name)
    for path in bare:
        report.fail(f"{path} is verl's own function, without verl_ext's wrapper", _SUPPORTED)
    if not bare:
        report.ok(f"{name} of every imported module has verl_ext's wrapper")
