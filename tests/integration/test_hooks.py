"""Callbacks after an import, wrappers and mixins, and the parameters that verl's functions must have."""

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
from verl_ext.trainers.default_trainer import DefaultTrainer
from verl_ext.trainers.mixin import require_passed_on, require_same_parameters, with_mixin
from verl_ext.trainers.ray_trainer import RayTrainer


class Mixin:
    """Methods of verl_ext that override those of a class of verl."""

    def __init__(self, config, *args, **kwargs):
        self.seen = config
        super().__init__(config, *args, **kwargs)

    def update(self, batch):
        return "mixin", super().update(batch)


class OfVerl:
    def __init__(self, config):
        self.config = config

    def update(self, batch):
        return batch


class RenamedParameter(OfVerl):
    def update(self, rows):
        return rows


class WithoutParameter(OfVerl):
    def __init__(self):
        pass


class WithoutMethod:
    def __init__(self, config):
        pass


@pytest.mark.parametrize(
    ("cls", "method"), [(RenamedParameter, "update"), (WithoutParameter, "__init__"), (WithoutMethod, "update")]
)
def test_a_class_without_the_expected_methods_and_parameters_is_refused(cls, method):
    with pytest.raises(IntegrationError, match=facts(cls.__name__, method, *hooks.TESTED)):
        require_same_parameters(Mixin, cls, ("__init__", "update"))


def add_module(monkeypatch, name, check):
    """Return a new imported module that has a function `check`."""
    module = ModuleType(name)
    module.check = check
    monkeypatch.setitem(sys.modules, name, module)
    return module


def test_modules_that_imported_the_function_get_its_wrapper(monkeypatch):
    def original(config):
        return config

    defining = add_module(monkeypatch, "somewhere.a", original)
    importing = add_module(monkeypatch, "somewhere.b", original)
    with_another_function = add_module(monkeypatch, "somewhere.c", len)
    of_another_package = add_module(monkeypatch, "elsewhere.d", original)
    monkeypatch.setitem(sys.modules, "somewhere.e", None)  # a module that must not be imported
    hooks.wrap(defining, "check", lambda original, config: ("wrapped", original(config)))
    assert defining.check(1) == ("wrapped", 1)
    assert importing.check(1) == ("wrapped", 1)
    assert with_another_function.check is len
    assert of_another_package.check is original


def plus_one(original: Callable[[int], int], number: int) -> int:
    return original(number) + 1


def times_ten(original: Callable[[int], int], number: int) -> int:
    return original(number) * 10


class Numbers:
    """An object whose function a test wraps."""

    def __init__(self, same: Callable[..., int]) -> None:
        self.same = same


def test_each_wrapper_wraps_a_function_only_once():
    numbers = Numbers(lambda number: number)
    for wrapper in (plus_one, plus_one, times_ten, times_ten):
        hooks.wrap(numbers, "same", wrapper)
    assert numbers.same(2) == 30


def test_another_plugins_wrapper_with_a_copy_of_the_mark_is_wrapped():
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
    message = facts("Numbers.same", parameters, "number", *hooks.TESTED)
    with pytest.raises(IntegrationError, match=message):
        hooks.wrap(numbers, "same", plus_one)
    assert numbers.same is original


@pytest.mark.parametrize(
    "original", [lambda number, more=0: number, lambda *numbers: numbers[0]], ids=["one more", "any"]
)
def test_a_function_with_more_parameters_is_wrapped(original):
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


def test_a_callback_is_called_after_the_import_and_each_reload(hooked):
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


def test_a_callback_that_is_added_during_the_import_is_called_once(hooked, monkeypatch):
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


def test_a_module_that_no_finder_knows_cannot_be_imported(hooked):
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


class WithCheckpoints:
    def save(self): ...

    def load(self): ...


class Helper:
    def call(self, trainer):
        return trainer.save()


def test_a_bound_method_may_call_the_overridden_method():
    call = Helper().call

    class Calls(WithCheckpoints):
        def save(self):
            return call(super())

    require_passed_on(Calls, WithCheckpoints, ("save", "load"))


def test_a_call_in_another_method_of_the_class_does_not_count():
    """Because of `super()`, the function `save` holds the class, which holds the function `load`."""

    class Skips(WithCheckpoints):
        def save(self):
            return super().__init__()

        def load(self):
            super().load()
            return super().save()

    require_passed_on(Skips, WithCheckpoints, ("load",))
    with pytest.raises(IntegrationError, match=facts("Skips.save", "super().save")):
        require_passed_on(Skips, WithCheckpoints, ("load", "save"))


def test_a_class_with_a_mixin_keeps_its_name():
    mixed = with_mixin(Mixin, OfVerl)
    assert mixed.__name__ == "OfVerl"
    assert mixed.__module__ == __name__
    assert mixed.__qualname__ == "OfVerl"
    assert mixed({"a": 1}).update(1) == ("mixin", 1)


def test_the_class_with_a_mixin_is_made_once():
    mixed = with_mixin(Mixin, OfVerl)
    assert with_mixin(Mixin, OfVerl) is mixed
    assert with_mixin(Mixin, mixed) is mixed


@pytest.mark.parametrize(("module", "mixin"), [("v1.trainer_base", DefaultTrainer), ("ray_trainer", RayTrainer)])
def test_the_page_names_the_methods_that_override_a_trainers(module, mixin):
    page = (Path(__file__).parents[2] / "docs/pages/internals.md").read_text(encoding="utf-8")
    row = re.search(rf"^\| `verl.trainer.ppo.{module}` \| .*?, overriding ([^|]*)", page, re.M)
    functions = {name for name, _ in getmembers(mixin, isfunction)}
    assert set(re.findall("`(.*?)`", row[1])) == functions
