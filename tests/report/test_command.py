from __future__ import annotations

import base64
import re

import pytest

from tests.facts import a_line_says, says
from tests.report.logs import line, write
from verl_ext.cli import main


@pytest.fixture
def runs(tmp_path):
    """Two seeds of grpo and one run of gdpo, whose `correctness` is its seed plus its step."""
    for name, seed, steps in (("grpo-1", 1, 4), ("grpo-2", 3, 5), ("gdpo-1", 1, 4)):
        data = {"critic/score/mean": 0.0, "actor/lr": 1.0}
        records = ((step, {"reward/correctness/mean": seed + step} | data) for step in range(1, steps + 1))
        write(tmp_path / name / "metrics.jsonl", *records)
    write(tmp_path / "plain.jsonl", (1, {"critic/score/mean": 0.25}))
    return tmp_path


@pytest.fixture
def printed(capsys):
    def report(*arguments, status=0):
        assert main(["report", *map(str, arguments)]) == status
        written = capsys.readouterr()
        return written.err if status else written.out

    return report


def test_the_table_has_a_line_a_name_with_mean_and_spread_over_its_runs(runs, printed):
    text = printed(f"grpo={runs}/grpo-1", f"grpo={runs}/grpo-2", runs / "gdpo-1", "--window", "2")
    header, _, *lines = (" ".join(row.split()) for row in text.splitlines())
    assert header == "reward name runs steps first 2 final 2 best 2 area"
    # Steps 1-4, which both seeds have. First two: seed + 1.5 = 2.5 and 4.5, mean 3.5, std sqrt(2); last two: 2 more.
    # The mean height of a straight line is that of its middle: seed + 2.5.
    assert lines == [
        "correctness grpo 2 1-4 3.500 ± 1.414 5.500 ± 1.414 5.500 ± 1.414 4.500 ± 1.414",
        "correctness gdpo-1 1 1-4 2.500 4.500 4.500 3.500",
    ]


def test_best_and_area_of_a_curve_that_falls_again(tmp_path, printed):
    values = [0.0, 4.0, 4.0, 0.0, 1.0]
    path = write(tmp_path / "x.jsonl", *((10 * at, {"reward/x/mean": value}) for at, value in enumerate(values, 1)))
    # Trapezes: (0+4)/2, 4, 2, 0.5, over four equal stretches: 8.5 / 4.
    row = printed(f"run={path}", "--window", "2").splitlines()[2]
    assert " ".join(row.split()) == "x run 1 10-50 2.000 0.500 4.000 2.125"


def test_runs_of_a_name_are_compared_at_the_steps_that_all_of_them_have(runs, printed):
    text = (runs / "grpo-1/metrics.jsonl").read_text().splitlines(keepends=True)
    (runs / "grpo-1/metrics.jsonl").write_text("".join(text[:1] + text[2:]))  # step 2 is missing
    # Steps 1, 3, 4 of seeds 1 and 3: means 1 + 8/3 and 3 + 8/3.
    assert "4.667 ± 1.414" in printed(f"grpo={runs}/grpo-1", f"grpo={runs}/grpo-2", "--window", "3")


def test_a_resumed_run_and_torn_lines_are_mentioned(runs, printed):
    path = runs / "gdpo-1/metrics.jsonl"
    path.write_text(path.read_text() + line(3, **{"reward/correctness/mean": 9.0}) + "torn")
    text = printed(path)
    assert a_line_says(text, path, "resumed", "step 2")
    assert a_line_says(text, path, "1 unreadable")
    assert "1-3" in text


def test_parts_of_a_run_are_joined_by_plus(runs, printed):
    part = write(runs / "later.jsonl", (5, {"reward/correctness/mean": 6.0}))
    assert "1-5" in printed(f"gdpo={runs}/gdpo-1/metrics.jsonl+{part}")


def test_the_same_table_in_markdown(runs, printed):
    path = runs / "new/table.md"
    printed(runs / "gdpo-1", "--markdown", path, "--window", "2")
    assert path.read_text().splitlines() == [
        "| reward | name | runs | steps | first 2 | final 2 | best 2 | area |",
        "|---|---|---|---|---|---|---|---|",
        "| correctness | gdpo-1 | 1 | 1-4 | 2.500 | 4.500 | 4.500 | 3.500 |",
    ]


def test_the_page_is_one_file_that_needs_no_other(runs, printed):
    pytest.importorskip("matplotlib")
    path = runs / "new/page.html"
    data = {"reward/<b>/mean": 0.5, "reward/<b>/dead_groups": 0.1}
    log = write(runs / "odd.jsonl", *((step, data | {"timing_s/step": 2.0 * step}) for step in (1, 2, 3)))
    printed(f"run={log}", "--html", path, "--title", "Tools & <more>")
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


def test_without_named_rewards_the_score_is_reported(runs, printed):
    row = printed(f"x={runs}/plain.jsonl").splitlines()[2]
    assert " ".join(row.split()) == "score x 1 1-1 0.250 0.250 0.250 0.250"


def test_a_run_without_a_metric_says_so_in_the_table(runs, printed):
    text = printed(f"{runs}/gdpo-1", f"x={runs}/plain.jsonl", "--plot", f"{runs}/out.png")
    assert a_line_says(text, "correctness", "x", 1, "not logged")


def test_the_picture_is_a_png_with_a_panel_a_metric(runs, printed):
    pytest.importorskip("matplotlib")
    path = runs / "new/rewards.png"
    arguments = [f"grpo={runs}/grpo-1", f"grpo={runs}/grpo-2", f"gdpo={runs}/gdpo-1", "--plot", path]
    assert f"picture: {path}" in printed(*arguments)
    narrow = path.read_bytes()
    printed(*arguments, "--metrics", "reward/correctness/mean", "actor/lr")
    # The width in a PNG's header, bytes 16 to 19.
    assert 2 * int.from_bytes(narrow[16:20], "big") == int.from_bytes(path.read_bytes()[16:20], "big")


def test_more_names_than_colours_are_refused(runs, printed):
    pytest.importorskip("matplotlib")
    arguments = [f"{number}={runs}/gdpo-1" for number in range(7)]
    assert says(printed(*arguments, "--plot", runs / "out.png", status=1), "7 names", "at most 6")


def test_without_matplotlib_a_picture_is_refused_with_what_to_install(runs, printed, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert "pip install 'matplotlib>=3.7'" in printed(runs / "gdpo-1", "--plot", runs / "out.png", status=1)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--smooth", "0"], ("--smooth", "at least 1", "found 0")),
        (["--window", "0"], ("--window", "at least 1", "found 0")),
        (["--top", "0"], ("--top", "at least 1", "found 0")),
        *(
            ([option, str(10**30)], (option, "at most 1000000000", f"found {10**30}"))
            for option in ("--smooth", "--window", "--top")
        ),
        *(
            (["--follow", "--interval", found], ("--interval", "above 0", "at most 86400", f"found {found}"))
            for found in ("0", "-1", "nan", "inf", "1e+12")
        ),
        (["--follow", "--html", "x.html"], ("--follow", "--html")),
        (["--groups", "--plot", "x.png"], ("--groups", "--plot")),
        (["--groups", "--follow"], ("--groups", "--follow")),
        (
            ["--metrics", "reward/correctnes/mean"],
            ("'reward/correctnes/mean'", "did you mean 'reward/correctness/mean'"),
        ),
    ],
)
def test_wrong_options_and_those_that_would_be_ignored_are_refused(more, told, runs, printed):
    assert says(printed(runs / "gdpo-1", *more, status=1), *told)
