"""Functions that are called after an import, wrappers and mixins: which parameters verl's functions must have."""

import functools
import importlib
import re
import sys
from collections.abc import Callable
from inspect import getmembers, isfunction
from pathlib import Path
from types import ModuleType

import pytest

from tests.facts import facts
from verl_ext import hooks
from verl_ext.errors import IntegrationError
from verl_ext.overrides import require_passed_on
from verl_ext.trainers.default_trainer import DefaultTrainer
from verl_ext.trainers.mixin import require_same_parameters, with_mixin
from verl_ext.trainers.ray_trainer import RayTrainer


class Ours:
    def __init__(self, config, *args, **kwargs):
        self.seen = config
        super().__init__(config, *args, **kwargs)

    def update(self, batch):
        return "ours", super().update(batch)


class Verls:
    def __init__(self, config):
        self.config = config

    def update(self, batch):
        return batch


class Renamed(Verls):
    def update(self, rows):
        return rows


class Short(Verls):
    def __init__(self):
        pass


class Without:
    def __init__(self, config):
        pass


@pytest.mark.parametrize(("cls", "named"), [(Renamed, "update"), (Short, "__init__"), (Without, "update")])
def test_other_parameters_of_verls_class_and_a_method_that_is_gone_are_refused(cls, named):
    with pytest.raises(IntegrationError, match=facts(cls.__name__, named, *hooks.TESTED)):
        require_same_parameters(Ours, cls, ("__init__", "update"))


def test_a_module_that_imported_the_name_before_gets_the_new_function(monkeypatch):
    def original(config):
        return config

    defining, holding, other = ModuleType("somewhere.a"), ModuleType("somewhere.b"), ModuleType("elsewhere.c")
    for module in (defining, holding, other):
        module.check = original
        monkeypatch.setitem(sys.modules, module.__name__, module)
    different = ModuleType("somewhere.d")
    different.check = len
    monkeypatch.setitem(sys.modules, "somewhere.d", different)
    monkeypatch.setitem(sys.modules, "somewhere.e", None)  # a module that must not be imported
    hooks.wrap(defining, "check", lambda original, config: ("ours", original(config)))
    assert defining.check(1) == holding.check(1) == ("ours", 1)
    assert other.check(1) == 1
    assert different.check is len


def plus_one(original: Callable[[int], int], number: int) -> int:
    return original(number) + 1


def times_ten(original: Callable[[int], int], number: int) -> int:
    return original(number) * 10


class Numbers:
    """An object whose function a test wraps."""

    def __init__(self, same: Callable[..., int]) -> None:
        self.same = same


def test_a_function_is_wrapped_once_by_the_same_function_and_again_by_another():
    numbers = Numbers(lambda number: number)
    for around in (plus_one, plus_one, times_ten, times_ten):
        hooks.wrap(numbers, "same", around)
    assert numbers.same(2) == 30


def test_a_wrapper_of_another_plugin_with_a_copy_of_the_mark_is_wrapped_again():
    numbers = Numbers(lambda number: number)
    hooks.wrap(numbers, "same", plus_one)

    @functools.wraps(numbers.same)
    def without_call(number):
        return 100

    numbers.same = without_call
    hooks.wrap(numbers, "same", plus_one)
    assert numbers.same(2) == 101


def no_parameters() -> int: ...


@pytest.mark.parametrize(
    ("original", "parameters"), [(lambda rows: rows, "rows"), (no_parameters, "none")], ids=["another name", "none"]
)
def test_a_function_with_other_parameters_is_not_wrapped(original, parameters):
    numbers = Numbers(original)
    named = ("Numbers.same", parameters, "number", *hooks.TESTED)
    with pytest.raises(IntegrationError, match=facts(*named)):
        hooks.wrap(numbers, "same", plus_one)
    assert numbers.same is original


@pytest.mark.parametrize("original", [lambda number, more=0: number, lambda *numbers: numbers[0]])
def test_a_function_with_more_parameters_or_with_any_is_wrapped(original):
    numbers = Numbers(original)
    hooks.wrap(numbers, "same", plus_one)
    assert numbers.same(2) == 3


@pytest.fixture
def hooked(tmp_path, monkeypatch):
    """Return a function that writes the module `hooked`, whose last line sets `executed`."""
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(hooks._finder, "callbacks", {})
    monkeypatch.syspath_prepend(tmp_path)

    def write(*lines: str) -> None:
        (tmp_path / "hooked.py").write_text("\n".join((*lines, "executed = True")))

    yield write
    sys.modules.pop("hooked", None)


def recorder(calls: list, name: str) -> Callable[[ModuleType], None]:
    """Return a callback that records its name and whether the module was executed."""
    return lambda module: calls.append((name, getattr(module, "executed", False)))


def test_a_callback_is_called_after_the_import_after_a_reload_and_now_if_the_module_is_imported(hooked):
    hooked()
    calls = []
    hooks.after_import("hooked", recorder(calls, "before"))
    assert calls == []
    module = importlib.import_module("hooked")
    assert calls == [("before", True)]
    assert type(module.__spec__.loader).__name__ == "SourceFileLoader"
    hooks.after_import("hooked", recorder(calls, "later"))
    assert calls == [("before", True), ("later", True)]
    importlib.reload(module)
    assert calls == [("before", True), ("later", True)] * 2


def test_a_callback_that_is_added_during_the_import_is_called_once_after_the_import(hooked, monkeypatch):
    hooked("import adding", "adding.add()")
    calls = []
    adding = ModuleType("adding")
    adding.add = lambda: hooks.after_import("hooked", recorder(calls, "during"))
    monkeypatch.setitem(sys.modules, "adding", adding)
    hooks.after_import("hooked", recorder(calls, "before"))
    importlib.import_module("hooked")
    assert calls == [("before", True), ("during", True)]


def test_a_callback_that_another_callback_adds_is_called_once(hooked):
    hooked()
    calls = []
    hooks.after_import("hooked", lambda module: hooks.after_import("hooked", recorder(calls, "added")))
    importlib.import_module("hooked")
    assert calls == [("added", True)]


def test_a_module_that_no_finder_knows_is_not_there(hooked):
    hooks.after_import("hooked", lambda module: None)
    with pytest.raises(ModuleNotFoundError, match="hooked"):
        importlib.import_module("hooked")


def test_a_hook_that_is_registered_twice_runs_once(hooked, monkeypatch):
    hooked()
    calls = []
    monkeypatch.setattr(hooks, "HOOKS", [])
    monkeypatch.setattr(hooks, "resolve", lambda target: recorder(calls, target))
    for _ in range(2):
        hooks.schedule(hooks.Hook("hooked", "a:install", "a"), hooks.Hook("hooked", "b:install", "b"))
    importlib.import_module("hooked")
    assert calls == [("a:install", True), ("b:install", True)]
    assert [hook.state for hook in hooks.HOOKS] == ["holds", "holds"]


def test_a_hook_that_failed_refuses_the_runs_that_need_its_module(monkeypatch):
    error = ValueError("the reason")
    failed = hooks.Hook("verl.a", "a:install", "for a", "failed", error)
    monkeypatch.setattr(hooks, "HOOKS", [failed, hooks.Hook("verl.b", "b:install", "for b", "holds")])
    hooks.require("verl.b", "verl.c")
    for modules in ((), ("verl.a",), ("verl.b", "verl.a")):
        with pytest.raises(IntegrationError, match=facts("verl.a", "for a", "the reason", "doctor")) as raised:
            hooks.require(*modules)
        assert "verl.b" not in str(raised.value)
        assert raised.value.__cause__ is error


class Saving:
    def save(self): ...

    def load(self): ...


class Helper:
    def call(self, trainer):
        return trainer.save()


def test_a_bound_method_that_a_method_calls_may_call_the_overridden_method():
    call = Helper().call

    class Calls(Saving):
        def save(self):
            return call(super())

    require_passed_on(Calls, Saving, ("save", "load"))


def test_another_method_of_the_class_that_calls_the_overridden_method_does_not_count():
    """Because of `super()`, the function `save` holds the class, which holds the function `load`."""

    class Skips(Saving):
        def save(self):
            return super().__init__()

        def load(self):
            super().load()
            return super().save()

    require_passed_on(Skips, Saving, ("load",))
    with pytest.raises(IntegrationError, match=facts("Skips.save", "super().save")):
        require_passed_on(Skips, Saving, ("load", "save"))


def test_a_class_under_a_mixin_keeps_its_name_and_is_made_once():
    mixed = with_mixin(Ours, Verls)
    assert (mixed.__name__, mixed.__module__, mixed.__qualname__) == ("Verls", __name__, "Verls")
    assert with_mixin(Ours, Verls) is with_mixin(Ours, mixed) is mixed
    assert mixed({"a": 1}).update(1) == ("ours", 1)


@pytest.mark.parametrize(("module", "ours"), [("v1.trainer_base", DefaultTrainer), ("ray_trainer", RayTrainer)])
def test_the_page_names_the_methods_that_stand_over_a_trainers(module, ours):
    page = (Path(__file__).parents[2] / "docs/pages/verl.md").read_text(encoding="utf-8")
    (cell,) = re.findall(rf"^\| `verl.trainer.ppo.{module}` \| .*? methods of ours over ([^;|]*)", page, re.M)
    functions = {name for name, _ in getmembers(ours, isfunction)}
    assert set(re.findall("`(.*?)`", cell)) == functions
