"""A trainer gives what the core gives, on drawn batches with padding; on the default one outputs make up sessions."""

from __future__ import annotations

from importlib import import_module

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.integration.conftest import has_default_trainer
from tests.integration.trainers.drawn import CASES, batches, check

TRAINERS = ["ray", *["default"] * has_default_trainer()]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("trainer", TRAINERS)
@settings(max_examples=15)
@given(data=st.data())
def test_the_trainer_gives_what_the_core_gives(trainer: str, case: str, data: st.DataObject) -> None:
    """Also where a hook masks a group, which counts as rejected."""
    runs = import_module(f"tests.integration.trainers.{trainer}_runs")
    run = data.draw(st.lists(batches(sessions=runs.SESSIONS), min_size=2, max_size=2))
    check(runs, case, run, hooked=data.draw(st.integers(0, 2)) == 0)
