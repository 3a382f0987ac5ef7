"""A wrapper: which parameters a function of verl must take, which a subclass may take, and coroutines."""

from __future__ import annotations

import inspect

import pytest

from verl_ext.errors import IntegrationError
from verl_ext.integration import hooks


def init(original, self, *args, **kwargs):
    self.seen = args
    original(self, *args, **kwargs)


def update(original, self, batch):
    return "ours", original(self, batch)


class Renamed:
    def __init__(self, cfg):
        pass

    def update(self, rows):
        return rows


def test_a_subclass_may_take_other_parameters_than_its_class():
    class Trainer:
        def __init__(self, config):
            pass

        def update(self, batch):
            return batch

    hooks.adopt(Trainer, {"__init__": init, "update": update})

    class Other(Trainer):
        def __init__(self, name):
            super().__init__({})

        def update(self, rows):
            return rows

    other = Other("name")
    assert other.seen == ({},)
    assert other.update(1) == ("ours", 1)


@pytest.mark.parametrize(("name", "around"), [("__init__", init), ("update", update)])
def test_other_parameters_of_the_class_are_refused(name, around):
    with pytest.raises(IntegrationError, match=name):
        hooks.adopt(Renamed, {name: around})


def test_a_coroutine_stays_one():
    """Ray asks for it, to know which methods of an actor it awaits."""

    class Actor:
        async def load(self):
            return 1

    hooks.wrap(Actor, "load", lambda original, self: original(self))
    assert inspect.iscoroutinefunction(Actor.load)
