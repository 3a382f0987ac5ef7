"""Check that verl has what `used` lists. If another verl has moved something, the errors list everything that moved."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from verl_ext.errors import IntegrationError
from verl_ext.integration.compat.pins import Pin, check
from verl_ext.integration.compat.used import CPU, CPU_SETTINGS, SETTINGS, VERL


def moved(*, cpu: bool = False) -> list[str]:
    """One message for each essential thing that this verl lacks; with `cpu`, for what runs without a GPU need.

    A module that cannot be imported because another package is not installed does not count.
    """
    table, settings = (CPU, CPU_SETTINGS) if cpu else (VERL, SETTINGS)
    return [*_of_table(table), *_of_settings(settings)]


def guards_off() -> dict[str, list[str]]:
    """The guards that do not work with this verl, each with what is missing."""
    switches = {pin.guard for pins in VERL.values() for pin in pins if pin.guard is not None}
    return {switch: missing for switch in sorted(switches) if (missing := list(_of_table(VERL, guard=switch)))}


def require(name: str, module: Any) -> None:
    """Raise one error that lists what a module lacks. Of a module that only guards need, check what they need."""
    essential = [pin for pin in VERL[name] if pin.guard is None]
    _raise_if_any(text for pin in essential or VERL[name] for text in check(name, module, pin))


def require_members(name: str, cls: str, owner: type, *members: str) -> None:
    """The same for members of another class that is used like the module's `cls`: a sampler of the user's."""
    where = f"{owner.__module__}.{owner.__qualname__}"
    pins = [replace(_pinned(VERL[name], f"{cls}.{member}"), name=member) for member in members]
    _raise_if_any(text for pin in pins for text in check(where, owner, pin))


def member(name: str, module: Any, path: str) -> Any:
    """A member of a module that is patched for runs without a GPU; raise unless it is as pinned."""
    _raise_if_any(check(name, module, _pinned(CPU[name], path)))
    return operator.attrgetter(path)(module)


def _pinned(pins: tuple[Pin, ...], path: str) -> Pin:
    return next(pin for pin in pins if pin.name == path)


def _raise_if_any(messages: Iterable[str]) -> None:
    if complaints := list(messages):
        raise IntegrationError(f"{'; '.join(complaints)}: this version of verl changed what verl_ext hooks into")


def size() -> int:
    """How many things are pinned."""
    return sum(len(pins) for table in (VERL, CPU) for pins in table.values()) + len(SETTINGS) + len(CPU_SETTINGS)


def lacks_package(name: str, error: BaseException) -> bool:
    """Whether a module failed to import because another package is not installed."""
    missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return missing not in ("", name.partition(".")[0], "verl_ext")


def _of_table(table: Mapping[str, tuple[Pin, ...]], guard: str | None = None) -> Iterator[str]:
    """What is missing of that which a guard needs; without one, of the essential things."""
    for name, every in table.items():
        pins = [pin for pin in every if pin.guard == guard]
        if not pins or ("vllm" in name and importlib.util.find_spec("vllm") is None):
            continue
        try:
            module = importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - any failure is listed
            if not lacks_package(name, error):
                yield f"{name} cannot be imported any more: {type(error).__name__}: {error}"
            continue
        for pin in pins:
            yield from check(name, module, pin)


@functools.cache
def _configuration() -> Any:
    import hydra

    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        return hydra.compose("ppo_trainer")


def _of_settings(paths: tuple[str, ...]) -> Iterator[str]:
    from omegaconf import OmegaConf

    try:
        config = _configuration()
    except Exception as error:  # noqa: BLE001 - any failure is listed
        yield (
            f"verl's configuration ppo_trainer cannot be composed any more, so {len(paths)} settings in it cannot be "
            f"checked: {type(error).__name__}: {error}"
        )
        return
    for path in paths:
        section, _, name = path.rpartition(".")
        above = OmegaConf.select(config, section)
        if not (OmegaConf.is_dict(above) and (name in above or OmegaConf.is_missing(above, name))):
            yield f"verl's configuration ppo_trainer has no {path} any more"
