import pytest

from tests.facts import a_line_says, says
from tests.tools import made
from tests.tools.made import line
from verl_ext.tools.report.curves import NOISE, changes, default_panels, title, unit
from verl_ext.tools.report.logs import read_log
from verl_ext.tools.report.plot import plot

X = "reward/x/mean"


@pytest.fixture
def report(capsys):
    return lambda *arguments, status=0: made.call(capsys, "report", *arguments, status=status)


def rows(text):
    """The rows of the table without its header, with single spaces."""
    lines = text.splitlines()[2:]
    end = next(at for at, line in enumerate(lines) if line.startswith("  "))
    return [" ".join(row.split()) for row in lines[:end]]


@pytest.fixture
def runs(tmp_path):
    """Two seeds of grpo and one run of gdpo, whose `correctness` is its seed plus its step."""
    for name, seed, steps in (("grpo-1", 1, 4), ("grpo-2", 3, 5), ("gdpo-1", 1, 4)):
        data = {"critic/score/mean": 0.0, "actor/lr": 1.0, "note": "text"}
        records = ((step, {"reward/correctness/mean": seed + step} | data) for step in range(1, steps + 1))
        made.log(tmp_path / name / "metrics.jsonl", *records)
    return tmp_path


def test_the_table_has_a_row_per_name_with_mean_and_standard_deviation_over_its_runs(runs, report):
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
    assert a_line_says(text, "note: ", f"{width} steps", 10) == (width < 10)


LOGS = {
    "a torn last line": (line(1, a=1) + line(2, a=2) + '{"step": 3, "da', {1: 1, 2: 2}, ("1 unreadable",)),
    "two resumes": (
        "".join(line(step, a=at) for at, step in enumerate((1, 2, 3, 4, 3, 4, 5, 2, 3))),
        {1: 0, 2: 7, 3: 8},
        ("resumed at step 3, 2",),
    ),
    "a step in two lines": (line(1, b=1) + line(1, a=2) + line(2, a=3), {1: 2, 2: 3}, ()),
    "NaN, null and infinity": (
        line(1, a=1) + '{"step":2,"data":{"a":NaN}}\n' + line(3, a=None) + line(4, a=1e999),
        {1: 1},
        ("metric a", "1 step(s)", "step 4"),
    ),
}


@pytest.mark.parametrize("case", LOGS)
def test_what_a_log_of_a_run_holds(case, tmp_path):
    text, wanted, noted = LOGS[case]
    (tmp_path / "metrics.jsonl").write_text(text)
    log = read_log(tmp_path / "metrics.jsonl")
    assert log.table["a"].dropna().to_dict() == wanted
    assert len(log.notes) == bool(noted)
    assert says("".join(log.notes), *noted)


def test_the_table_says_which_run_lacks_a_metric_and_the_score_replaces_named_rewards(runs, report):
    plain = made.log(runs / "plain.jsonl", (1, {"critic/score/mean": 0.25}))
    assert rows(report(f"x={plain}"))[0] == "critic/score/mean x 1 1-1 0.250 0.250 0.250 0.250"
    text = report(f"{runs}/gdpo-1", f"x={plain}")
    assert a_line_says(text, "correctness", "x", 1, "not logged")
    assert a_line_says(text, "note: ", "algorithm.rewards.log=all")
    assert "log=all" not in report(f"{runs}/gdpo-1", f"x={plain}", "--metrics", "critic/score/mean", "actor/lr")


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


def test_a_learning_rate_keeps_its_digits(tmp_path, report):
    path = made.log(tmp_path / "run.jsonl", (1, {"actor/lr": 1e-6}), (2, {"actor/lr": 2e-6}))
    assert rows(report(path, "--metrics", "actor/lr"))[0] == "actor/lr run 1 1-2 1e-06 2e-06 2e-06 1.5e-06"


def test_the_error_about_a_folder_of_runs_names_the_runs(runs, report):
    assert says(report(runs, status=1), f"{runs}/gdpo-1", f"{runs}/grpo-1", f"{runs}/grpo-2")


def test_the_plot_is_written(runs, report):
    pytest.importorskip("matplotlib")
    file = runs / "new" / "a.png"
    assert a_line_says(report(runs / "gdpo-1", "--plot", file), "plot", file)
    assert file.read_bytes().startswith(b"\x89PNG")


def test_a_note_names_the_metrics_that_the_plot_omits(runs, report):
    pytest.importorskip("matplotlib")
    path = made.log(runs / "x.jsonl", (1, {X: 1.0, "advantage/std": 0.9}), (2, {X: 2.0, "advantage/std": 0.9}))
    text = report(path, "--plot", runs / "a.png")
    assert a_line_says(text, "note: ", "advantage/std", "--metrics")
    assert not says(text.partition("note: ")[2], "x,")
    assert not says(report(path, "--plot", runs / "a.png", "--metrics", "advantage/std"), "--metrics")


REJECTED = [
    (["--metrics", "reward/correctnes/mean"], ("did you mean 'reward/correctness/mean'",)),
    (["--plot", "x.xyz"], ("x.xyz", "png")),
    (["{runs}/grpo-1/metrics.jsonl", "{runs}/grpo-1"], ("{runs}/grpo-1/metrics.jsonl", "'grpo-1'")),
    (["{runs}/other/gdpo-1.jsonl"], ("'gdpo-1'", "NAME={runs}/other/gdpo-1.jsonl", "gdpo-1={runs}/other/gdpo-1.jsonl")),
    (["{runs}/none"], ("metrics.jsonl", "VERL_FILE_LOGGER_PATH")),
    (["{runs}/other"], ("{runs}/other/gdpo-1.jsonl", "{runs}/other/empty.jsonl")),
    (["{runs}/other/empty.jsonl"], ("empty.jsonl", "no metrics")),
    ([f"{at}={{runs}}/grpo-2" for at in range(7)] + ["--plot", "x.png"], ("8 names", "at most 6")),
]


@pytest.mark.parametrize(("arguments", "wanted"), REJECTED)
def test_mistakes_are_rejected_with_what_is_valid(arguments, wanted, runs, report):
    made.log(runs / "other/gdpo-1.jsonl", (1, {X: 1.0}))
    (runs / "other/empty.jsonl").write_text("")
    arguments, wanted = ([text.format(runs=runs) for text in texts] for texts in (arguments, wanted))
    assert says(report(runs / "gdpo-1", *arguments, status=1), *wanted)


def test_the_error_about_runs_without_a_reward_lists_what_is_logged(tmp_path, report):
    path = made.log(tmp_path / "x.jsonl", (1, {"actor/lr": 1.0}))
    assert says(report(path, status=1), "--metrics", "'actor/lr'")


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


def test_every_reward_and_what_was_logged_with_it_has_a_panel_with_its_unit(tmp_path):
    panels, omitted = default_panels({"a": [logged(tmp_path)]})
    assert omitted == []
    assert [(title(metric), unit(metric)) for metric in panels] == [
        ("correctness", "reward, batch mean"),
        ("correctness: zero-variance groups", "fraction of groups"),
        ("advantage/contribution/correctness", "fraction of the advantage"),
        ("advantage/std", "standard deviation over responses"),
        ("response_length/mean", "tokens, batch mean"),
    ]


NOISY = {
    "rounding of a constant": (X, [0.7, 0.7 + 1e-8], {}, False),
    "a small reward": (X, [1e-9, 2e-9], {}, True),
    "a mean of values that cancel": (X, [1e-16, -2e-16], {"reward/x/std": 1.0}, False),
    "a small mean of large values": (X, [1e-3, -2e-3], {"reward/x/min": -1.0, "reward/x/max": 1.0}, True),
    "a small change": (X, [0.9961, 0.9962], {}, True),
    "a fraction that is 0 apart from rounding": ("advantage/contribution/x", [1e-17, 3e-17], {}, False),
    "a fraction that is small": ("advantage/zero_fraction", [0.0, 1e-3], {}, True),
    "the standard deviation of whitened advantages": ("advantage/std", [0.98425, 0.98425 + 1e-16], {}, False),
    "a constant": ("response_length/mean", [100.0, 100.0], {}, False),
}


@pytest.mark.parametrize("case", NOISY)
def test_a_metric_that_differs_only_by_floating_point_noise_does_not_change(case, tmp_path):
    metric, values, others, wanted = NOISY[case]
    log = read_log(made.log(tmp_path / "a.jsonl", *enumerate({metric: value} | others for value in values)))
    assert changes({"a": [log]}, metric) == wanted
    # The same values in two runs, each constant.
    first, second = (read_log(made.log(tmp_path / "b.jsonl", (1, {metric: value} | others))) for value in values)
    assert changes({"a": [first], "b": [second]}, metric) == wanted
    assert changes({"a": [first, second]}, metric) == wanted


def test_the_limit_of_noise_is_relative_to_the_scale(tmp_path):
    for factor in (0.5, 2.0):
        values = [1e6, 1e6 * (1 + factor * NOISE)]
        log = read_log(made.log(tmp_path / "a.jsonl", *enumerate({X: value} for value in values)))
        assert changes({"a": [log]}, X) == (factor > 1)


def test_metrics_that_never_change_are_omitted_unless_there_are_no_others(tmp_path):
    steps = [{X: 0.5 + step, "advantage/std": 0.98 + 1e-16 * step, "response_length/mean": 7.0} for step in range(4)]
    log = read_log(made.log(tmp_path / "a.jsonl", *enumerate(steps)))
    assert default_panels({"a": [log]}) == ([X], ["advantage/std", "response_length/mean"])
    log = read_log(made.log(tmp_path / "b.jsonl", (1, steps[0])))
    assert default_panels({"a": [log]}) == ([X], [])


def test_a_metric_that_the_user_names_is_drawn_even_if_it_never_changes(tmp_path):
    pytest.importorskip("matplotlib")
    steps = ({"advantage/std": 0.9 + 1e-16 * step, "advantage/mean": 1e-16 * step} for step in range(6))
    log = read_log(made.log(tmp_path / "a.jsonl", *enumerate(steps)))
    panels = plot({"a": [log]}, ["advantage/std", "advantage/mean"], 2).axes
    assert [len(panel.lines) for panel in panels] == [2, 2]


def test_a_small_change_does_not_fill_the_panel(tmp_path):
    pytest.importorskip("matplotlib")
    log = read_log(made.log(tmp_path / "a.jsonl", *enumerate({X: value} for value in (0.9961, 0.9962))))
    (panel,) = plot({"a": [log]}, [X], 1).axes
    low, high = panel.get_ylim()
    assert high - low == pytest.approx(0.9962e-3)
    assert low < 0.9961 < 0.9962 < high


@pytest.mark.parametrize("window", [1, 2, 3])
def test_a_line_is_the_moving_average_over_the_window_and_a_thin_line_has_the_steps(tmp_path, window):
    pytest.importorskip("matplotlib")
    values = [0.0, 3.0, 6.0, 0.0, 3.0, 9.0]
    log = read_log(made.log(tmp_path / "a.jsonl", *enumerate({X: value} for value in values)))
    figure = plot({"a": [log]}, [X], window)
    (panel,), (legend,) = figure.axes, figure.legends
    averages = {1: values, 2: [0.0, 1.5, 4.5, 3.0, 1.5, 6.0], 3: [0.0, 1.5, 3.0, 3.0, 3.0, 4.0]}[window]
    assert list(panel.lines[0].get_ydata()) == pytest.approx(averages)
    assert [list(line.get_ydata()) for line in panel.lines[1:]] == [values] * (window > 1)
    assert says(legend.get_title().get_text(), f"{window} steps") == (window > 1)


def test_the_plot_has_the_window_of_the_table(runs, report, monkeypatch):
    """At most half of the shortest run."""
    pytest.importorskip("matplotlib")
    windows = []
    monkeypatch.setattr(
        "verl_ext.tools.report.command.plot", lambda *arguments: windows.append(arguments[2]) or plot(*arguments)
    )
    for asked in (1, 2, 3):
        report(runs / "gdpo-1", "--window", asked, "--plot", runs / "a.png")
    assert windows == [1, 2, 2]


def test_lines_bands_and_labels(tmp_path):
    pytest.importorskip("matplotlib")
    groups = {
        "grpo": [logged(tmp_path), logged(tmp_path, 1.0)],
        "gdpo": [logged(tmp_path, exclude={"advantage/std"})],
    }
    figure = plot(groups, default_panels(groups)[0], 5)
    axes = {ax.get_title(): ax for ax in figure.axes}
    first = axes["correctness"]
    smoothed = [2.6, 2.65, 2.7, 2.75, 2.8, 2.9]  # of 2.6 to 3.1, the mean of 2.1 to 2.6 and 3.1 to 3.6
    assert list(first.lines[0].get_ydata()) == pytest.approx(smoothed)
    assert list(first.lines[1].get_ydata()) == pytest.approx([2.6, 2.7, 2.8, 2.9, 3.0, 3.1])
    band = first.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == pytest.approx((2.6 - 0.5**0.5, 2.9 + 0.5**0.5))
    assert [line.get_linestyle() for line in first.lines] == [
        "-",
        "-",
        "--",
        "-",
    ]  # of each name the average, the steps
    assert len(axes["advantage/std"].lines) == 2
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["grpo (2 runs)", "gdpo"]
    assert says(legend.get_title().get_text(), "standard deviation")
