"""The estimators once more, in plain loops, written from the specification and slow on purpose.

Nothing of the package is imported. Columns are lists of floats with one entry a trajectory; NaN is "not scored".
"""

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

NAN = math.nan


def groups(uids: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    found: dict[Hashable, list[int]] = {}
    for row, uid in enumerate(uids):
        found.setdefault(uid, []).append(row)
    return found


def scored(values: Sequence[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def has_variance(values: Sequence[float]) -> bool:
    """`max - min <= 1e-6 * max(1, |mean|)` is no variance; a single value has none."""
    known = scored(values)
    if len(known) < 2:
        return False
    return max(known) - min(known) > 1e-6 * max(1.0, abs(statistics.fmean(known)))


def weighted_total(columns: Sequence[Sequence[float]], weights: Sequence[float]) -> list[float]:
    """An unscored component adds 0; a trajectory of which nothing is scored is itself not scored."""
    totals = []
    for row in range(len(columns[0])):
        parts = (weight * column[row] for column, weight in zip(columns, weights, strict=True))
        known = [part for part in parts if not math.isnan(part)]
        totals.append(math.fsum(known) if known else NAN)
    return totals


def centered(values: Sequence[float], uids: Sequence[Hashable]) -> list[float]:
    out = [0.0] * len(values)
    for rows in groups(uids).values():
        mine = [values[row] for row in rows]
        for row in rows:
            if math.isnan(values[row]):
                out[row] = NAN
            elif has_variance(mine):
                out[row] = values[row] - statistics.fmean(scored(mine))
    return out


def over_std(values: Sequence[float], uids: Sequence[Hashable], epsilon: float) -> list[float]:
    """Values (not centered yet) centered and divided by the unbiased std of their group."""
    out = centered(values, uids)
    for rows in groups(uids).values():
        mine = [values[row] for row in rows]
        if has_variance(mine):
            std = statistics.stdev(scored(mine))
            for row in rows:
                out[row] /= std + epsilon
    return out


def over_mad(values: Sequence[float], uids: Sequence[Hashable], epsilon: float) -> list[float]:
    """`n_g (r - mean) / (sum_g |r - mean| + epsilon)`."""
    out = centered(values, uids)
    for rows in groups(uids).values():
        known = scored([out[row] for row in rows])
        deviation = math.fsum(abs(value) for value in known)
        if deviation > 0:
            for row in rows:
                out[row] *= len(known) / (deviation + epsilon)
    return out


def conditioned(
    columns: Mapping[str, Sequence[float]], conditions: Mapping[str, tuple[str, float]]
) -> dict[str, list[float]]:
    """`r_easy * 1[r_hard >= t]`; not scored where the hard one is not."""
    kept = {name: list(column) for name, column in columns.items()}
    for easy, (hard, threshold) in conditions.items():
        for row, value in enumerate(columns[hard]):
            if math.isnan(value):
                kept[easy][row] = NAN
            elif value < threshold - 1e-6 * max(1.0, abs(threshold)) and not math.isnan(kept[easy][row]):
                kept[easy][row] = 0.0
    return kept


def learnt(values: Sequence[float]) -> list[float]:
    """What is not scored teaches nothing."""
    return [0.0 if math.isnan(value) else value for value in values]


def grpo(total: Sequence[float], uids: Sequence[Hashable], *, norm_by_std: bool = True) -> list[float]:
    return learnt(over_std(total, uids, 1e-6) if norm_by_std else centered(total, uids))


def drgrpo(total: Sequence[float], uids: Sequence[Hashable]) -> list[float]:
    return learnt(centered(total, uids))


def gdpo(
    columns: Mapping[str, Sequence[float]],
    uids: Sequence[Hashable],
    lengths: Sequence[float],
    *,
    weights: Sequence[float],
    scale: str = "std",
    whiten: str = "sequence",
    epsilon: float | None = None,
    conditions: Mapping[str, tuple[str, float]] | None = None,
) -> list[float]:
    kept = conditioned(columns, conditions or {})
    in_group = epsilon or (1e-6 if whiten == "token" else 0.0)
    scalers = {
        "std": lambda column: over_std(column, uids, in_group),
        "mad": lambda column: over_mad(column, uids, in_group),
        "none": lambda column: centered(column, uids),
    }
    total = weighted_total([scalers[scale](column) for column in kept.values()], weights)
    cancel(total, uids)
    return learnt(total if whiten == "none" else whitened(total, lengths, whiten, epsilon or 1e-6))


def cancel(total: list[float], uids: Sequence[Hashable]) -> None:
    """Rewards that cancel leave rounding only."""
    for rows in groups(uids).values():
        if not has_variance([total[row] for row in rows]):
            for row in rows:
                total[row] = NAN if math.isnan(total[row]) else 0.0


def dgpo(
    total: Sequence[float],
    uids: Sequence[Hashable],
    lengths: Sequence[float],
    accuracy: Sequence[float],
    *,
    dgae: bool = True,
    dqw: bool = True,
    temperature: float = 2.0,
    balance: str = "token",
    norm_by_std: bool = True,
) -> list[float]:
    if dgae:
        out = over_mad(total, uids, 1e-4)
    elif norm_by_std:
        out = over_std(total, uids, 1e-6)
    else:
        out = centered(total, uids)
    valid = [rows for rows in groups(uids).values() if has_variance([total[row] for row in rows])]
    z = 1.0
    if valid and balance == "token" and sum(lengths[row] for rows in valid for row in rows) > 0:
        z = sum(lengths) / sum(lengths[row] for rows in valid for row in rows)
    elif valid and balance == "sequence":
        z = len(total) / sum(len(rows) for rows in valid)
    weights = difficulty_weights(valid, accuracy, temperature) if dqw else [1.0] * len(valid)
    factor = [z] * len(total)
    for rows, weight in zip(valid, weights, strict=True):
        for row in rows:
            factor[row] *= weight
    return learnt([value * by for value, by in zip(out, factor, strict=True)])


def difficulty_weights(valid: Sequence[Sequence[int]], accuracy: Sequence[float], temperature: float) -> list[float]:
    """`B_v softmax(-acc / T)`; accuracy 0 in a valid group, or none scored, counts as 1."""
    levels = []
    for rows in valid:
        known = scored([accuracy[row] for row in rows])
        levels.append((statistics.fmean(known) if known else 0.0) or 1.0)
    odds = [math.exp(-level / temperature) for level in levels]
    return [len(odds) * one / math.fsum(odds) for one in odds]


@dataclass
class History:
    """HA-DW's memory over batches, for one anchor."""

    anchor: str = "soft"
    lambda_scale: float = 1.3
    history_window: int = 10
    eta: float = 0.1
    eta_min: float = 0.05
    fixed_anchor: float = 0.5
    capability: float | None = None
    remembered: list[float] = field(default_factory=list)

    def reweigh(self, base: Sequence[float], uids: Sequence[Hashable], accuracy: Sequence[float]) -> list[float]:
        known = scored(accuracy)
        if not known:
            return list(base)
        y = statistics.fmean(known)
        first = self.anchor == "soft" and self.capability is None
        prior = self._advance(y)
        out = list(base)
        for rows in groups(uids).values():
            mine = scored([accuracy[row] for row in rows])
            if first or not mine:
                continue
            gap = statistics.fmean(mine) - prior
            for row in rows:
                out[row] = base[row] * self.lambda_scale * math.exp(-math.copysign(1.0, base[row]) * gap)
        return out

    def _advance(self, y: float) -> float:
        """The anchor of this batch; what is remembered moves on."""
        if self.anchor == "fixed":
            return self.fixed_anchor
        if self.anchor == "window":
            self.remembered = [*self.remembered, y][-self.history_window :]
            return statistics.fmean(self.remembered)
        if self.capability is None:
            self.capability, self.remembered = y, [y]
            return y
        prior = self.capability
        sigma = statistics.pstdev(self.remembered) if len(self.remembered) > 1 else 1.0
        step = min(1.0, max(0.0, self.eta_min + self.eta * sigma))
        self.capability = (1 - step) * prior + step * y
        self.remembered = [*self.remembered, self.capability][-self.history_window :]
        return prior


def maxrl(total: Sequence[float], uids: Sequence[Hashable], epsilon: float = 1e-6) -> list[float]:
    out = centered(total, uids)
    for rows in groups(uids).values():
        known = scored([total[row] for row in rows])
        for row in rows:
            out[row] = out[row] / (statistics.fmean(known) + epsilon) if known and out[row] else out[row]
    return learnt(out)


def whitened(total: Sequence[float], lengths: Sequence[float], over: str, epsilon: float) -> list[float]:
    counted = []  # each value as often as it counts
    for value, length in zip(total, lengths, strict=True):
        if not math.isnan(value):
            counted.extend([value] * (1 if over == "sequence" else int(length)))
    if not counted:
        return list(total)
    mean, variance = statistics.fmean(counted), statistics.variance(counted) if len(counted) > 1 else 0.0
    divisor = math.sqrt(variance) + epsilon if over == "sequence" else math.sqrt(variance + 1e-8)
    return [(value - mean) / divisor for value in total]


def gd2po(
    columns: Mapping[str, Sequence[float]],
    uids: Sequence[Hashable],
    lengths: Sequence[float],
    *,
    weights: Sequence[float],
    conflict: str = "hard",
    tau: float = 0.2,
    whiten: str = "token",
    epsilon: float = 1e-6,
    norm_by_std: bool = True,
) -> list[float]:
    scaled = [over_std(column, uids, epsilon) if norm_by_std else centered(column, uids) for column in columns.values()]
    total = weighted_total(scaled, weights)
    for rows in groups(uids).values():
        dropped = []
        for row in rows:
            parts = [weight * column[row] for column, weight in zip(scaled, weights, strict=True)]
            signs = [part for part, column in zip(parts, scaled, strict=True) if abs(column[row]) > 1e-6]
            parts = scored(parts)
            if any(part > 0 for part in signs) and any(part < 0 for part in signs):
                ratio = abs(math.fsum(parts)) / (math.fsum(map(abs, parts)) + 1e-8)
                if conflict == "hard" or ratio < tau:
                    dropped.append(row)
        known = [row for row in rows if not math.isnan(total[row])]
        for row in known:
            total[row] = NAN if row in dropped else total[row] * (1 - len(dropped) / len(known))
    return learnt(total if whiten == "none" else whitened(total, lengths, whiten, epsilon))


def shares(
    parts: Sequence[Sequence[float]], totals: Sequence[float], advantages: Sequence[float], uids: Sequence[Hashable]
) -> list[float]:
    """`cov(c_k, S) / var(S)` of each reward and of the rest, the mean over the groups, which weigh by A²."""
    found, weight = [0.0] * (len(parts[0]) + 1), 0.0
    for rows in groups(uids).values():
        rows = [row for row in rows if not math.isnan(totals[row])]
        mine, squares = [totals[row] for row in rows], sum(advantages[row] ** 2 for row in rows)
        if has_variance(mine):
            each = [[*parts[row], totals[row] - sum(parts[row])] for row in rows]
            for column, values in enumerate(zip(*each, strict=True)):
                found[column] += squares * statistics.covariance(values, mine) / statistics.variance(mine)
            weight += squares
    return [value / weight for value in found if weight]
