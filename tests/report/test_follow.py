"""The live view: what it draws, when it draws again, and how it ends."""

from __future__ import annotations

import io
import itertools
import json
from functools import partial
from pathlib import Path

import pytest

from tests.facts import says
from verl_ext.cli import main
from verl_ext.report import follow as module
from verl_ext.report.follow import follow, frame, sparkline
from verl_ext.report.reader import Reader


def line(step, **data):
    return json.dumps({"step": step, "data": {"reward/x/mean": step / 10, "timing_s/step": 2.0} | data}) + "\n"


def watch(path, *changes):
    """Follow a log that each sleep changes; Ctrl-C after the last change."""
    waiting = list(changes)

    def sleep(seconds):
        assert seconds == 3.0
        if not waiting:
            raise KeyboardInterrupt
        waiting.pop(0)()

    out = io.StringIO()
    reader = Reader([path])
    read = lambda: {"run": [reader.read(running=True)]}  # noqa: E731 - short
    follow(read, lambda groups: frame(groups, None, window=2), out, interval=3.0, sleep=sleep)
    return out.getvalue()


def test_it_waits_for_the_log_and_draws_whenever_it_has_grown(tmp_path):
    path = tmp_path / "metrics.jsonl"

    def append(text):
        def change():
            with path.open("a") as file:
                file.write(text)

        return change

    path.touch()
    text = watch(path, append(line(1)), append(line(2)), lambda: None, append(line(3)[:10]), append(line(3)[10:]))
    assert text.startswith("waiting: ")
    heads = text.count("metric  ")
    assert heads == 3  # steps 1, 2 and 3; neither where nothing changed nor for half a line
    rows = [row.split() for row in text.splitlines() if row.startswith("x ")]
    assert [row[3] for row in rows] == ["1", "2", "3"]
    assert rows[-1][4:7] == ["0.250", "0.100", "0.300"]
    assert rows[-1][7] == "▁▅█"
    assert "timing_s/step" in text


def test_a_sparkline_is_as_wide_as_it_may_be():
    import numpy as np

    assert len(sparkline(np.arange(1000.0))) == 40
    assert sparkline(np.array([3.0])) == "▁"


def test_the_command_draws_the_runs_and_ends_with_ctrl_c(tmp_path, capsys, monkeypatch):
    (tmp_path / "metrics.jsonl").write_text(line(1) + line(2))

    def interrupt(seconds):
        assert seconds == 0.5
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "follow", partial(follow, sleep=interrupt))
    assert main(["report", f"run={tmp_path}", "--follow", "--interval", "0.5"]) == 0
    assert "x " in capsys.readouterr().out


def test_an_interval_of_nothing_is_refused(tmp_path, capsys):
    assert main(["report", str(tmp_path), "--follow", "--interval", "0"]) == 1
    assert says(capsys.readouterr().err, "--interval", "above 0", "found 0")


@pytest.mark.parametrize("size", [1, 5, 41])
def test_every_step_is_in_some_mark(size):
    import numpy as np

    values = np.zeros(size)
    values[-1] = 1.0
    assert sparkline(values)[-1] == ("█" if size > 1 else "▁")


def looks(monkeypatch, capsys, runs, *changes, more=()):
    """What `report --follow` draws, as one text a look; each look but the first after a change."""
    waiting, seen = list(changes), []

    def sleep(seconds):
        seen.append(capsys.readouterr().out)
        if not waiting:
            raise KeyboardInterrupt
        waiting.pop(0)()

    monkeypatch.setattr(module, "follow", partial(follow, sleep=sleep))
    assert main(["report", *map(str, runs), "--follow", "--metrics", "reward/x/mean", *more]) == 0
    return seen


def shown(text):
    """The last step, the mean of the last ten, the lowest and the highest of a look at one metric of one run."""
    (row,) = [row.split() for row in text.splitlines() if row.startswith("x ")]
    return int(row[3]), *map(float, row[4:7])


def test_each_look_reads_only_what_is_new(tmp_path, monkeypatch, capsys):
    """Bytes that this process has read from files, as Linux counts them."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(line(step, **{f"m{at}": 0.5 for at in range(200)}) for step in range(1, 2001)))
    size = path.stat().st_size
    assert size > 4e6
    counts = []

    def append(step):
        def change():
            counts.append(int(Path("/proc/self/io").read_text().split()[1]))
            with path.open("a") as file:
                file.write(line(step))

        return change

    texts = looks(monkeypatch, capsys, [f"run={path}"], *(append(step) for step in range(2001, 2005)), lambda: None)
    assert [shown(text)[0] for text in texts[:5]] == [2000, 2001, 2002, 2003, 2004]
    assert max(later - earlier for earlier, later in itertools.pairwise(counts)) < size / 10


LOGS = {
    "begun anew and shorter": [line(1, **{"reward/x/mean": 7.0})],
    "begun anew and as long": [line(step, **{"reward/x/mean": 7.0}) for step in (1, 2, 3)],
    "begun anew and longer": [line(step, **{"reward/x/mean": 7.0}) for step in range(1, 9)],
}


@pytest.mark.parametrize("case", LOGS)
@pytest.mark.parametrize("way", ["written over", "moved away"])
def test_a_file_that_is_begun_anew_is_read_anew(case, way, tmp_path, monkeypatch, capsys):
    """As verl's file logger does when a run is resumed: only what the file holds now is shown."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(line(step, **{"reward/x/mean": 5.0}) for step in (1, 2, 3)))

    def begin_anew():
        if way == "moved away":
            path.rename(tmp_path / "old")
        path.write_text("".join(LOGS[case]))

    texts = looks(monkeypatch, capsys, [f"run={path}"], begin_anew)
    assert shown(texts[0]) == (3, 5.0, 5.0, 5.0)
    assert shown(texts[1]) == (len(LOGS[case]), 7.0, 7.0, 7.0)


def test_a_log_that_is_away_for_a_while_is_waited_for(tmp_path, monkeypatch, capsys):
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1))
    texts = looks(monkeypatch, capsys, [tmp_path], path.unlink, lambda: path.write_text(line(1) + line(2)))
    assert texts[1].startswith("waiting: ")
    assert [shown(texts[0])[0], shown(texts[2])[0]] == [1, 2]


def test_an_earlier_part_that_grows_is_read_again(tmp_path, monkeypatch, capsys):
    first, second = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    first.write_text(line(1) + line(2))
    second.write_text(line(4))

    def grow():
        with first.open("a") as file:
            file.write(line(3))

    texts = looks(monkeypatch, capsys, [f"run={first}+{second}"], grow)
    assert shown(texts[0])[1] == pytest.approx(0.7 / 3, abs=1e-3)
    assert shown(texts[1])[1] == 0.25  # steps 1 to 4, in order


def test_torn_lines_are_counted_while_a_run_is_followed_and_half_lines_are_not(tmp_path, monkeypatch, capsys):
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1) + '{"step": 2, "data": {"a": ' + "9" * 400 + "}}\n")

    def append(text):
        def change():
            with path.open("a") as file:
                file.write(text)

        return change

    half = line(3)[:20], line(3)[20:]
    texts = looks(monkeypatch, capsys, [f"run={path}"], append(half[0]), append(half[1]), append("[" * 9999 + "\n"))
    assert "1 unreadable line" in texts[0]
    assert texts[1] == ""  # nothing new to show
    assert "1 unreadable line" in texts[2]
    assert shown(texts[2])[0] == 3
    assert "2 unreadable line" in texts[3]


def test_a_tensorboard_folder_is_followed(tmp_path, monkeypatch, capsys):
    writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter(str(tmp_path))

    def log(step):
        writer.add_scalar("reward/x/mean", step / 8, step)
        writer.flush()

    log(1)
    texts = looks(monkeypatch, capsys, [f"run={tmp_path}"], lambda: None, lambda: log(2))
    writer.close()
    assert shown(texts[0])[0] == 1
    assert texts[1] == ""
    assert shown(texts[2]) == (2, 0.188, 0.125, 0.25)
