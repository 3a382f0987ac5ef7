"""Logs of runs, written and read."""

from tests.tools.run_files import write_log_of_steps
from verl_ext.tools.report.logs import read_log


def log_of_steps(path, steps):
    """Write and read a log whose steps have these metrics."""
    return read_log(write_log_of_steps(path, steps))


def log_of_values(path, metric, values, **others):
    """Write and read a log with the values of one metric at each step, and constant values of other metrics."""
    return log_of_steps(path, [{metric: value, **others} for value in values])


METRICS_OF_RUN = {
    "reward/correctness/mean": 2.0,
    "reward/correctness/zero_variance_group_fraction": 0.25,
    "reward/correctness/per_turn/1/mean": 2.0,
    "advantage/std": 1.0,
    "advantage/contribution/correctness": 0.5,
    "response_length/mean": 4.0,
    "actor/lr": 1e-6,
}


def log_of_run(path, offset=0.0, exclude=()):
    """Write and read a log of six steps, in which all metrics rise by 0.1 a step."""
    steps = []
    for step in range(1, 7):
        rise = offset + 0.1 * step
        steps.append({name: value + rise for name, value in METRICS_OF_RUN.items() if name not in exclude})
    return log_of_steps(path, steps)
