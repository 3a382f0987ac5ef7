"""`python -m verl_ext doctor`: check that verl loads this package here and that all hooks hold."""

import argparse
import importlib
import os
import platform
import sys
import warnings
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from verl_ext import __version__, hooks
from verl_ext.conf import read_yaml
from verl_ext.errors import ConfigurationError
from verl_ext.names import CORE, owner
from verl_ext.registry import INSTALLED, load
from verl_ext.update import make_ready
from verl_ext.update.rule import PACKED

PLUGIN = "verl_ext.plugin"
POLICY = "VERL_USE_EXTERNAL_PLUGINS"
_PACKAGES = ("verl", "torch", "numpy", "ray", "TransferQueue", "tensordict", "transformers", "vllm", "flash-attn")
_REINSTALL = "the installation of verl_ext is incomplete: repeat your pip install with --force-reinstall --no-deps"

Line = tuple[str, str]
"""What a check found: `ok`, `note` or `FAIL`, and the text; an empty word for a heading."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command: it has none."""


def doctor(_options: argparse.Namespace) -> int:
    """Print a report; return 1 if something is wrong."""
    print(f"verl_ext {__version__} on Python {platform.python_version()}, tested with verl {', '.join(hooks.TESTED)}")
    failures = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # verl warns about engines that are not installed
        for word, text in _checks():
            print(f"  {word:4}  {text}" if word else text)
            failures += word == "FAIL"
    print(f"{failures} problem(s): a run that needs one of these is refused" if failures else "no problems found")
    return 1 if failures else 0


def _fail(text: str, remedy: str) -> Line:
    """Return the line for a problem that would break a run."""
    return "FAIL", f"{text}\n        {remedy}"


def _checks() -> Iterator[Line]:
    yield "", "versions"
    for package in _PACKAGES:
        try:
            yield "note", f"{package} {version(package)}"
        except PackageNotFoundError:
            remedy = f": on a GPU install it, or set {PACKED}" if package == "flash-attn" else ""
            yield "note", f"{package} is not installed{remedy}"
    try:
        verl = importlib.import_module("verl")
        # A folder called verl has no version.
        yield "ok", f"verl {verl.__version__} from {os.path.dirname(verl.__file__ or '')}"
    except Exception as error:  # noqa: BLE001 - report any failure
        yield _fail(f"verl cannot be imported: {error!r}", "install it: pip install 'verl_ext[verl]'")
        return
    yield "", "plugin"
    yield _plugin()
    yield "", "hooks into verl"
    yield from _hooks()
    yield "", "estimators in verl's registry"
    yield from _registry()


def _plugin() -> Line:
    if PLUGIN in sys.modules:
        return "ok", "verl loaded the plugin"
    policy = os.environ.get(POLICY, "auto").strip()
    if policy.lower() != "auto":
        return _fail(f"{POLICY}={policy} keeps verl from loading the plugin", "unset it on every node")
    try:
        importlib.import_module(PLUGIN)
    except Exception as error:  # noqa: BLE001 - report any failure, because verl hides it
        return _fail(f"the plugin cannot be imported: {error!r}", _REINSTALL)
    return _fail("verl did not load the plugin although it can be imported", _REINSTALL)


def _hooks() -> Iterator[Line]:
    """Import each module, which runs its hook. verl may lack the trainer that its main does not start by default."""
    default = Path(sys.modules["verl"].__file__ or "").with_name("trainer") / "config" / "ppo_trainer.yaml"
    spare = hooks.TRAINERS[not read_yaml(default)["trainer"].get("use_v1")]
    for hook in hooks.HOOKS:
        place = f"{hook.module}: {hook.purpose}"
        try:
            importlib.import_module(hook.module)
        except Exception as error:  # noqa: BLE001 - report any failure
            hook.state, hook.error = "failed", error
        if hook.state == "holds":
            yield "ok", place
        elif hook.module == spare:
            yield "note", f"{place}: not here ({hook.error})"
        else:
            yield _fail(f"{place}: {hook.error!r}", hooks.versions())
    place, problem = "verl's FSDP engine: a shorter update", make_ready()
    yield _fail(f"{place}: {problem}", hooks.versions()) if problem else ("ok", place)


def _registry() -> Iterator[Line]:
    holds = any(hook.module == CORE and hook.state == "holds" for hook in hooks.HOOKS)
    for name in INSTALLED:
        try:
            load(name)
        except ConfigurationError as error:
            yield _fail(f"{name} is broken: {error}", "mend or uninstall its package")
        else:
            if not holds:
                yield _fail(f"{name} is not registered", "see the plugin and the hooks above")
            elif (other := owner(name)) is not None:
                yield "note", f"{name} by {other}, which computes in the place of verl_ext"
            else:
                yield "ok", f"{name} by verl_ext"
