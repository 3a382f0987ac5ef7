"""A wrapper and a mixin: which parameters verl must have, and who finds the new function."""

import re
import sys
from inspect import getmembers, isfunction
from pathlib import Path
from types import ModuleType

import pytest

from tests.facts import facts
from verl_ext import hooks
from verl_ext.errors import IntegrationError
from verl_ext.trainers.default_trainer import DefaultTrainer
from verl_ext.trainers.mixin import check_parameters, with_mixin
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
        check_parameters(Ours, cls, ("__init__", "update"))


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
