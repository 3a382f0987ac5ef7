"""Rules about verl's filter of groups: the metrics of verl_ext, and an estimator that the metric does not fit."""

from collections.abc import Iterator

from verl_ext.errors import Finding
from verl_ext.run import Run
from verl_ext.run_config import FILTER, uses_default_trainer
from verl_ext.settings import ACCURACY_BETWEEN, ANY_REWARD

BOUNDS = f"algorithm.rewards.{ACCURACY_BETWEEN}"
EXAMPLE_BOUNDS = f"'++{BOUNDS}=[0.05,0.95]'"
SET_ACCURACY = "++algorithm.rewards.accuracy_key=NAME"
NAMED_ACCURACY = f"{SET_ACCURACY}, where NAME is the reward that is the accuracy"


def selection_of_trainer(run: Run) -> str:
    """Return the setting that selects the trainer, as it is written, for messages about another than the default."""
    value = run.select("trainer.use_v1")
    return f"trainer.use_v1={'null' if value is None else value}"


def incomplete_filter(run: Run) -> Iterator[Finding]:
    """Reject a filter by the accuracy without bounds, or without the name of the accuracy."""
    if run.filter_metric != ACCURACY_BETWEEN:
        return
    where = f"{FILTER}.metric={ACCURACY_BETWEEN}"
    if run.settings.rewards.accuracy_key is None:
        yield Finding(
            "error",
            f"{where} needs the name of the accuracy, but algorithm.rewards.accuracy_key is not set.",
            f"Set {NAMED_ACCURACY}.",
        )
    if run.settings.rewards.accuracy_between is None:
        yield Finding("error", f"{where} needs bounds, but {BOUNDS} is not set.", f"Set {EXAMPLE_BOUNDS}.")


def bounds_without_filter(run: Run) -> Iterator[Finding]:
    """Reject bounds of the accuracy if verl does not filter by the accuracy."""
    rewards = run.settings.rewards
    if rewards.accuracy_between is None or run.filter_metric == ACCURACY_BETWEEN:
        return
    fix = f"Remove {BOUNDS}."
    if uses_default_trainer(run.config):
        lines = [f"{FILTER}.enable=True", f"{FILTER}.metric={ACCURACY_BETWEEN}"]
        if rewards.accuracy_key is None:
            lines.append(NAMED_ACCURACY)
        fix = f"Set {' '.join(lines)}. Otherwise, remove {BOUNDS}."
    yield Finding(
        "error",
        f"{BOUNDS}={[*rewards.accuracy_between]} has no effect, because verl does not filter groups by "
        f"{ACCURACY_BETWEEN}.",
        fix,
    )


def filter_on_other_trainer(run: Run) -> Iterator[Finding]:
    """Reject a metric of verl_ext on a trainer that does not have it."""
    if run.filter_metric not in (ANY_REWARD, ACCURACY_BETWEEN) or uses_default_trainer(run.config):
        return
    selection = selection_of_trainer(run)
    removed = f" and remove {BOUNDS}" if run.settings.rewards.accuracy_between is not None else ""
    yield Finding(
        "error",
        f"{FILTER}.metric={run.filter_metric} works only on verl's default trainer, but {selection} selects "
        "another trainer.",
        f"Remove {selection}, or set {FILTER}.enable=False{removed}.",
    )


def filter_by_score(run: Run) -> Iterator[Finding]:
    """Warn about a filter by the score if the estimator learns from groups whose scores are equal."""
    if run.chain is None or not run.chain.per_reward or run.filter_metric != "reward":
        return
    rewards = run.settings.rewards
    fix = filter_by_accuracy(run)
    if uses_default_trainer(run.config) and not rewards.per_turn and not rewards.rubrics:
        fix = f"Set {FILTER}.metric={ANY_REWARD}."
    yield Finding(
        "warning",
        f"{FILTER}.metric=reward drops groups whose responses have equal scores. {run.name} learns from such a group, "
        "except where the rewards of the group cancel.",
        fix,
    )


def filter_by_accuracy(run: Run) -> str:
    """Return the fix for a filter of groups that does not fit the rewards: filter by the accuracy, or not at all."""
    if not uses_default_trainer(run.config):
        return f"Set {FILTER}.enable=False."
    rewards = run.settings.rewards
    lines = [f"{FILTER}.metric={ACCURACY_BETWEEN}"]
    explanation = ""
    if rewards.accuracy_between is None:
        lines.append(EXAMPLE_BOUNDS)
    lists = rewards.per_turn or rewards.rubrics or ()
    if rewards.accuracy_key is None or rewards.accuracy_key in lists:
        lines.append(SET_ACCURACY)
        explanation = " NAME is the reward that is the accuracy, with one number per response."
    return f"Set {' '.join(lines)}, or {FILTER}.enable=False.{explanation}"
