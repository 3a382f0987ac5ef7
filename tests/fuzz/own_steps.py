"""Steps of a user's that are broken where it is least expected."""

from __future__ import annotations

import dataclasses

from verl_ext import Step


class Argument(Step):
    name = "argument"

    def __init__(self, needed):
        self.needed = needed


class Raises(Step):
    name = "raises"

    def __init__(self):
        raise KeyError("on purpose")


class NoName(Step):
    name = ("no", "text")


@dataclasses.dataclass
class Hints(Step):
    name = "hints"
    limit: NotThere = 1  # noqa: F821 - on purpose


@dataclasses.dataclass
class Checks(Step):
    name = "checks"
    limit: int = 1

    def __post_init__(self):
        if self.limit > 1:
            raise RuntimeError("on purpose")
