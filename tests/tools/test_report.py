"""The table of `report`, and what it reads from the logs of runs."""

from dataclasses import dataclass

import pytest

from tests.facts import a_line_says, says
from tests.tools.run_files import log_line, write_log, write_log_of_steps
from verl_ext.tools.report.logs import read_log

X = "reward/x/mean"


def rows_in(text):
    """Return the rows of the table without its header, with single spaces."""
    rows = []
    for line in text.splitlines()[2:]:
        if line.startswith("  "):  # the remarks below the table
            break
        rows.append(" ".join(line.split()))
    return rows


def cells_in(text):
    """Return the cells of each row whose cells contain no space."""
    return [row.split() for row in rows_in(text)]


@pytest.fixture
def runs(tmp_path):
    """Return a folder with two seeds of grpo and one run of gdpo, whose `correctness` is its seed plus its step."""
    for name, seed, last_step in (("grpo-1", 1, 4), ("grpo-2", 3, 5), ("gdpo-1", 1, 4)):
        steps = []
        for step in range(1, last_step + 1):
            rewards = {"reward/correctness/mean": seed + step, "critic/score/mean": 0.0}
            steps.append({**rewards, "actor/lr": 1.0, "note": "text"})
        write_log_of_steps(tmp_path / name / "metrics.jsonl", steps)
    return tmp_path


def test_the_table_has_a_row_per_name_with_mean_and_standard_deviation(runs, report):
    text = report(f"grpo={runs}/grpo-1", f"grpo={runs}/grpo-2", runs / "gdpo-1", "--window", "2")
    assert text.split()[:10] == ["metric", "name", "runs", "steps", "first", "2", "final", "2", "highest", "2"]
    # Steps 1-4, which both seeds have. First two: seed + 1.5 = 2.5 and 4.5, mean 3.5, std sqrt(2); last two: 2 more.
    # All four: seed + 2.5.
    assert rows_in(text) == [
        "correctness grpo 2 1-4 3.500 ± 1.414 5.500 ± 1.414 5.500 ± 1.414 4.500 ± 1.414",
        "correctness gdpo-1 1 1-4 2.500 4.500 4.500 3.500",
    ]


def test_the_highest_and_the_mean_of_a_curve_that_falls_again(tmp_path, report):
    steps = [(10, {X: 0.0}), (20, {X: 4.0}), (30, {X: 4.0}), (40, {X: 0.0}), (50, {X: 1.0})]
    log = write_log(tmp_path / "x.jsonl", *steps)
    assert rows_in(report(f"run={log}", "--window", "2")) == ["x run 1 10-50 2.000 0.500 4.000 1.800"]


def test_first_and_final_are_at_most_half_of_the_run_each(tmp_path, report):
    log = write_log_of_steps(tmp_path / "x.jsonl", [{X: 1.0}] * 5)
    text = report(log)
    assert "first 2 " in text
    assert a_line_says(text, "note: ", "2 steps", 10)


def test_first_and_final_are_ten_steps_of_a_long_run(tmp_path, report):
    log = write_log_of_steps(tmp_path / "x.jsonl", [{X: 1.0}] * 40)
    text = report(log)
    assert "first 10 " in text
    assert "note: " not in text


@dataclass
class LogCase:
    """A log with a metric `a`."""

    text: str
    value_at_step: dict[int, float]
    note: tuple[str, ...] = ()


STEPS_OF_TWO_RESUMES = (1, 2, 3, 4, 3, 4, 5, 2, 3)
LOGS = {
    "a torn last line": LogCase(
        text=log_line(1, a=1) + log_line(2, a=2) + '{"step": 3, "da',
        value_at_step={1: 1, 2: 2},
        note=("1 unreadable",),
    ),
    "two resumes": LogCase(
        text="".join(log_line(step, a=line) for line, step in enumerate(STEPS_OF_TWO_RESUMES)),
        value_at_step={1: 0, 2: 7, 3: 8},
        note=("resumed at step 3, 2",),
    ),
    "a step in two lines": LogCase(
        text=log_line(1, b=1) + log_line(1, a=2) + log_line(2, a=3),
        value_at_step={1: 2, 2: 3},
    ),
    "NaN, null and infinity": LogCase(
        text=log_line(1, a=1) + '{"step":2,"data":{"a":NaN}}\n' + log_line(3, a=None) + log_line(4, a=1e999),
        value_at_step={1: 1},
        note=("metric a", "1 step(s)", "step 4"),
    ),
}


@pytest.mark.parametrize("case", LOGS.values(), ids=LOGS)
def test_a_log_has_the_last_finite_value_at_each_step(case, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(case.text)
    log = read_log(path)
    assert log.table["a"].dropna().to_dict() == case.value_at_step
    assert len(log.notes) == (1 if case.note else 0)
    assert says("".join(log.notes), *case.note)


def test_a_run_without_named_rewards_has_the_score_of_verl(runs, report):
    log = write_log(runs / "plain.jsonl", (1, {"critic/score/mean": 0.25}))
    assert rows_in(report(f"x={log}")) == ["critic/score/mean x 1 1-1 0.250 0.250 0.250 0.250"]


def test_the_table_says_which_run_has_not_logged_a_reward(runs, report):
    log = write_log(runs / "plain.jsonl", (1, {"critic/score/mean": 0.25}))
    text = report(f"{runs}/gdpo-1", f"x={log}")
    assert a_line_says(text, "correctness", "x", 1, "not logged")
    assert a_line_says(text, "note: ", "algorithm.rewards.log=all")
    other_metrics = report(f"{runs}/gdpo-1", f"x={log}", "--metrics", "critic/score/mean", "actor/lr")
    assert "log=all" not in other_metrics


EXT_LOG = {X: 1.0, "reward/score/mean": 2.0, "critic/score/mean": 2.0}


def test_the_score_is_that_of_verl_if_a_run_has_no_other(tmp_path, report):
    with_ext_score = write_log(tmp_path / "gdpo.jsonl", (1, EXT_LOG))
    without_ext_score = write_log(tmp_path / "grpo.jsonl", (1, {X: 1.0, "critic/score/mean": 0.25}))
    text = report(without_ext_score, with_ext_score)
    assert [cells[:2] for cells in cells_in(text)] == [
        ["x", "grpo"],
        ["x", "gdpo"],
        ["critic/score/mean", "grpo"],
        ["critic/score/mean", "gdpo"],
    ]
    assert not says(text, "not logged")


def test_the_score_is_that_of_verl_ext_if_all_runs_have_it(tmp_path, report):
    log = write_log(tmp_path / "gdpo.jsonl", (1, EXT_LOG))
    assert [cells[0] for cells in cells_in(report(log))] == ["score", "x"]


def test_both_scores_are_shown_if_no_score_is_in_all_runs(tmp_path, report):
    only_verl = write_log(tmp_path / "verl.jsonl", (1, {X: 1.0, "critic/score/mean": 0.25}))
    only_ext = write_log(tmp_path / "ext.jsonl", (1, {"reward/score/mean": 2.0}))
    text = report(only_verl, only_ext)
    metrics = [cells[0] for cells in cells_in(text)]
    assert set(metrics) == {"score", "x", "critic/score/mean"}


def test_a_learning_rate_keeps_its_digits(tmp_path, report):
    log = write_log_of_steps(tmp_path / "run.jsonl", [{"actor/lr": 1e-6}, {"actor/lr": 2e-6}])
    assert rows_in(report(log, "--metrics", "actor/lr")) == ["actor/lr run 1 1-2 1e-06 2e-06 2e-06 1.5e-06"]


def test_the_error_about_a_folder_of_runs_names_the_runs(runs, report):
    assert says(report(runs, status=1), f"{runs}/gdpo-1", f"{runs}/grpo-1", f"{runs}/grpo-2")


LOG_OF_SAME_NAME = "{runs}/other/gdpo-1.jsonl"
REJECTED = {
    "a misspelled metric": (
        ["--metrics", "reward/correctnes/mean"],
        ["did you mean 'reward/correctness/mean'"],
    ),
    "an unknown format of the plot": (["--plot", "x.xyz"], ["x.xyz", "png"]),
    "a log twice": (["{runs}/grpo-1/metrics.jsonl", "{runs}/grpo-1"], ["{runs}/grpo-1/metrics.jsonl", "'grpo-1'"]),
    "a name twice": ([LOG_OF_SAME_NAME], ["'gdpo-1'", f"NAME={LOG_OF_SAME_NAME}", f"gdpo-1={LOG_OF_SAME_NAME}"]),
    "no folder": (["{runs}/none"], ["metrics.jsonl", "VERL_FILE_LOGGER_PATH"]),
    "a folder with two logs": (["{runs}/other"], [LOG_OF_SAME_NAME, "{runs}/other/empty.jsonl"]),
    "an empty log": (["{runs}/other/empty.jsonl"], ["empty.jsonl", "no metrics"]),
    "too many names for a plot": (
        [*(f"{number}={{runs}}/grpo-2" for number in range(7)), "--plot", "x.png"],
        ["8 names", "at most 6"],
    ),
}


@pytest.mark.parametrize(("arguments", "message"), REJECTED.values(), ids=REJECTED)
def test_mistakes_are_rejected_with_what_is_valid(arguments, message, runs, report):
    write_log(runs / "other/gdpo-1.jsonl", (1, {X: 1.0}))
    (runs / "other/empty.jsonl").write_text("")
    arguments_with_folder = [argument.format(runs=runs) for argument in arguments]
    message_with_folder = [fact.format(runs=runs) for fact in message]
    error = report(runs / "gdpo-1", *arguments_with_folder, status=1)
    assert says(error, *message_with_folder)


def test_the_error_about_runs_without_a_reward_lists_what_is_logged(tmp_path, report):
    log = write_log(tmp_path / "x.jsonl", (1, {"actor/lr": 1.0}))
    assert says(report(log, status=1), "--metrics", "'actor/lr'")
