"""Where two outcomes of a case differ by more than rounding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from tests.golden.cases import Case, Outcome, Rows
from verl_ext.core.metrics import metric_name

# Metrics of a list of steps had the name of the step; now all have the name of the estimator.
OF_STEPS = {"whiten/shift": "whiten_shift", "whiten/std": "whiten_std", "balance/z": "balance_z"}
REMOVED = {f"{name}/zero_mask_ratio" for name in ("dgpo", "balance", "hadw", "compose")}  # another name of balance_z
SIGNED = ("reweighting_mean", "reweighting_std")


def differences(path: str, case: Case, wanted: list[Outcome], found: list[Outcome]) -> Iterator[str]:
    """One line for each batch whose advantages differ, and one for each metric; metrics that are new do not count."""
    for number, (rows, old, new) in enumerate(zip(case.batches, wanted, found, strict=True)):
        tolerance = tolerance_for(case, rows)
        if wrong := advantages(path, old.advantages, new.advantages, tolerance):
            yield f"batch {number} of {len(rows)} rows, {wrong}"
        for name, wrong in metrics(case, old, new, tolerance, largest(rows)):
            if not (name.endswith(SIGNED) and on_the_mean(case, rows)):
                yield f"batch {number}, {wrong}"


def advantages(path: str, old: np.ndarray, new: np.ndarray, tolerance: float) -> str | None:
    """float64 to the tolerance, of the largest number or absolute; float32 to one ulp beside that."""
    if old.shape != new.shape:
        return f"advantages: {len(old)} were stored, there are {len(new)}"
    scale = max(1.0, float(np.nanmax(np.abs(old), initial=0.0)))
    allowed = np.full(old.shape, tolerance * scale)
    if path != "direct":
        allowed += np.spacing(np.maximum(np.abs(old), np.abs(new)).astype(np.float32))
    apart = np.abs(old.astype(np.float64) - new)
    bad = ~(apart <= allowed) & ~(np.isnan(old) & np.isnan(new))
    if not bad.any():
        return None
    worst = int(np.where(bad, np.nan_to_num(apart, nan=np.inf), -1).argmax())
    what = "trajectories" if path == "direct" else "rows"
    return (
        f"advantages of {int(bad.sum())} {what}: worst at {worst}, stored {old[worst]!s}, found {new[worst]!s}, "
        f"{apart[worst]:.3g} apart where {allowed[worst]:.3g} is allowed"
    )


def metrics(case: Case, old: Outcome, new: Outcome, tolerance: float, reward: float) -> Iterator[tuple[str, str]]:
    """The name of each metric that differs, and how."""
    for name, value in old.metrics.items():
        if name in REMOVED:
            continue
        now = renamed(case, name)
        if now not in new.metrics:
            yield name, f"metric {name}={value:g} is missing"
            continue
        # Around 0, these are as exact as the numbers of which they are the mean.
        centred = name.startswith("advantage/") or name.endswith(("whiten_shift", "whiten/shift"))
        allowed = tolerance * max(1.0, abs(value), reward if centred else 0.0)
        if not (abs(new.metrics[now] - value) <= allowed or np.isnan([value, new.metrics[now]]).all()):
            yield name, f"metric {now}: stored {value:.17g}, found {new.metrics[now]:.17g}"


def renamed(case: Case, name: str) -> str:
    """The name that a stored metric has now."""
    name = name.replace("format_m_inimal", metric_name("format_minimal"))  # stored by the names of then
    first, _, short = name.partition("/")
    kept = first in ("reward", "advantage") or not short
    return name if kept else f"{case.estimator}/{OF_STEPS.get(name, short)}"


def tolerance_for(case: Case, rows: Rows) -> float:
    """1e-12; 1e-9 where a reward, or the total, varies in a group by less than 1e-4 of its mean."""
    for values in in_groups(rows, *rewards_of(case, rows), total_of(case, rows)):
        if 0 < np.ptp(values) < 1e-4 * abs(values.mean()):
            return 1e-9
    return 1e-12


def on_the_mean(case: Case, rows: Rows) -> bool:
    """Whether the total of a response is its group's mean: rounding decides its sign, by which hadw weighs."""
    return any(
        bool(np.any(np.abs(values - values.mean()) < 1e-9 * max(1.0, abs(values.mean()))) and np.ptp(values))
        for values in in_groups(rows, *rewards_of(case, rows), total_of(case, rows))
    )


def rewards_of(case: Case, rows: Rows) -> list[np.ndarray]:
    return [rows.columns.get(key, rows.score).astype(np.float64) for key in case.keys or ("score",)]


def total_of(case: Case, rows: Rows) -> np.ndarray:
    """The weighted sum; a reward that is not scored adds 0, a row without any is not scored."""
    columns = np.array(rewards_of(case, rows))
    weights = case.algorithm.get("gdpo_reward_weights") or case.algorithm.get("rewards", {}).get("weights")
    total = np.nansum(columns * np.array(weights or [1.0] * len(columns))[:, None], axis=0)
    return np.where(np.isnan(columns).all(axis=0), np.nan, total)


def in_groups(rows: Rows, *columns: np.ndarray) -> Iterator[np.ndarray]:
    """The scored values of each column in each group: of all rows, and of the last output of each session."""
    last = np.zeros(len(rows), dtype=bool)
    last[[session[-1] for session in rows.sessions]] = True
    for column in columns:
        for prompt in set(rows.prompt.tolist()) - {-1}:
            for taken in (~rows.padding, last):
                values = column[taken & (rows.prompt == prompt) & ~np.isnan(column)]
                if len(values):
                    yield values


def largest(rows: Rows) -> float:
    """The largest reward of a batch."""
    columns: Mapping[str, np.ndarray] = {**rows.columns, "score": rows.score}
    return max(float(np.nanmax(np.abs(column), initial=0.0)) for column in columns.values())
