"""The live view: what it draws, when it draws again, and how it ends."""

from __future__ import annotations

import io
import json

import pytest

from verl_ext.cli import main
from verl_ext.report import follow as module
from verl_ext.report.follow import follow, frame, sparkline
from verl_ext.report.log import read_log


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
    read = lambda: {"run": [read_log(path)]}  # noqa: E731 - short
    follow([path], read, lambda groups: frame(groups, None, window=2), out, interval=3.0, sleep=sleep)
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

    monkeypatch.setattr(module.follow, "__kwdefaults__", {"sleep": interrupt})
    assert main(["report", f"run={tmp_path}", "--follow", "--interval", "0.5"]) == 0
    assert "x " in capsys.readouterr().out


def test_an_interval_of_nothing_is_refused(tmp_path, capsys):
    assert main(["report", str(tmp_path), "--follow", "--interval", "0"]) == 1
    assert "--interval must be above 0, found 0" in capsys.readouterr().err


@pytest.mark.parametrize("size", [1, 5, 41])
def test_every_step_is_in_some_mark(size):
    import numpy as np

    values = np.zeros(size)
    values[-1] = 1.0
    assert sparkline(values)[-1] == ("█" if size > 1 else "▁")
