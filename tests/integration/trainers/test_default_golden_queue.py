"""The stored numbers of the default trainer over verl's real queue, for some of the cases; see `tests/golden`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import transfer_queue as tq

from tests.golden.compare import differences
from tests.golden.default_trainer import through_default_trainer
from tests.golden.store import read
from tests.integration.pipeline import Pipeline


@contextmanager
def emptied() -> Iterator[None]:
    yield
    for partition, keys in (tq.kv_list() or {}).items():
        if keys:
            tq.kv_clear(partition_id=partition, keys=list(keys))


def test_numbers_are_as_stored_over_the_real_queue(pipeline: Pipeline) -> None:
    cases, results = read()
    with emptied():
        pass
    lines = []
    for case in cases[::12]:
        found = through_default_trainer(case, queue=emptied)
        wrong = list(differences("default_trainer", case, results["default_trainer"][case.name], found))
        lines += [case.text, *wrong] if wrong else []
    assert not lines, "\n".join(lines)
