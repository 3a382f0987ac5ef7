"""One compressed file with the cases and what they gave: `golden.npz`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from tests.golden.cases import Case, Outcome, Rows
from tests.golden.paths import PATHS, has

FILE = Path(__file__).with_name("golden.npz")
KINDS = {
    "prompt": np.int8,
    "session": np.int8,
    "output": np.int8,
    "length": np.uint8,
    "bits": np.uint8,
    "score": np.float32,
    "kl": np.int16,
}
Results = dict[str, dict[str, list[Outcome]]]
"""By path and by the name of the case, one a batch."""


def write(cases: list[Case], results: Results, file: Path = FILE) -> None:
    batches = [rows for case in cases for rows in case.batches]
    arrays = {name: joined((getattr(rows, name) for rows in batches), kind) for name, kind in KINDS.items()}
    arrays["columns"] = joined((column for rows in batches for column in rows.columns.values()), np.float64)
    described = [
        {
            **{name: getattr(case, name) for name in ("name", "estimator", "algorithm", "loss", "keys", "accuracy")},
            "per_token": case.per_token,
            "columns": list(case.batches[0].columns),
            "sizes": [len(rows) for rows in case.batches],
        }
        for case in cases
    ]
    words: dict[str, int] = {}
    for path in PATHS:
        outcomes = [one for case in cases if has(path, case) for one in results[path][case.name]]
        kind = np.float64 if path == "direct" else np.float32
        metrics = [sorted(one.metrics.items()) for one in outcomes]
        ids = [words.setdefault(name, len(words)) for one in metrics for name, _ in one]
        arrays[f"{path}.advantages"] = joined((one.advantages for one in outcomes), kind)
        arrays[f"{path}.counts"] = np.array(list(map(len, metrics)), dtype=np.uint8)
        arrays[f"{path}.names"] = np.array(ids, dtype=np.uint8)
        arrays[f"{path}.values"] = np.array([value for one in metrics for _, value in one])
    index = {"cases": described, "words": list(words)}
    arrays["index"] = np.frombuffer(json.dumps(index).encode(), dtype=np.uint8)
    np.savez_compressed(file, **arrays)


def joined(parts: Iterable[np.ndarray], kind: Any) -> np.ndarray:
    return np.concatenate([part.astype(kind) for part in parts])


def read(file: Path = FILE) -> tuple[list[Case], Results]:
    with np.load(file) as stored:
        arrays = dict(stored)
    index = json.loads(arrays["index"].tobytes())
    inputs = {name: Reader(arrays[name]) for name in (*KINDS, "columns")}
    cases = [case_of(described, inputs) for described in index["cases"]]
    results: Results = {}
    for path in PATHS:
        advantages, counts, names, values = (
            Reader(arrays[f"{path}.{part}"]) for part in ("advantages", "counts", "names", "values")
        )
        results[path] = {}
        for case in (case for case in cases if has(path, case)):
            found = results[path][case.name] = []
            for rows in case.batches:
                count = int(counts.take(1)[0])
                metrics = zip((index["words"][word] for word in names.take(count)), values.take(count), strict=True)
                size = len(rows.sessions) if path == "direct" else len(rows)
                found.append(Outcome(advantages.take(size), dict(metrics)))
    return cases, results


class Reader:
    """Takes an array apart from its beginning."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.at = array, 0

    def take(self, size: int) -> np.ndarray:
        self.at += size
        return self.array[self.at - size : self.at]


def case_of(described: dict[str, Any], inputs: dict[str, Reader]) -> Case:
    columns, sizes = described.pop("columns"), described.pop("sizes")
    batches = tuple(
        Rows(
            **{name: inputs[name].take(size) for name in KINDS},
            columns={key: inputs["columns"].take(size) for key in columns},
        )
        for size in sizes
    )
    lists = {name: value and tuple(value) for name, value in described.items() if isinstance(value, list)}
    return Case(**{**described, **lists}, batches=batches)
