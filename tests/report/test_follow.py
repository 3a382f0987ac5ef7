"""The live view: what it draws, when it draws again, and how it ends."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.report import logs
from verl_ext.cli import main
from verl_ext.report import follow as module
from verl_ext.report.follow import follow, sparkline


def line(step, **data):
    return logs.line(step, **{"reward/x/mean": step / 10, "timing_s/step": 2.0} | data)


def append(path, text):
    """A change of a log."""

    def change():
        with path.open("a") as file:
            file.write(text)

    return change


@pytest.fixture
def looks(monkeypatch, capsys):
    """What `report --follow` draws, as one text a look; each look but the first after a change, then Ctrl-C."""

    def watch(run, *changes, more=()):
        waiting, seen = list(changes), []

        def sleep(seconds):
            assert seconds == 0.5
            seen.append(capsys.readouterr().out)
            if not waiting:
                raise KeyboardInterrupt
            waiting.pop(0)()

        monkeypatch.setattr(module, "follow", partial(follow, sleep=sleep))
        assert main(["report", f"run={run}", "--follow", "--interval", "0.5", *more]) == 0
        return seen

    return watch


def shown(text):
    """The last step, the mean of the last ten, the lowest and the highest of a look at one metric of one run."""
    (row,) = [row.split() for row in text.splitlines() if row.startswith("x ")]
    return int(row[3]), *map(float, row[4:7])


def test_it_waits_for_the_log_and_draws_whenever_it_has_grown(tmp_path, looks):
    path = tmp_path / "metrics.jsonl"
    path.touch()
    texts = looks(
        tmp_path,
        append(path, line(1)),
        append(path, line(2)),
        lambda: None,
        append(path, line(3)[:10]),
        append(path, line(3)[10:]),
        path.unlink,
        lambda: path.write_text(line(4)),
    )
    waits, *drawn = texts
    assert waits.startswith("waiting: ")
    assert [shown(text)[0] if text else None for text in drawn[:5]] == [1, 2, None, None, 3]
    assert shown(drawn[4]) == (3, 0.2, 0.1, 0.3)
    assert "▁▅█" in drawn[4]
    assert "timing_s/step" in drawn[4]
    assert drawn[5].startswith("waiting: ")
    assert shown(drawn[6])[0] == 4


def test_names_cannot_steer_the_terminal_while_it_waits_or_draws(tmp_path, looks):
    folder = tmp_path / "run\x1b[31m\x07"
    folder.mkdir()
    path = folder / "metrics.jsonl"
    path.touch()
    odd = "reward/\x1b[2Jy/mean"
    waits, unknown, drawn = looks(
        folder, append(path, line(1)), append(path, line(2, **{odd: 1.0})), more=["--metrics", odd, "reward/x/mean"]
    )
    assert waits.startswith("waiting: ")
    assert "run\\x1b[31m\\x07" in waits
    assert "\\x1b[2Jy" in drawn
    for text in (waits, unknown, drawn):
        assert not [char for char in text if not char.isprintable() and char != "\n"]


@pytest.mark.parametrize("size", [1, 5, 40, 41, 1000])
def test_a_sparkline_is_as_wide_as_it_may_be_and_every_step_is_in_some_mark(size):
    drawn = sparkline(np.eye(size)[-1])
    assert len(drawn) == min(size, 40)
    assert drawn[-1] == ("█" if size > 1 else "▁")


def test_each_look_reads_only_what_is_new(tmp_path, looks):
    """Bytes that this process has read from files, as Linux counts them."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(line(step, **{f"m{at}": 0.5 for at in range(200)}) for step in range(1, 2001)))
    size = path.stat().st_size
    assert size > 4e6
    counts = []

    def counted(step):
        counts.append(int(Path("/proc/self/io").read_text().split()[1]))
        append(path, line(step))()

    texts = looks(path, *(partial(counted, step) for step in range(2001, 2005)))
    assert [shown(text)[0] for text in texts] == [2000, 2001, 2002, 2003, 2004]
    assert max(later - earlier for earlier, later in itertools.pairwise(counts)) < size / 10


@pytest.mark.parametrize("steps", [1, 3, 8])
@pytest.mark.parametrize("moved_away", [False, True])
def test_a_file_that_is_begun_anew_is_read_anew(steps, moved_away, tmp_path, looks):
    """As verl's file logger does when a run is resumed: only what the file holds now is shown."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(line(step, **{"reward/x/mean": 5.0}) for step in (1, 2, 3)))

    def begin_anew():
        if moved_away:
            path.rename(tmp_path / "old")
        path.write_text("".join(line(step, **{"reward/x/mean": 7.0}) for step in range(1, steps + 1)))

    before, after = looks(path, begin_anew)
    assert shown(before) == (3, 5.0, 5.0, 5.0)
    assert shown(after) == (steps, 7.0, 7.0, 7.0)


def test_an_earlier_part_that_grows_is_read_again(tmp_path, looks):
    first, second = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    first.write_text(line(1) + line(2))
    second.write_text(line(4))
    before, after = looks(f"{first}+{second}", append(first, line(3)))
    assert shown(before)[1] == pytest.approx(0.7 / 3, abs=1e-3)
    assert shown(after)[1] == 0.25  # steps 1 to 4, in order


def test_torn_lines_are_counted_while_a_run_is_followed(tmp_path, looks):
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1) + '{"step": 2, "data": {"a": ' + "9" * 400 + "}}\n")
    change = append(path, "[" * 9999 + "\n" + line(3))
    before, after = looks(path, change, more=["--metrics", "reward/x/mean"])
    assert "1 unreadable line" in before
    assert "2 unreadable line" in after
    assert shown(after)[0] == 3
    assert "timing_s/step" not in after


def test_a_tensorboard_folder_is_followed(tmp_path, looks):
    writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter(str(tmp_path))

    def log(step):
        writer.add_scalar("reward/x/mean", step / 8, step)
        writer.flush()

    log(1)
    texts = looks(tmp_path, lambda: None, lambda: log(2))
    writer.close()
    assert shown(texts[0])[0] == 1
    assert texts[1] == ""
    assert shown(texts[2]) == (2, 0.188, 0.125, 0.25)
