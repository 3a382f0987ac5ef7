"""Each kind of pin; and nothing of verl is touched that is not pinned."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
import sys
from pathlib import Path

import pytest

import verl_ext
from tests.facts import says
from verl_ext.integration.compat import contract
from verl_ext.integration.compat.pins import Pin, check

SOURCE = Path(verl_ext.__file__).parent


# -- each kind of pin -------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Fields:
    kept: int = 0


async def waiting(keys, *, over=0):
    return keys, over


async def streaming(keys):
    yield keys


def plain(keys, over):
    return {"label": keys}, over


number = 3
HERE = sys.modules[__name__]
KINDS = {
    "there": (Pin("absent"), ("m.absent", "not exist")),
    "nested": (Pin("Fields.absent"), ("m.Fields.absent", "not exist")),
    "takes": (Pin("plain", takes=("keys",)), ("m.plain", "(keys, over)", "(keys)")),
    "takes, of no function": (Pin("number", takes=("keys",)), ("m.number", "not a function")),
    "takes, in another order": (Pin("plain", takes=("over", "keys")), ("m.plain", "(keys, over)", "(over, keys)")),
    "accepts": (Pin("plain", accepts=("over", "axis")), ("m.plain", "axis", "(keys, over)")),
    "accepts, of no function": (Pin("number", accepts=("keys",)), ("m.number", "not a function")),
    "has": (Pin("Fields", has=("kept", "lost")), ("m.Fields", "lost")),
    "kind": (Pin("number", kind=dict), ("m.number", "int", "dict")),
    "coroutine": (Pin("plain", coroutine=True), ("m.plain", "not a coroutine")),
    "no coroutine": (Pin("waiting", coroutine=False), ("m.waiting", "became a coroutine")),
    "own": (Pin("plain", own=True), ("m.plain", f"{__name__}.plain", "its own")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_pin_says_what_is_not_so(kind: str) -> None:
    pin, found = KINDS[kind]
    (told,) = check("m", HERE, pin)
    assert says(told, *found)


@pytest.mark.parametrize(
    "pin",
    [
        Pin("plain", takes=("keys", "over")),
        Pin("waiting", takes=("keys",), coroutine=True),
        Pin("waiting", accepts=("over",)),
        Pin("streaming", takes=("keys",), coroutine=True),
        Pin("Fields", has=("kept",), kind=type),
        Pin("plain", coroutine=False),
    ],
)
def test_what_is_as_pinned_is_not_mentioned(pin: Pin) -> None:
    assert list(check("m", HERE, pin)) == []


def test_what_is_defined_where_it_is_expected_is_its_own() -> None:
    assert list(check(__name__, HERE, Pin("Fields", own=True))) == []


# -- nothing of verl's is touched that is not pinned ------------------------------------------------------------------


def imported() -> set[tuple[str, str]]:
    """What the package imports of verl, as (module, name)."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and re.match(r"(verl|transfer_queue|vllm)(\.|$)", node.module or ""):
                found |= {(str(node.module), alias.name) for alias in node.names}
    return found


def test_whatever_is_imported_of_verl_is_pinned() -> None:
    modules = contract.VERL.keys() | contract.CPU.keys()
    pinned = {
        (module, pin.name.partition(".")[0])
        for table in (contract.VERL, contract.CPU)
        for module, pins in table.items()
        for pin in pins
    }
    loose = {
        (module, name)
        for module, name in imported()
        if (module, name) not in pinned and f"{module}.{name}" not in modules
    }
    assert len(imported()) > 10
    assert loose == set()


def test_every_module_with_a_hook_or_a_patch_is_pinned() -> None:
    import verl  # noqa: F401 - loads the plugin

    from verl_ext.cpu.patches import PATCHES
    from verl_ext.integration.compat.hooks import HOOKS

    mine = {"hydra.core.config_store"}
    assert set(HOOKS) - set(contract.VERL) == mine
    assert set(PATCHES) - set(contract.VERL) - set(contract.CPU) == set()


def test_every_setting_that_is_selected_by_its_path_is_pinned() -> None:
    read = set()
    for path in (SOURCE / "integration").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        text = text.replace("{ACTOR}", "actor_rollout_ref.actor").replace("{FUNCTION}", "reward.custom_reward_function")
        read |= set(re.findall(r'select\([^"()]*"(\w[\w.]+)"', text))
    assert len(read) > 10
    # The user adds these, which verl's own file does not have.
    added = ("algorithm.filter_groups", "algorithm.verl_ext", "reward.custom_reward_function.reward_kwargs")
    assert {path for path in read if not path.startswith(added)} - set(contract.SETTINGS) == set()


def test_modules_of_the_table_exist_and_are_of_verl_or_what_it_uses() -> None:
    for name in (*contract.VERL, *contract.CPU):
        assert name.partition(".")[0] in ("verl", "transfer_queue", "vllm", "importlib")
        assert importlib.util.find_spec(name.partition(".")[0]) or name.startswith("vllm")
