"""Dumps of advantages that are torn, empty, of other columns, or given twice."""

from __future__ import annotations

import os

import pytest

from tests.facts import says
from verl_ext.cli import main

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def columns(step=1, keys=("a", "b")):
    """Two prompts with two responses each; every reward varies in the first."""
    values = [1.0, 0.0, 0.0, 0.0]
    table = {
        "step": [step] * 4,
        "update": [0] * 4,
        "uid": ["p", "p", "q", "q"],
        "tokens": [3.0] * 4,
        "total": values,
        "advantage": values,
    }
    for key in keys:
        table[f"reward/{key}"] = values
        table[f"group_mean/{key}"] = [0.5, 0.5, 0.0, 0.0]
        table[f"group_std/{key}"] = [0.7, 0.7, 0.0, 0.0]
        table[f"group_varies/{key}"] = [True, True, False, False]
    return table


def dump(folder, step, more=()):
    """A file of a step, with more columns or others; None leaves a column out."""
    path = folder / f"advantages-{step:08d}-000.parquet"
    found = columns(step) | dict(more)
    parquet.write_table(pyarrow.table({name: values for name, values in found.items() if values is not None}), path)
    return path


def report(capsys, *paths, status=0):
    assert main(["report", "--groups", *map(str, paths)]) == status
    printed = capsys.readouterr()
    return printed.err if status else printed.out


TORN = {
    "empty": lambda whole: b"",
    "cut off": lambda whole: whole[: len(whole) // 2],
    "without its head": lambda whole: whole[len(whole) // 2 :],
    "another file": lambda whole: b"PAR1" + b"\xff" * 100 + b"PAR1",
}


@pytest.mark.parametrize("case", TORN)
def test_a_torn_file_is_named_and_the_rest_is_shown(case, tmp_path, capsys):
    dump(tmp_path, 1)
    torn = dump(tmp_path, 2)
    torn.write_bytes(TORN[case](torn.read_bytes()))
    dump(tmp_path, 3)
    text = report(capsys, tmp_path)
    assert "2 files, steps 1 to 3, 4 groups, 8 responses" in text
    assert str(torn) in text
    assert str(torn) in report(capsys, torn, status=1)


@pytest.mark.parametrize("missing", [*sorted(set(columns()) - {"reward/a", "reward/b"}), "reward/*"])
def test_a_file_that_lacks_a_column_is_named_with_the_column(missing, tmp_path, capsys):
    lost = columns().keys() - columns(keys=()).keys() if missing == "reward/*" else [missing]
    good, bad = dump(tmp_path, 1), dump(tmp_path, 2, dict.fromkeys(lost))
    for paths, status in (((bad,), 1), ((good, bad), 0)):
        assert says(report(capsys, *paths, status=status), bad, f"'{missing}'")


@pytest.mark.parametrize("name", ["step", "uid", "total", "tokens", "reward/a", "group_varies/b", "accuracy"])
def test_a_column_of_another_type_is_named(name, tmp_path, capsys):
    bad = dump(tmp_path, 1, {name: [0.5] * 4 if name == "uid" else list("wxyz")})
    assert says(report(capsys, bad, status=1), bad, f"'{name}'")


@pytest.mark.parametrize("name", ["step", "reward/a", "estimator"])
def test_a_file_with_two_columns_of_one_name_is_named_with_the_column(name, tmp_path, capsys):
    good, bad = dump(tmp_path, 1), dump(tmp_path, 2, {"estimator": ["dgpo"] * 4})
    table = parquet.read_table(bad)
    parquet.write_table(table.append_column(name, table[name]), bad)
    for paths, status in (((bad,), 1), ((good, bad), 0)):
        assert says(report(capsys, *paths, status=status), bad, f"'{name}'")


def test_a_pipe_is_not_opened(tmp_path, capsys):
    pipe = tmp_path / "advantages-00000001-000.parquet"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path):
        assert says(report(capsys, path, status=1), pipe, "regular file")


@pytest.mark.parametrize("more", [{"accuracy": [0.5] * 4}, {"reward/b": None}, {"step": [0.5] * 4}])
def test_files_with_different_columns_are_refused_with_both_names(more, tmp_path, capsys):
    (name,) = more
    if name == "reward/b":
        more = {column: None for column in columns() if column.endswith("/b")}
    first, second = dump(tmp_path, 1), dump(tmp_path, 2, more)
    assert says(report(capsys, tmp_path, status=1), first, second, f"'{name}'")


def test_dumps_without_a_row_are_refused_and_one_among_others_is_not(tmp_path, capsys):
    empty = tmp_path / "advantages-00000001-000.parquet"
    parquet.write_table(parquet.read_table(dump(tmp_path, 1)).slice(0, 0), empty)
    assert str(tmp_path) in report(capsys, tmp_path, status=1)
    dump(tmp_path, 2)
    assert "steps 2 to 2, 2 groups, 4 responses" in report(capsys, tmp_path)


def test_a_file_that_is_given_twice_is_refused(tmp_path, capsys):
    path = dump(tmp_path, 1)
    assert str(path) in report(capsys, tmp_path, path, status=1)


def test_a_path_without_dumps_beside_one_with_them_is_refused(tmp_path, capsys):
    dump(tmp_path, 1)
    (tmp_path / "empty").mkdir()
    assert str(tmp_path / "empty") in report(capsys, tmp_path, tmp_path / "empty", status=1)
    assert str(tmp_path / "nowhere") in report(capsys, tmp_path, tmp_path / "nowhere", status=1)


def test_a_folder_whose_subfolders_hold_dumps_names_them_with_the_line_to_type(tmp_path, capsys):
    for name in ("a run/dump", "b/c/d", "b/c/d/too/deep", "empty"):
        (tmp_path / name).mkdir(parents=True)
        if name != "empty":
            dump(tmp_path / name, 1)
    told = report(capsys, tmp_path, status=1)
    assert says(told, f"report --groups '{tmp_path}/a run/dump'", f"report --groups {tmp_path}/b/c/d\n")
    assert "empty" not in told
    assert "deep" not in told


def test_names_in_a_dump_cannot_steer_a_terminal(tmp_path, capsys):
    folder = tmp_path / "x\x1b[31m"
    folder.mkdir()
    odd = {name.replace("/b", "/\x1b[31m\n"): values for name, values in columns().items() if name.endswith("/b")}
    dump(folder, 1, {**odd, "uid": ["p\x07\n"] * 2 + ["q"] * 2})
    (folder / "advantages-00000002-000.parquet").write_bytes(b"")
    text = report(capsys, folder)
    assert "p\\x07\\n" in text
    assert not [char for char in text if not char.isprintable() and char != "\n"]
