"""The plot of `report`: its lines, bands and labels."""

import pytest

from tests.facts import a_line_says, says
from tests.tools.logs import log_of_run, log_of_steps, log_of_values
from tests.tools.run_files import write_log, write_log_of_steps
from verl_ext.tools.report import command
from verl_ext.tools.report.curves import default_panels
from verl_ext.tools.report.plot import plot

pytest.importorskip("matplotlib")

X = "reward/x/mean"


def ydata(lines):
    """Return the y-coordinates of each line."""
    return [list(line.get_ydata()) for line in lines]


def test_the_plot_is_written(tmp_path, report):
    log = write_log(tmp_path / "x.jsonl", (1, {X: 1.0}))
    file = tmp_path / "new" / "a.png"
    assert a_line_says(report(log, "--plot", file), "plot", file)
    assert file.read_bytes().startswith(b"\x89PNG")


def test_a_note_names_the_metrics_that_the_plot_omits(tmp_path, report):
    steps = [{X: 1.0, "advantage/std": 0.9}, {X: 2.0, "advantage/std": 0.9}]
    log = write_log_of_steps(tmp_path / "x.jsonl", steps)
    plot_file = tmp_path / "a.png"
    text = report(log, "--plot", plot_file)
    assert a_line_says(text, "note: ", "advantage/std", "--metrics")
    _, _, text_of_note = text.partition("note: ")
    assert not says(text_of_note, "x,")
    with_metrics = report(log, "--plot", plot_file, "--metrics", "advantage/std")
    assert not says(with_metrics, "--metrics")


def test_a_metric_that_the_user_names_is_drawn_even_if_it_never_changes(tmp_path):
    steps = []
    for step in range(6):
        noise = 1e-16 * step
        steps.append({"advantage/std": 0.9 + noise, "advantage/mean": noise})
    log = log_of_steps(tmp_path / "a.jsonl", steps)
    panels = plot({"a": [log]}, ["advantage/std", "advantage/mean"], 2).axes
    assert [len(panel.lines) for panel in panels] == [2, 2]


def test_a_small_change_does_not_fill_the_panel(tmp_path):
    log = log_of_values(tmp_path / "a.jsonl", X, [0.9961, 0.9962])
    (panel,) = plot({"a": [log]}, [X], 1).axes
    low, high = panel.get_ylim()
    assert high - low == pytest.approx(0.9962e-3)
    assert low < 0.9961 < 0.9962 < high


VALUES = [0.0, 3.0, 6.0, 0.0, 3.0, 9.0]


@pytest.mark.parametrize(
    ("window", "averages"), [(2, [0.0, 1.5, 4.5, 3.0, 1.5, 6.0]), (3, [0.0, 1.5, 3.0, 3.0, 3.0, 4.0])]
)
def test_a_thick_line_is_the_moving_average_and_a_thin_line_has_the_steps(window, averages, tmp_path):
    log = log_of_values(tmp_path / "a.jsonl", X, VALUES)
    figure = plot({"a": [log]}, [X], window)
    (panel,) = figure.axes
    (legend,) = figure.legends
    thick, thin = ydata(panel.lines)
    assert thick == pytest.approx(averages)
    assert thin == VALUES
    assert says(legend.get_title().get_text(), f"{window} steps")


def test_with_a_window_of_one_step_there_is_no_thin_line(tmp_path):
    log = log_of_values(tmp_path / "a.jsonl", X, VALUES)
    figure = plot({"a": [log]}, [X], 1)
    (panel,) = figure.axes
    (legend,) = figure.legends
    assert ydata(panel.lines) == [VALUES]
    assert not says(legend.get_title().get_text(), "1 steps")


@pytest.mark.parametrize(("option", "window"), [(1, 1), (2, 2), (3, 2)])
def test_the_plot_has_the_window_of_the_table(option, window, tmp_path, report, monkeypatch):
    """The window is at most half of the run, which has four steps."""
    log = write_log_of_steps(tmp_path / "x.jsonl", [{X: 1.0}, {X: 2.0}, {X: 3.0}, {X: 4.0}])
    windows = []

    def recording_plot(experiments, metrics, window):
        windows.append(window)
        return plot(experiments, metrics, window)

    monkeypatch.setattr(command, "plot", recording_plot)
    report(log, "--window", option, "--plot", tmp_path / "a.png")
    assert windows == [window]


@pytest.fixture
def figure_of_three_runs(tmp_path):
    """Return the plot of two runs of grpo and one of gdpo, with a window of five steps."""
    first_grpo = log_of_run(tmp_path / "grpo-1.jsonl")
    second_grpo = log_of_run(tmp_path / "grpo-2.jsonl", offset=1.0)
    gdpo = log_of_run(tmp_path / "gdpo.jsonl", exclude={"advantage/std"})
    experiments = {"grpo": [first_grpo, second_grpo], "gdpo": [gdpo]}
    panels, _ = default_panels(experiments)
    return plot(experiments, panels, 5)


def panel_of(figure, heading):
    """Return the panel with a title."""
    (panel,) = (panel for panel in figure.axes if panel.get_title() == heading)
    return panel


def test_the_lines_of_several_runs_are_means_over_the_runs(figure_of_three_runs):
    panel = panel_of(figure_of_three_runs, "correctness")
    averages, steps, *_ = ydata(panel.lines)
    # The mean of 2.1 to 2.6 and 3.1 to 3.6.
    assert steps == pytest.approx([2.6, 2.7, 2.8, 2.9, 3.0, 3.1])
    assert averages == pytest.approx([2.6, 2.65, 2.7, 2.75, 2.8, 2.9])


def test_a_band_is_one_standard_deviation_over_the_runs(figure_of_three_runs):
    panel = panel_of(figure_of_three_runs, "correctness")
    (band,) = panel.collections
    y = band.get_paths()[0].vertices[:, 1]
    standard_deviation = 0.5**0.5  # of two runs that differ by 1
    assert y.min() == pytest.approx(2.6 - standard_deviation)
    assert y.max() == pytest.approx(2.9 + standard_deviation)


def test_each_name_has_a_line_style_and_a_label(figure_of_three_runs):
    panel = panel_of(figure_of_three_runs, "correctness")
    (legend,) = figure_of_three_runs.legends
    # Of each name first the average, then the steps.
    assert [line.get_linestyle() for line in panel.lines] == ["-", "-", "--", "-"]
    assert [text.get_text() for text in legend.get_texts()] == ["grpo (2 runs)", "gdpo"]
    assert says(legend.get_title().get_text(), "standard deviation")


def test_a_name_without_the_metric_has_no_line(figure_of_three_runs):
    assert len(panel_of(figure_of_three_runs, "advantage/std").lines) == 2
