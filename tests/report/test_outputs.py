"""Names, paths and outputs that a report cannot take as they are."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.facts import says
from tests.report import logs
from verl_ext.cli import main


def write(folder, name="metrics.jsonl", metric="reward/x/mean"):
    return logs.write(folder / name, *((step, {metric: 0.5}) for step in (1, 2, 3)))


def refused(capsys, *arguments):
    """What is said of arguments that end in exit status 1."""
    assert main(["report", *map(str, arguments)]) == 1
    return capsys.readouterr().err


def test_two_runs_whose_folders_share_a_name_are_not_taken_for_seeds(tmp_path, capsys):
    first, second = write(tmp_path / "a/run").parent, write(tmp_path / "b/run").parent
    said = refused(capsys, first, second)
    assert says(said, first, second, f"run={first}")  # what to write if they are seeds
    assert "other.jsonl" in refused(capsys, first, write(first, "other.jsonl"))  # two logs of one folder
    refused(capsys, f"run={first}", second)
    assert main(["report", f"run={first}", f"run={second}"]) == 0
    assert capsys.readouterr().out.splitlines()[2].split()[2] == "2"
    assert main(["report", f"a={first}", str(second)]) == 0
    assert main(["report", f"a={first}", f"b={first}"]) == 0


@pytest.mark.parametrize("more", [(), ("--follow",)])
def test_a_run_that_is_given_twice_is_not_two_seeds(more, tmp_path, capsys):
    log = write(tmp_path / "run")
    (tmp_path / "link").symlink_to(log.parent)
    for again in (log, log.parent, tmp_path / "link"):
        assert says(refused(capsys, f"run={log}", f"run={again}", *more), "metrics.jsonl", "twice")
    assert says(refused(capsys, f"run={tmp_path / 'link'}", f"run={log}", *more), "metrics.jsonl", "twice")
    assert says(refused(capsys, f"run={log}+{log.parent}", *more), "metrics.jsonl", "twice")
    refused(capsys, log.parent, log.parent, *more)


@pytest.mark.parametrize("option", ["--markdown", "--html"])
def test_an_output_cannot_replace_the_log(option, tmp_path, capsys):
    log = write(tmp_path / "run")
    before = log.read_bytes()
    (tmp_path / "link").symlink_to(log.parent)
    for given, output in ((log.parent, tmp_path / "link" / log.name), (tmp_path / "link", log)):
        assert says(refused(capsys, given, option, output), option, log.name)
    assert log.read_bytes() == before


@pytest.mark.parametrize(
    ("first", "second"), [("--plot", "--html"), ("--plot", "--markdown"), ("--html", "--markdown")]
)
def test_two_outputs_cannot_be_one_file(first, second, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    log = write(tmp_path / "run")
    (tmp_path / "link").symlink_to(tmp_path)
    said = refused(capsys, log, first, tmp_path / "out/a.png", second, tmp_path / "link/out/a.png")
    assert says(said, first, second, "a.png")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("outputs", [[], ["--markdown"], ["--html"], ["--plot"]])
def test_names_cannot_steer_a_terminal_or_break_a_table(outputs, tmp_path, capsys):
    if {"--html", "--plot"} & set(outputs):
        pytest.importorskip("matplotlib")
    name = "run\x1b[31m\n| x | y |\u202e\u2028"
    (tmp_path / name).mkdir()
    log = write(tmp_path / name, metric="reward/a\x1b]0;b\x07\r\n/mean")
    with log.open("a") as file:
        file.write("torn")
    file = tmp_path / "out\x1b[31m.png"
    more = [part for output in outputs for part in (output, str(file))]
    assert main(["report", str(log), *more]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[2].split()[0].startswith("a\\x1b]0;b")
    assert len(text.splitlines()) == 4 + len(outputs)  # head, rule, one row, the torn line, the outputs
    if outputs and "--plot" not in outputs:
        text += file.read_text()
    assert not [char for char in text if not char.isprintable() and char != "\n"]
    assert "unknown metric" in refused(capsys, log, "--metrics", "\x1b[31m")


def test_what_an_error_says_cannot_steer_a_terminal(tmp_path, capsys):
    assert "\x1b" not in refused(capsys, tmp_path / "\x1b[31m")


def test_a_path_that_the_file_system_refuses_is_an_error(tmp_path, capsys):
    name = "\x1b" + "x" * 300
    for arguments in (
        (tmp_path / name,),
        (write(tmp_path), "--markdown", tmp_path / name),
        ("--groups", tmp_path / name),
    ):
        said = refused(capsys, *arguments)
        assert says(said, f"\\x1b{'x' * 300}")
        assert len(said.splitlines()) == 1


def test_a_folder_that_may_not_be_read_is_an_error(tmp_path, capsys, monkeypatch):
    def denied(self):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "is_file", denied)
    assert says(refused(capsys, tmp_path / "run"), tmp_path / "run", "Permission denied")


@pytest.mark.parametrize("option", ["--plot", "--html", "--markdown"])
def test_a_folder_and_a_path_below_a_file_are_refused_as_an_output(option, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    log = write(tmp_path)
    assert says(refused(capsys, log, option, tmp_path), option, tmp_path)
    path = log / "below/a/file.png"  # cannot be written
    assert says(refused(capsys, log, option, path), path)


@pytest.mark.parametrize("name", ["picture.xyz", "picture"])
def test_an_ending_that_is_no_format_is_refused_with_those_that_are(name, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    log = write(tmp_path)
    assert says(refused(capsys, log, "--plot", tmp_path / name), name, ".png", ".svg", ".pdf")
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("ending", ["png", "PNG", "svg", "pdf"])
def test_pictures_of_several_formats(ending, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    log = write(tmp_path)
    assert main(["report", f"$\\frac$={log}", "--plot", str(tmp_path / f"out.{ending}"), "--title", "$\\x$"]) == 0
    assert (tmp_path / f"out.{ending}").stat().st_size > 1000


def test_a_full_disk_is_an_error(tmp_path, capsys):
    assert "/dev/full" in refused(capsys, write(tmp_path), "--markdown", "/dev/full")


def run(*arguments, stdout, **more):
    """The exit status and the errors of the command in a process of its own."""
    command = [sys.executable, "-m", "verl_ext", "report", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **more}
    done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment, timeout=120)
    return done.returncode, done.stderr


@pytest.mark.parametrize("more", [(), ("--follow", "--interval", "0.1")])
def test_a_reader_that_has_seen_enough_ends_the_report_without_a_word(more, tmp_path):
    """As `| head` does; the status is that of a program that SIGPIPE ended."""
    log = write(tmp_path)
    receive, send = os.pipe()
    os.close(receive)
    try:
        assert run(log, *more, stdout=send) == (128 + signal.SIGPIPE, "")
    finally:
        os.close(send)


def test_an_output_that_is_not_utf_8_has_escapes(tmp_path):
    log = write(tmp_path, metric="reward/\u00e9/mean")
    file = tmp_path / "out"
    with file.open("w") as out:
        assert run(f"\u4e2d={log}", stdout=out, PYTHONIOENCODING="ascii") == (0, "")
    assert "\\xe9" in file.read_text("ascii")
    assert "\\u4e2d" in file.read_text("ascii")
    with file.open("w") as out:
        status, said = run(tmp_path / "\u4e2d", stdout=out, PYTHONIOENCODING="ascii:strict")
    assert (status, "\\u4e2d" in said) == (1, True)


def test_closed_outputs_are_no_error(tmp_path, monkeypatch):
    log = write(tmp_path)
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["report", str(log), "--markdown", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out").read_text()
    assert main(["report", str(tmp_path / "nowhere")]) == 1


def test_a_standard_output_that_cannot_be_written_is_an_error(tmp_path):
    with open("/dev/full", "w") as full:
        status, said = run(write(tmp_path), stdout=full)
    assert status == 1
    assert len(said.splitlines()) == 1
    assert "No space left" in said
