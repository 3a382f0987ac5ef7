from __future__ import annotations

import base64
import json
import re

import pytest

from tests.facts import a_line_says, says
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
    assert header.split() == "reward name runs steps first 2 final 2 best 2 area".split()  # noqa: SIM905 - as printed
    # Steps 1-4, which both seeds have. First two: seed + 1.5 = 2.5 and 4.5, mean 3.5, std sqrt(2); last two: 2 more.
    # The mean height of a straight line is that of its middle: seed + 2.5.
    grpo = "correctness grpo 2 1-4 3.500 ± 1.414 5.500 ± 1.414 5.500 ± 1.414 4.500 ± 1.414"
    assert " ".join(lines[0].split()) == grpo
    assert " ".join(lines[1].split()) == "correctness gdpo-1 1 1-4 2.500 4.500 4.500 3.500"
    assert len(lines) == 2


def test_best_and_area_of_a_curve_that_falls_again(tmp_path, capsys):
    values = [0.0, 4.0, 4.0, 0.0, 1.0]
    lines = [{"step": 10 * at, "data": {"reward/x/mean": value}} for at, value in enumerate(values, start=1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    assert main(["report", f"run={tmp_path}", "--window", "2"]) == 0
    # Trapezes: (0+4)/2, 4, 2, 0.5, over four equal stretches: 8.5 / 4.
    assert capsys.readouterr().out.splitlines()[2].split() == [
        "x",
        "run",
        "1",
        "10-50",
        "2.000",
        "0.500",
        "4.000",
        "2.125",
    ]


def test_runs_of_a_name_are_compared_at_the_steps_that_all_of_them_have(runs, capsys):
    text = (runs / "grpo-1/metrics.jsonl").read_text().splitlines(keepends=True)
    (runs / "grpo-1/metrics.jsonl").write_text("".join(text[:1] + text[2:]))  # step 2 is missing
    assert main(["report", f"grpo={runs}/grpo-1", f"grpo={runs}/grpo-2", "--window", "3"]) == 0
    # Steps 1, 3, 4 of seeds 1 and 3: means 1 + 8/3 and 3 + 8/3.
    assert "4.667 ± 1.414" in capsys.readouterr().out


def test_a_resumed_run_says_so(runs, capsys):
    path = runs / "gdpo-1/metrics.jsonl"
    path.write_text(path.read_text() + json.dumps({"step": 3, "data": {"reward/correctness/mean": 9.0}}) + "\n")
    assert main(["report", str(path)]) == 0
    text = capsys.readouterr().out
    assert a_line_says(text, path, "resumed", "step 2")
    assert "1-3" in text


def test_parts_of_a_run_are_joined_by_plus(runs, capsys):
    part = runs / "later.jsonl"
    part.write_text(json.dumps({"step": 5, "data": {"reward/correctness/mean": 6.0}}) + "\n")
    assert main(["report", f"gdpo={runs}/gdpo-1/metrics.jsonl+{part}"]) == 0
    assert "1-5" in capsys.readouterr().out


def test_the_same_table_in_markdown(runs, capsys):
    path = runs / "new/table.md"
    assert main(["report", str(runs / "gdpo-1"), "--markdown", str(path), "--window", "2"]) == 0
    head, rule, row = path.read_text().splitlines()
    assert head == "| reward | name | runs | steps | first 2 | final 2 | best 2 | area |"
    assert rule == "|---|---|---|---|---|---|---|---|"
    assert row == "| correctness | gdpo-1 | 1 | 1-4 | 2.500 | 4.500 | 4.500 | 3.500 |"


def test_the_page_is_one_file_that_needs_no_other(runs, capsys):
    pytest.importorskip("matplotlib")
    path = runs / "new/page.html"
    lines = [
        {"step": step, "data": {"reward/<b>/mean": 0.5, "reward/<b>/dead_groups": 0.1, "timing_s/step": 2.0 * step}}
        for step in (1, 2, 3)
    ]
    (runs / "odd.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    assert main(["report", f"run={runs}/odd.jsonl", "--html", str(path), "--title", "Tools & <more>"]) == 0
    text = path.read_text()
    assert "<h1>Tools &amp; &lt;more&gt;</h1>" in text
    assert "&lt;b&gt;" in text
    assert "<b>" not in text
    assert not re.search(r"""(src|href)=["'](?!data:image/png;base64,)""", text)
    image = base64.b64decode(re.search(r"base64,([^\"]+)", text)[1])
    assert image.startswith(b"\x89PNG")
    # A table of the rewards, and one of what is beside them.
    assert text.count("<table>") == 2
    assert "<td>timing_s/step</td><td>run</td><td>1</td><td>1-3</td><td>4.000</td>" in text
    assert a_line_says(text, "1 to 3", "3 logged")


def test_without_named_rewards_the_score_is_reported(runs, capsys):
    (runs / "plain.jsonl").write_text(json.dumps({"step": 1, "data": {"critic/score/mean": 0.25}}) + "\n")
    assert main(["report", f"x={runs}/plain.jsonl"]) == 0
    line = capsys.readouterr().out.splitlines()[2]
    assert line.split() == ["score", "x", "1", "1-1", "0.250", "0.250", "0.250", "0.250"]


def test_a_run_without_a_metric_says_so_in_the_table(runs, capsys):
    (runs / "plain.jsonl").write_text(json.dumps({"step": 1, "data": {"critic/score/mean": 0.25}}) + "\n")
    assert main(["report", f"{runs}/gdpo-1", f"x={runs}/plain.jsonl", "--plot", f"{runs}/out.png"]) == 0
    assert a_line_says(capsys.readouterr().out, "correctness", "x", 1, "not logged")


def test_an_unknown_metric_is_an_error_that_lists_those_that_exist(runs, capsys):
    assert main(["report", str(runs / "gdpo-1"), "--metrics", "reward/correctnes/mean"]) == 1
    assert says(capsys.readouterr().err, "'reward/correctnes/mean'", "did you mean 'reward/correctness/mean'")


def test_torn_lines_are_mentioned(runs, capsys):
    path = runs / "gdpo-1/metrics.jsonl"
    path.write_text(path.read_text()[:-5])
    assert main(["report", str(runs / "gdpo-1")]) == 0
    assert a_line_says(capsys.readouterr().out, path, "1 unreadable")


@pytest.mark.parametrize("option", ["--smooth", "--window", "--top"])
def test_a_width_below_one_is_refused(runs, capsys, option):
    assert main(["report", str(runs / "gdpo-1"), option, "0"]) == 1
    assert says(capsys.readouterr().err, option, "at least 1", "found 0")


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
    assert says(capsys.readouterr().err, "7 names", "at most 6")


def test_without_matplotlib_a_picture_is_refused_with_what_to_install(runs, capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert main(["report", str(runs / "gdpo-1"), "--plot", str(runs / "out.png")]) == 1
    assert "pip install 'matplotlib>=3.7'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "more", [("--follow", "--html", "x.html"), ("--groups", "--plot", "x.png"), ("--groups", "--follow")]
)
def test_options_that_would_be_ignored_are_refused(more, tmp_path, capsys):
    assert main(["report", str(tmp_path), *more]) != 0
    message = capsys.readouterr().err
    assert all(option in message for option in more if option.startswith("--"))
