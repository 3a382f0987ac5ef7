from __future__ import annotations

import json

import pytest

from verl_ext.cli import main


@pytest.fixture
def runs(tmp_path):
    """Two seeds of grpo and one run of gdpo, whose `correctness` is its seed plus its step."""
    for name, seed, steps in (("grpo-1", 1, 4), ("grpo-2", 3, 5), ("gdpo-1", 1, 4)):
        folder = tmp_path / name
        folder.mkdir()
        lines = [
            {"step": step, "data": {"reward/correctness/mean": seed + step, "critic/score/mean": 0.0, "actor/lr": 1.0}}
            for step in range(1, steps + 1)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    return tmp_path


def test_the_table_has_a_line_a_name_with_mean_and_spread_over_its_runs(runs, capsys):
    arguments = [f"grpo={runs}/grpo-1", f"grpo={runs}/grpo-2", str(runs / "gdpo-1"), "--window", "2"]
    assert main(["report", *arguments]) == 0
    header, _, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["reward", "name", "runs", "steps", "first", "2", "last", "2", "change"]
    # Steps 1-4, which both seeds have. First two: seed + 1.5 = 2.5 and 4.5, mean 3.5, std sqrt(2); last two: 2 more.
    assert " ".join(lines[0].split()) == "correctness grpo 2 1-4 3.500 ± 1.414 5.500 ± 1.414 +2.000 ± 0.000"
    assert " ".join(lines[1].split()) == "correctness gdpo-1 1 1-4 2.500 4.500 +2.000"
    assert len(lines) == 2


def test_without_named_rewards_the_score_is_reported(runs, capsys):
    (runs / "plain.jsonl").write_text(json.dumps({"step": 1, "data": {"critic/score/mean": 0.25}}) + "\n")
    assert main(["report", f"x={runs}/plain.jsonl"]) == 0
    assert capsys.readouterr().out.splitlines()[2].split() == ["score", "x", "1", "1-1", "0.250", "0.250", "+0.000"]


def test_a_run_without_a_metric_says_so_in_the_table(runs, capsys):
    (runs / "plain.jsonl").write_text(json.dumps({"step": 1, "data": {"critic/score/mean": 0.25}}) + "\n")
    assert main(["report", f"{runs}/gdpo-1", f"x={runs}/plain.jsonl", "--plot", f"{runs}/out.png"]) == 0
    assert "correctness  x       1     not logged" in capsys.readouterr().out


def test_an_unknown_metric_is_an_error_that_lists_those_that_exist(runs, capsys):
    assert main(["report", str(runs / "gdpo-1"), "--metrics", "reward/correctnes/mean"]) == 1
    assert "did you mean 'reward/correctness/mean'?" in capsys.readouterr().err


def test_torn_lines_are_mentioned(runs, capsys):
    path = runs / "gdpo-1/metrics.jsonl"
    path.write_text(path.read_text()[:-5])
    assert main(["report", str(runs / "gdpo-1")]) == 0
    assert f"{path}: 1 unreadable line(s) left out" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--smooth", "--window"])
def test_a_width_below_one_is_refused(runs, capsys, option):
    assert main(["report", str(runs / "gdpo-1"), option, "0"]) == 1
    assert f"{option} must be at least 1, found 0" in capsys.readouterr().err


def test_the_picture_is_a_png_with_a_panel_a_metric(runs, capsys):
    pytest.importorskip("matplotlib")
    path = runs / "new/rewards.png"
    arguments = [f"grpo={runs}/grpo-1", f"grpo={runs}/grpo-2", f"gdpo={runs}/gdpo-1", "--plot", str(path)]
    assert main(["report", *arguments]) == 0
    narrow = path.read_bytes()
    assert f"picture: {path}" in capsys.readouterr().out
    assert main(["report", *arguments, "--metrics", "reward/correctness/mean", "actor/lr"]) == 0
    # The width in a PNG's header, bytes 16 to 19.
    assert 2 * int.from_bytes(narrow[16:20], "big") == int.from_bytes(path.read_bytes()[16:20], "big")


def test_more_names_than_colours_are_refused(runs, capsys):
    pytest.importorskip("matplotlib")
    arguments = [f"{number}={runs}/gdpo-1" for number in range(7)]
    assert main(["report", *arguments, "--plot", str(runs / "out.png")]) == 1
    assert "7 names are too many for one picture, at most 6" in capsys.readouterr().err


def test_without_matplotlib_a_picture_is_refused_with_what_to_install(runs, capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert main(["report", str(runs / "gdpo-1"), "--plot", str(runs / "out.png")]) == 1
    assert "pip install 'verl_ext[plot]'" in capsys.readouterr().err
