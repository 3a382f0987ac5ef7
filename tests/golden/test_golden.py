"""No number has changed: every estimator with all of its settings, on random batches, by every way that leads to it.

A number that is changed on purpose is stored anew by `scripts/quality/make_golden.py --only PATTERN`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator

import pytest

from tests.golden.cases import Case
from tests.golden.compare import differences
from tests.golden.paths import NEEDS, PATHS, has, through
from tests.golden.store import Results, read

ESTIMATORS = ("compose", "dgpo", "drgrpo", "gd2po", "gdpo", "grpo", "hadw", "maxrl")
SHOWN = 12
stored = functools.cache(read)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("verl_ext")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("path", PATHS)
def test_numbers_are_as_stored(path: str, estimator: str) -> None:
    if path in NEEDS:
        pytest.importorskip(NEEDS[path], exc_type=ModuleNotFoundError)
    cases, results = stored()
    if chosen := [case for case in cases if case.estimator == estimator and has(path, case)]:
        check(path, chosen, results)


def check(path: str, cases: list[Case], results: Results) -> None:
    """Fail with the cases that differ, and how."""
    lines: list[str] = []
    broken = 0
    for case in cases:
        try:
            found = list(differences(path, case, results[path][case.name], through(path)(case)))
        except Exception as error:  # noqa: BLE001 - one broken case must not hide the others
            found = [f"raises {type(error).__name__}: {error}"]
        if found:
            broken += 1
            lines += [case.text, *(f"    {line}" for line in found)]
    more = len(lines) - SHOWN
    rest = [f"... and {more} more lines"] if more > 0 else []
    assert not broken, "\n".join([f"{broken} of {len(cases)} cases differ through {path}:", *lines[:SHOWN], *rest])


def test_every_case_was_stored() -> None:
    cases, results = stored()
    assert sum(len(case.batches) for case in cases) >= 500
    assert {case.estimator for case in cases} == set(ESTIMATORS)
    assert all(results[path].keys() == {case.name for case in cases if has(path, case)} for path in PATHS)
