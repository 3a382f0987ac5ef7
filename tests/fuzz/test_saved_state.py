"""A state file may hold anything: it is loaded as it was written, or refused; and it is data, never run."""

from __future__ import annotations

import ast
import builtins
import json
import pickle
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

import verl_ext
from tests.fuzz.rubbish import NAMES, Draw, draws, many, name, tree
from verl_ext import Batch, Settings
from verl_ext.errors import CheckpointError
from verl_ext.files import DUMPS
from verl_ext.integration import checkpoint, dump
from verl_ext.integration.run import Run

SOURCE = Path(verl_ext.__file__).parent
ACCURACY = {"key": "score", "threshold": None}
SOUND: dict[str, Any] = {
    "format": checkpoint.FORMAT,
    "verl_ext": "0.2.0",
    "global_step": 7,
    "overwrites": False,
    "computed_at": 7,
    "estimator": "hadw",
    "accuracy": ACCURACY,
    "settings": {},
    "state": {"weigh_by_history": {"anchor": "soft", "value": 0.4, "window": [0.2, 0.6, 0.4], "ticks": 3}},
}


def run_of(state: Any = None) -> Run:
    """A run of hadw at step 7, before it has computed anything."""
    trainer = SimpleNamespace(global_steps=7)
    found = Run("hadw", Settings(), verl_ext.build("hadw", Settings()), trainer=trainer, computed_at=7)
    if state is not None:
        found.accuracy = ACCURACY
        found.state.load_state_dict({"hadw": state})
    return found


def damaged(draw: Draw, data: Any) -> Any:
    """The data with one place changed, gone or added."""
    if isinstance(data, dict) and data and draw.random() < 0.85:
        key = draw.choice(list(data))
        kind = draw.randrange(8)
        if kind == 0:
            return {other: value for other, value in data.items() if other != key}
        if kind == 1:
            return {**data, name(draw): tree(draw)}
        return {**data, key: damaged(draw, data[key])}
    if isinstance(data, list) and data and draw.random() < 0.6:
        at = draw.randrange(len(data))
        return [*data[:at], damaged(draw, data[at]), *data[at + 1 :]]
    return draw.choice((tree(draw), tree(draw), str(data), [data], 1e400, -1, 0, 2**60, 10**400, True, None))


def text_of(draw: Draw) -> bytes:
    if draw.random() < 0.1:
        return draw.randbytes(draw.randrange(40))
    data = SOUND
    for _ in range(draw.randrange(3)):
        data = damaged(draw, data)
    text = json.dumps(data, default=lambda value: value.decode("latin-1"), skipkeys=True).encode(
        "utf-8", "surrogatepass"
    )
    kind = draw.randrange(6)
    if kind == 0:
        return text[: draw.randrange(len(text))]
    if kind == 1:
        at = draw.randrange(len(text))
        return text[:at] + draw.randbytes(2) + text[at + 1 :]
    if kind == 2:
        return draw.choice((b"", b"\xef\xbb\xbf" + text, text + text, pickle.dumps(data, 4), b"[" * 100_000, b"null"))
    return text


@many
@given(draws)
def test_a_damaged_file_is_refused_and_changes_nothing(draw: Draw) -> None:
    run, text = run_of(), text_of(draw)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / checkpoint.FILE
        path.write_bytes(text)
        try:
            checkpoint.load(path, run)
        except CheckpointError as error:
            assert str(path) in str(error)  # noqa: PT017 - it may as well be sound
            assert run.state.states == {}
            return
        # What was read is what stands there, it is saved and read again the same, and a batch can go on from it.
        read = run.state.state_dict()
        assert read == {"hadw": json.loads(text)["state"]}
        checkpoint.save(Path(folder), run)
        again = run_of()
        checkpoint.load(path, again)
        assert again.state.state_dict() == read
    assert run.chain is not None
    result = run.chain(Batch.of([[1.0], [0.0]], ["g", "g"], accuracy=[1.0, 0.0]), run.state.states["hadw"])
    assert np.isfinite([*result.advantages, *result.metrics.values()]).all()


def test_nothing_is_run_while_a_state_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checkpoint.save(tmp_path, run_of(SOUND["state"]))

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("a state file is data")

    for owner, function in (
        (pickle, "load"),
        (pickle, "loads"),
        (pickle, "Unpickler"),
        (torch, "load"),
        (np, "load"),
        (builtins, "eval"),
        (builtins, "exec"),
    ):
        monkeypatch.setattr(owner, function, refuse)
    read = run_of()
    try:
        checkpoint.load(tmp_path / checkpoint.FILE, read)
    finally:
        monkeypatch.undo()
    assert read.state.states == {"hadw": SOUND["state"]}


DANGEROUS = {"eval", "exec", "compile", "pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
# Between processes of one run that trust each other: weights on their way to the rollout.
ALLOWED = {"cpu/weights.py": {"recv_pyobj"}}


def test_no_source_of_the_package_can_run_data() -> None:
    found = {}
    for path in SOURCE.rglob("*.py"):
        used = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                used |= {alias.name.partition(".")[0] for alias in node.names} | {(getattr(node, "module", "") or "")}
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                used.add(node.func.id)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
                used |= {node.func.attr} & {"recv_pyobj", "system", "popen"}
                used |= (
                    {"load of torch or numpy"}
                    if (owner, node.func.attr) in (("torch", "load"), ("np", "load"))
                    else set()
                )
        name = path.relative_to(SOURCE).as_posix()
        if bad := used & (DANGEROUS | {"recv_pyobj", "system", "popen", "load of torch or numpy"}) - ALLOWED.get(
            name, set()
        ):
            found[name] = bad
    assert found == {}


HOSTILE = (
    "../../escape",
    "/etc/passwd",
    "..",
    "a/b",
    "a\\b",
    "~",
    "a\x00b",
    "\ud800",
    "$(touch x)",
    "`touch x`",
    *NAMES,
)


def test_no_name_from_the_data_reaches_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    import pyarrow.parquet

    monkeypatch.chdir(tmp_path)
    keys = tuple(key for key in dict.fromkeys(HOSTILE) if key)  # the settings refuse an empty name
    labels = [*keys, *keys]
    folder = tmp_path / "here" / "dumped"
    settings = Settings.parse({"rewards": {"keys": list(keys)}, "verl_ext": {"dump_dir": str(folder)}})
    rewards = np.arange(len(labels) * len(keys), dtype=float).reshape(len(labels), -1)
    batch = Batch.of(rewards, labels, keys=keys)
    dump.write(Run(), "../../gdpo", settings, batch, labels, np.zeros(len(labels)))
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path.parent for path in written] == [folder / "from-0-0"]
    assert written[0].match(DUMPS)
    table = pyarrow.parquet.read_table(written[0])
    assert len(table) == len(labels)
    assert len([column for column in table.column_names if column.startswith("reward/")]) == len(keys)


@many
@given(draws)
def test_a_dump_takes_any_name(draw: Draw) -> None:
    pytest.importorskip("pyarrow")
    keys = tuple(dict.fromkeys(name(draw) or "unnamed" for _ in range(3)))
    labels = [draw.choice((name(draw), draw.randrange(3), None, b"\xff", (1, "\ud800"))) for _ in range(4)]
    batch = Batch.of(np.zeros((4, len(keys))), labels, keys=keys)
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings.parse({"rewards": {"keys": list(keys)}, "verl_ext": {"dump_dir": folder}})
        dump.write(Run(), "gdpo", settings, batch, labels, np.zeros(4))
        assert [path.match(DUMPS) for path in Path(folder).glob("*/*")] == [True]
