"""Numbers in lines of JSON."""

from __future__ import annotations

import json

import pytest

from verl_ext import jsonl


@pytest.mark.parametrize("number", [10**308 - 1, 1 - 10**308, -7, 0, 1.5e308])
def test_numbers_that_fit_a_float_are_read(number):
    assert jsonl.parse(json.dumps(number).encode()) == number
