import pytest

from tests.facts import a_line_says, says
from tests.tools import made
from tests.tools.made import line
from verl_ext.tools.report.curves import pictured, title, unit
from verl_ext.tools.report.logs import read_log
from verl_ext.tools.report.plot import plot

X = "reward/x/mean"


@pytest.fixture
def report(capsys):
    return lambda *arguments, status=0: made.call(capsys, "report", *arguments, status=status)


def rows(text):
    """The table without its header, its spaces as one."""
    return [" ".join(row.split()) for row in text.splitlines()[2:]]


@pytest.fixture
def runs(tmp_path):
    """Two seeds of grpo and one run of gdpo, whose `correctness` is its seed plus its step."""
    for name, seed, steps in (("grpo-1", 1, 4), ("grpo-2", 3, 5), ("gdpo-1", 1, 4)):
        data = {"critic/score/mean": 0.0, "actor/lr": 1.0, "note": "text"}
        records = ((step, {"reward/correctness/mean": seed + step} | data) for step in range(1, steps + 1))
        made.log(tmp_path / name / "metrics.jsonl", *records)
    return tmp_path


def test_the_table_has_a_line_a_name_with_mean_and_spread_over_its_runs(runs, report):
    text = report(f"grpo={runs}/grpo-1", f"grpo={runs}/grpo-2", runs / "gdpo-1", "--window", "2")
    assert text.split()[:10] == ["metric", "name", "runs", "steps", "first", "2", "final", "2", "highest", "2"]
    # Steps 1-4, which both seeds have. First two: seed + 1.5 = 2.5 and 4.5, mean 3.5, std sqrt(2); last two: 2 more.
    # All four: seed + 2.5.
    assert rows(text) == [
        "correctness grpo 2 1-4 3.500 ± 1.414 5.500 ± 1.414 5.500 ± 1.414 4.500 ± 1.414",
        "correctness gdpo-1 1 1-4 2.500 4.500 4.500 3.500",
    ]


def test_the_highest_and_the_mean_of_a_curve_that_falls_again(tmp_path, report):
    values = [0.0, 4.0, 4.0, 0.0, 1.0]
    path = made.log(tmp_path / "x.jsonl", *((10 * at, {X: value}) for at, value in enumerate(values, 1)))
    assert rows(report(f"run={path}", "--window", "2")) == ["x run 1 10-50 2.000 0.500 4.000 1.800"]


@pytest.mark.parametrize(("steps", "width"), [(5, 2), (40, 10)])
def test_first_and_final_are_of_steps_that_the_run_has_and_do_not_overlap(steps, width, tmp_path, report):
    path = made.log(tmp_path / "x.jsonl", *((step, {X: 1.0}) for step in range(1, steps + 1)))
    text = report(path)
    assert f"first {width} " in text
    assert (f"means of {width} step" in text) == (width < 10)


LOGS = {
    "a torn last line": (line(1, a=1) + line(2, a=2) + '{"step": 3, "da', {1: 1, 2: 2}, "1 unreadable"),
    "two resumes": (
        "".join(line(step, a=at) for at, step in enumerate((1, 2, 3, 4, 3, 4, 5, 2, 3))),
        {1: 0, 2: 7, 3: 8},
        "resumed at step 3, 2",
    ),
    "a step in two lines": (line(1, b=1) + line(1, a=2) + line(2, a=3), {1: 2, 2: 3}, ""),
    "NaN, null and infinity": (
        line(1, a=1) + '{"step":2,"data":{"a":NaN}}\n' + line(3, a=None) + line(4, a=1e999),
        {1: 1},
        "a is infinite at 1 steps, the first 4",
    ),
}


@pytest.mark.parametrize("case", LOGS)
def test_what_a_log_of_a_run_holds(case, tmp_path):
    text, wanted, note = LOGS[case]
    (tmp_path / "metrics.jsonl").write_text(text)
    log = read_log(tmp_path / "metrics.jsonl")
    assert log.table["a"].dropna().to_dict() == wanted
    assert " ".join(log.notes).startswith(note)


def test_a_run_without_a_metric_says_so_in_the_table_and_the_score_stands_in_for_named_rewards(runs, report):
    plain = made.log(runs / "plain.jsonl", (1, {"critic/score/mean": 0.25}))
    assert rows(report(f"x={plain}"))[0] == "critic/score/mean x 1 1-1 0.250 0.250 0.250 0.250"
    text = report(f"{runs}/gdpo-1", f"x={plain}")
    assert a_line_says(text, "correctness", "x", 1, "not logged")
    assert a_line_says(text, "not logged", "algorithm.rewards.log=all")


def test_the_score_is_verls_own_mean_for_all_where_a_run_has_no_other(tmp_path, report):
    ours = made.log(tmp_path / "gdpo.jsonl", (1, {X: 1.0, "reward/score/mean": 2.0, "critic/score/mean": 2.0}))
    verls = made.log(tmp_path / "grpo.jsonl", (1, {X: 1.0, "critic/score/mean": 0.25}))
    assert [row.split()[:2] for row in rows(report(verls, ours))[:4]] == [
        *(["x", "grpo"], ["x", "gdpo"]),
        *(["critic/score/mean", "grpo"], ["critic/score/mean", "gdpo"]),
    ]
    assert not says(report(verls, ours), "not logged")
    assert [row.split()[0] for row in rows(report(ours))[:2]] == ["score", "x"]
    without = made.log(tmp_path / "odd.jsonl", (1, {"reward/score/mean": 2.0}))
    assert {row.split()[0] for row in rows(report(verls, without)) if "odd" in row} >= {"score", "critic/score/mean"}


def test_a_learning_rate_keeps_its_figures(tmp_path, report):
    path = made.log(tmp_path / "run.jsonl", (1, {"actor/lr": 1e-6}), (2, {"actor/lr": 2e-6}))
    assert rows(report(path, "--metrics", "actor/lr"))[0] == "actor/lr run 1 1-2 1e-06 2e-06 2e-06 1.5e-06"


def test_a_folder_of_runs_is_told_with_the_runs_in_it(runs, report):
    assert says(report(runs, status=1), f"{runs}/gdpo-1", f"{runs}/grpo-1", f"{runs}/grpo-2")


def test_the_picture_is_written(runs, report):
    pytest.importorskip("matplotlib")
    picture = runs / "new" / "a.png"
    report(runs / "gdpo-1", "--plot", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


REFUSED = [
    (["--metrics", "reward/correctnes/mean"], ("did you mean 'reward/correctness/mean'",)),
    (["--plot", "x.xyz"], ("x.xyz", "png")),
    (["{runs}/grpo-1/metrics.jsonl", "{runs}/grpo-1"], ("grpo-1", "NAME=")),
    (["{runs}/none"], ("metrics.jsonl", "VERL_FILE_LOGGER_PATH")),
    (["{runs}/empty.jsonl"], ("empty.jsonl", "no metrics")),
    ([f"{at}={{runs}}/grpo-2" for at in range(7)] + ["--plot", "x.png"], ("8 names", "at most 6")),
]


@pytest.mark.parametrize(("arguments", "told"), REFUSED)
def test_mistakes_are_refused_with_what_is_valid(arguments, told, runs, report):
    (runs / "empty.jsonl").write_text("")
    arguments = [argument.format(runs=runs) for argument in arguments]
    assert says(report(runs / "gdpo-1", *arguments, status=1), *told)


LOGGED = {
    "reward/correctness/mean": 2.0,
    "reward/correctness/zero_variance_group_fraction": 0.25,
    "reward/correctness/per_turn/1/mean": 2.0,
    "advantage/std": 1.0,
    "advantage/contribution/correctness": 0.5,
    "response_length/mean": 4.0,
    "actor/lr": 1e-6,
}


def logged(tmp_path, offset=0.0, exclude=()):
    """A log of six steps, in which all rises by 0.1 a step."""
    data = {name: value + offset for name, value in LOGGED.items() if name not in exclude}
    steps = ((step, {name: value + 0.1 * step for name, value in data.items()}) for step in range(1, 7))
    return read_log(made.log(tmp_path / "log.jsonl", *steps))


def test_every_reward_and_what_was_logged_beside_it_has_a_panel_with_its_unit(tmp_path):
    assert [(title(metric), unit(metric)) for metric in pictured({"a": [logged(tmp_path)]})] == [
        ("correctness", "reward, batch mean"),
        ("correctness: dead groups", "share of prompts"),
        ("advantage/contribution/correctness", "share of the advantage"),
        ("advantage/std", "std over responses"),
        ("response_length/mean", "tokens, batch mean"),
    ]


def test_a_panel_in_which_nothing_varies_as_the_table_rounds_it_is_a_line_of_text(tmp_path):
    pytest.importorskip("matplotlib")
    steps = [
        {X: 0.9961, "advantage/contribution/x": 1e-8, "actor/lr": 1e-6},
        {X: 0.9962, "advantage/contribution/x": 2e-8},
    ]
    log = read_log(made.log(tmp_path / "log.jsonl", *enumerate([*steps, {"actor/lr": 2e-6}])))
    panels = plot({"a": [log]}, [X, "advantage/contribution/x", "actor/lr"]).axes
    texts = [[text.get_text() for text in panel.texts] for panel in panels]
    assert texts == [["x: 0.996 throughout"], ["advantage/contribution/x: 0.000 throughout"], []]
    assert [len(panel.lines) for panel in panels] == [0, 0, 2]


def test_lines_bands_and_labels(tmp_path):
    pytest.importorskip("matplotlib")
    groups = {
        "grpo": [logged(tmp_path), logged(tmp_path, 1.0)],
        "gdpo": [logged(tmp_path, exclude={"advantage/std"})],
    }
    figure = plot(groups, pictured(groups))
    axes = {ax.get_title(): ax for ax in figure.axes}
    first = axes["correctness"]
    smoothed = [2.6, 2.65, 2.7, 2.75, 2.8, 2.9]  # of 2.6 to 3.1, the mean of 2.1 to 2.6 and 3.1 to 3.6
    assert list(first.lines[0].get_ydata()) == pytest.approx(smoothed)
    band = first.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == pytest.approx((2.6 - 0.5**0.5, 2.9 + 0.5**0.5))
    assert [line.get_linestyle() for line in first.lines] == ["-", "--", "-"]  # both means, and the steps of one run
    assert len(axes["advantage/std"].lines) == 1
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["grpo (2 runs)", "gdpo"]
