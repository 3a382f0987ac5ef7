"""A wrapper and a mixin: which parameters verl must have, what overrides may do, and who finds the new function."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from tests.facts import facts
from verl_ext.errors import IntegrationError
from verl_ext.integration import hooks


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


class Wrapped(Verls):
    """As another plugin may have wrapped it."""

    def update(self, *args, **kwargs):
        return super().update(*args, **kwargs)


def test_a_class_under_a_mixin_keeps_its_name_and_is_made_once():
    mixed = hooks.under(Ours, Verls)
    assert (mixed.__name__, mixed.__module__, mixed.__qualname__) == ("Verls", __name__, "Verls")
    assert hooks.under(Ours, Verls) is hooks.under(Ours, mixed) is mixed
    assert mixed({"a": 1}).update(1) == ("ours", 1)


@pytest.mark.parametrize(("cls", "named"), [(Renamed, "update"), (Short, "__init__")])
def test_other_parameters_of_verls_class_are_refused(cls, named):
    with pytest.raises(IntegrationError, match=facts(f"{cls.__name__}.{named}", "0.9.0 and 0.9.1")):
        hooks.require_methods(cls, Ours)


@pytest.mark.parametrize("cls", [Verls, Wrapped])
def test_a_class_with_the_methods_is_accepted(cls):
    hooks.require_methods(cls, Ours)


class BySuper(hooks.under(Ours, Verls)):
    def update(self, batch):
        return "sub", super().update(batch)


class ByName(hooks.under(Ours, Verls)):
    def update(self, batch):
        return "sub", Verls.update(self, batch)


class Without(hooks.under(Ours, Verls)):
    def update(self, batch):
        return "sub", batch


def test_an_override_that_does_not_call_the_overridden_method_is_refused():
    hooks.require_passed_on(BySuper, Ours, ["update"])
    hooks.require_passed_on(ByName, Ours, ["update"])
    hooks.require_passed_on(Without, Ours, ["__init__"])
    for cls in (Without, type("Below", (Without,), {})):
        with pytest.raises(IntegrationError, match=facts("Without.update", "super().update")):
            hooks.require_passed_on(cls, Ours, ["update"])


def test_a_module_that_imported_the_name_before_gets_the_new_function(monkeypatch):
    def original(config):
        return config

    defining, holding, other = ModuleType("somewhere.a"), ModuleType("somewhere.b"), ModuleType("elsewhere.c")
    for module in (defining, holding, other):
        module.check = original
        monkeypatch.setitem(sys.modules, module.__name__, module)
    hooks.wrap(defining, "check", lambda original, config: ("ours", original(config)))
    assert defining.check(1) == holding.check(1) == ("ours", 1)
    assert other.check(1) == 1
