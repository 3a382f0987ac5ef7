"""What a picture shows: looked up on matplotlib's own axes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from verl_ext.report.log import Log
from verl_ext.report.panels import of_metrics, panels

LOGGED = {
    "reward/correctness/mean": 2.0,
    "reward/correctness/dead_groups": 0.25,
    "reward/format/mean": 0.5,
    "reward/format/dead_groups": 0.5,
    "advantage/std": 1.0,
    "advantage/zero_share": 0.1,
    "critic/advantages/max": 2.0,
    "critic/advantages/min": -2.0,
    "hadw/capability_posterior": 0.5,
    "hadw/batch_accuracy": 0.6,
    "response_length/mean": 20.0,
    "timing_s/step": 4.0,
    "actor/lr": 1e-6,
}


def log(offset=0.0, steps=range(1, 7), leave_out=()):
    data = {name: value for name, value in LOGGED.items() if name not in leave_out}
    return log_of({step: {name: value + offset for name, value in data.items()} for step in steps})


def log_of(steps):
    found = Log(Path("x"))
    for step, data in steps.items():
        found.add(step, data)
    return found


def drawn(groups, shown, tmp_path, monkeypatch, smooth=1):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    from verl_ext.report.plot import plot

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, dpi: figures.append(self))
    plot(groups, shown, tmp_path / "x.png", smooth=smooth)
    (figure,) = figures
    return figure


def test_every_quantity_has_a_panel_with_its_unit():
    found = {panel.title: panel.unit for panel in panels({"a": [log()]})}
    assert found == {
        "correctness": "reward, batch mean",
        "format": "reward, batch mean",
        "correctness: dead groups": "share of prompts",
        "format: dead groups": "share of prompts",
        "advantage: std": "std over responses",
        "advantage: largest and least": "advantage",
        "advantage: exactly 0": "share of responses",
        "hadw: capability (thin: accuracy)": "mean accuracy",
        "length of a response": "tokens, batch mean",
        "time of a step, after the first": "seconds",
    }


def test_what_no_run_has_logged_has_no_panel():
    titles = [panel.title for panel in panels({"a": [log(leave_out={"hadw/capability_posterior", "timing_s/step"})]})]
    assert not [title for title in titles if "hadw" in title or "time" in title]


def test_the_capability_of_a_list_has_a_panel_too():
    """A list of steps logs by the step's name, not by the estimator's."""
    logged = {"weigh_by_history/capability_posterior": 0.5, "weigh_by_history/batch_accuracy": 0.6}
    (panel,) = panels({"a": [log_of({1: logged})]})
    assert panel.metrics == tuple(logged)
    assert "weigh_by_history" in panel.title


def test_chosen_metrics_keep_their_units():
    found = of_metrics(["timing_s/gen", "actor/lr", "response_length/mean"])
    assert [panel.unit for panel in found] == ["seconds", "value", "tokens, batch mean"]


def test_lines_bands_labels_and_units(tmp_path, monkeypatch):
    groups = {"grpo": [log(), log(1.0)], "gdpo": [log(leave_out={"advantage/std"})]}
    shown = panels(groups)
    figure = drawn(groups, shown, tmp_path, monkeypatch)
    axes = dict(zip((panel.title for panel in shown), figure.axes, strict=False))
    for panel in shown:
        assert axes[panel.title].get_title() == panel.title
        assert axes[panel.title].get_ylabel() == panel.unit
    first = axes["correctness"]
    np.testing.assert_allclose(first.lines[0].get_ydata(), [2.5] * 6)  # the mean of 2 and 3
    band = first.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == pytest.approx((2.5 - 0.5**0.5, 2.5 + 0.5**0.5))
    colours = {line.get_color() for line in first.lines}
    styles = {line.get_linestyle() for line in first.lines}
    assert len(colours) == len(styles) == 2
    assert len(axes["hadw: capability (thin: accuracy)"].lines) == 4
    assert [text.get_text() for text in axes["advantage: std"].texts] == ["not logged: gdpo"]
    assert list(axes["time of a step, after the first"].lines[0].get_xdata()) == [2, 3, 4, 5, 6]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["grpo (2 runs)", "gdpo"]
    assert "band: ± 1 standard deviation" in legend.get_title().get_text()


def test_what_does_not_move_is_not_drawn_as_noise(tmp_path, monkeypatch):
    steps = {step: {"advantage/std": 0.996 + 1e-9 * step} for step in range(1, 9)}
    groups = {"a": [log_of(steps)]}
    (ax,) = drawn(groups, of_metrics(["advantage/std"]), tmp_path, monkeypatch).axes
    low, high = ax.get_ylim()
    assert high - low > 0.01


def test_names_are_drawn_as_they_are_written(tmp_path, monkeypatch):
    """Two `$` are no formula, a name that begins with `_` is in the legend, a newline stays in its line."""
    names = ["$a$", "_b$\x1b$", "c\nd\x1b[31m"]
    metric = "reward/$x_1$\x1b[31m/mean"
    groups = {name: [log_of({1: {metric: 1.0}, 2: {metric: 2.0}})] for name in names}
    groups[names[1]].append(log_of({2: {"other": 1.0}}))
    groups["_e"] = groups["$a$"]
    figure = drawn(groups, panels(groups), tmp_path, monkeypatch)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["$a$", "c\\nd\\x1b[31m", "_e"]
    (ax,) = figure.axes
    assert ax.get_title() == "$x_1$\\x1b[31m"
    assert [text.get_text() for text in ax.texts] == ["not logged: _b$\\x1b$"]
    assert not [text for text in [*legend.get_texts(), ax.title, *ax.texts] if text.get_parse_math()]


NAMES = {
    "ordinary names of runs": [f"tools-{name}-15-steps-seed-1" for name in ("grpo", "gdpo", "dgpo")],
    "as many as there are colours": list("abcdef"),
    "a name wider than a panel": ["W" * 60, "a"],
}


@pytest.mark.parametrize("panel_count", [1, 3])
@pytest.mark.parametrize("case", NAMES)
def test_the_whole_legend_is_in_the_picture(case, panel_count, tmp_path, monkeypatch):
    seeds = [log(), log(1.0)]
    shown = of_metrics(list(LOGGED)[:panel_count])
    figure = drawn(dict.fromkeys(NAMES[case], seeds), shown, tmp_path, monkeypatch, smooth=5)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    extent = legend.get_window_extent()
    assert extent.x0 > -0.01
    assert extent.x1 < figure.bbox.width + 0.01
    assert extent.y1 < figure.bbox.height + 0.01
    assert extent.y0 >= max(ax.title.get_window_extent().y1 for ax in figure.axes if ax.get_visible())
    assert min(ax.get_window_extent().height for ax in figure.axes) > 1.5 * figure.dpi  # the panel is no less for it


def test_the_legend_has_the_order_of_the_arguments(tmp_path, monkeypatch):
    """Also where the first run has not logged what the first panel shows."""
    groups = {"a": [log(leave_out={"reward/correctness/mean"})], "b": [log()]}
    (legend,) = drawn(groups, panels(groups), tmp_path, monkeypatch).legends
    assert [text.get_text() for text in legend.get_texts()] == ["a", "b"]


def test_a_run_of_one_step_is_a_point(tmp_path, monkeypatch):
    groups = {"a": [log()], "b": [log(steps=[1])]}
    (ax,) = drawn(groups, of_metrics(["advantage/std"]), tmp_path, monkeypatch).axes
    assert [line.get_marker() for line in ax.lines] == ["None", "o"]


def test_a_picture_without_a_curve_says_what_is_not_logged(tmp_path, monkeypatch):
    groups = {"a": [log(), log(leave_out={"advantage/std"})]}
    (ax,) = drawn(groups, of_metrics(["advantage/std"]), tmp_path, monkeypatch).axes
    assert [text.get_text() for text in ax.texts] == ["not logged: a"]
