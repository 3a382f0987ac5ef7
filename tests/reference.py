"""The estimators once more, in plain loops, written from the specification and slow on purpose.

Nothing of the package is imported. A column is a list of floats with one entry per trajectory. NaN means "not scored".
"""

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

NAN = math.nan


def groups(uids: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    """Return the rows of each group, by uid."""
    rows_of_uid: dict[Hashable, list[int]] = {}
    for row, uid in enumerate(uids):
        rows_of_uid.setdefault(uid, []).append(row)
    return rows_of_uid


def scored(values: Sequence[float]) -> list[float]:
    """Return the values without NaN."""
    return [value for value in values if not math.isnan(value)]


def has_variance(values: Sequence[float]) -> bool:
    """Return whether `max - min > 1e-6 * max(1, |mean|)`. A single scored value has zero variance."""
    known = scored(values)
    if len(known) < 2:
        return False
    tolerance = 1e-6 * max(1.0, abs(statistics.fmean(known)))
    return max(known) - min(known) > tolerance


def weighted_total(columns: Sequence[Sequence[float]], weights: Sequence[float]) -> list[float]:
    """Return the weighted sum of each trajectory.

    A reward that is not scored adds 0. A trajectory without a scored reward is not scored.
    """
    totals = []
    for rewards in zip(*columns, strict=True):
        weighted = [weight * reward for weight, reward in zip(weights, rewards, strict=True)]
        known = scored(weighted)
        totals.append(math.fsum(known) if known else NAN)
    return totals


def centered(values: Sequence[float], uids: Sequence[Hashable]) -> list[float]:
    """Subtract the mean of the group. A zero-variance group is exactly 0."""
    result = [0.0] * len(values)
    for rows in groups(uids).values():
        values_of_group = [values[row] for row in rows]
        varies = has_variance(values_of_group)
        for row in rows:
            if math.isnan(values[row]):
                result[row] = NAN
            elif varies:
                result[row] = values[row] - statistics.fmean(scored(values_of_group))
    return result


def over_std(values: Sequence[float], uids: Sequence[Hashable], epsilon: float) -> list[float]:
    """Center the values, then divide by the standard deviation (n - 1) of the group plus epsilon."""
    result = centered(values, uids)
    for rows in groups(uids).values():
        values_of_group = [values[row] for row in rows]
        if has_variance(values_of_group):
            std = statistics.stdev(scored(values_of_group))
            for row in rows:
                result[row] /= std + epsilon
    return result


def over_mad(values: Sequence[float], uids: Sequence[Hashable], epsilon: float) -> list[float]:
    """Return `n_g (r - mean) / (sum_g |r - mean| + epsilon)`."""
    result = centered(values, uids)
    for rows in groups(uids).values():
        deviations = scored([result[row] for row in rows])
        total_deviation = math.fsum(abs(deviation) for deviation in deviations)
        if total_deviation > 0:
            for row in rows:
                result[row] *= len(deviations) / (total_deviation + epsilon)
    return result


def conditioned(
    columns: Mapping[str, Sequence[float]], conditions: Mapping[str, tuple[str, float]]
) -> dict[str, list[float]]:
    """Return `r_easy * 1[r_hard >= t]`. The easy reward is not scored where the hard one is not scored."""
    result = {name: list(column) for name, column in columns.items()}
    for easy, (hard, threshold) in conditions.items():
        reached_from = threshold - 1e-6 * max(1.0, abs(threshold))
        for row, hard_reward in enumerate(columns[hard]):
            if math.isnan(hard_reward):
                result[easy][row] = NAN
            elif hard_reward < reached_from and not math.isnan(result[easy][row]):
                result[easy][row] = 0.0
    return result


def learnt(values: Sequence[float]) -> list[float]:
    """Return the advantages: 0 for a trajectory that is not scored."""
    return [0.0 if math.isnan(value) else value for value in values]


def grpo(total: Sequence[float], uids: Sequence[Hashable], *, norm_by_std: bool = True) -> list[float]:
    """Return the advantages of GRPO, and without `norm_by_std` those of Dr. GRPO."""
    return learnt(over_std(total, uids, 1e-6)) if norm_by_std else drgrpo(total, uids)


def drgrpo(total: Sequence[float], uids: Sequence[Hashable]) -> list[float]:
    """Return the advantages of Dr. GRPO: the centered totals."""
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
    """Return the advantages of GDPO: each reward is normalized, then the weighted sum is whitened."""
    group_epsilon = epsilon or (1e-6 if whiten == "token" else 0.0)
    normalized = []
    for column in conditioned(columns, conditions or {}).values():
        if scale == "std":
            normalized.append(over_std(column, uids, group_epsilon))
        elif scale == "mad":
            normalized.append(over_mad(column, uids, group_epsilon))
        else:
            normalized.append(centered(column, uids))
    total = weighted_total(normalized, weights)
    cancel(total, uids)
    if whiten == "none":
        return learnt(total)
    return learnt(whitened(total, lengths, whiten, epsilon or 1e-6))


def cancel(total: list[float], uids: Sequence[Hashable]) -> None:
    """Set the totals of a zero-variance group to exactly 0, because they consist of rounding noise only."""
    for rows in groups(uids).values():
        if has_variance([total[row] for row in rows]):
            continue
        for row in rows:
            if not math.isnan(total[row]):
                total[row] = 0.0


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
    """Return the advantages of DGPO: normalized totals, times the balance factor, times the weight of the prompt."""
    if dgae:
        advantages = over_mad(total, uids, 1e-4)
    elif norm_by_std:
        advantages = over_std(total, uids, 1e-6)
    else:
        advantages = centered(total, uids)
    valid_groups = [rows for rows in groups(uids).values() if has_variance([total[row] for row in rows])]
    balance_factor = _balance_factor(valid_groups, lengths, balance)
    advantages = [advantage * balance_factor for advantage in advantages]
    if dqw:
        weights = difficulty_weights(valid_groups, accuracy, temperature)
        for rows, weight in zip(valid_groups, weights, strict=True):
            for row in rows:
                advantages[row] *= weight
    return learnt(advantages)


def _balance_factor(valid_groups: Sequence[Sequence[int]], lengths: Sequence[float], balance: str) -> float:
    """Return the tokens or sequences of the batch divided by those of its valid groups."""
    valid_rows = [row for rows in valid_groups for row in rows]
    if balance == "token":
        valid_tokens = sum(lengths[row] for row in valid_rows)
        return sum(lengths) / valid_tokens if valid_tokens > 0 else 1.0
    if balance == "sequence" and valid_rows:
        return len(lengths) / len(valid_rows)
    return 1.0


def difficulty_weights(valid: Sequence[Sequence[int]], accuracy: Sequence[float], temperature: float) -> list[float]:
    """Return `B_v softmax(-acc / T)`. Accuracy 0 in a valid group counts as 1, and so does no scored accuracy."""
    exponentials = []
    for rows in valid:
        known = scored([accuracy[row] for row in rows])
        mean_accuracy = statistics.fmean(known) if known else 0.0
        if mean_accuracy == 0.0:
            mean_accuracy = 1.0
        exponentials.append(math.exp(-mean_accuracy / temperature))
    return [len(exponentials) * exponential / math.fsum(exponentials) for exponential in exponentials]


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
        """Return the advantages, weighted by the gap between the accuracy of the prompt and the anchor."""
        known = scored(accuracy)
        advantages = list(base)
        if not known:
            return advantages
        is_first_batch = self.anchor == "soft" and self.capability is None
        prior = self.advance(statistics.fmean(known))
        if is_first_batch:
            return advantages
        for rows in groups(uids).values():
            known_of_prompt = scored([accuracy[row] for row in rows])
            if known_of_prompt:
                gap = statistics.fmean(known_of_prompt) - prior
                for row in rows:
                    advantages[row] *= self.weight(base[row], gap)
        return advantages

    def weight(self, advantage: float, gap: float) -> float:
        """Return `lambda exp(-sign(A) gap)`."""
        sign = math.copysign(1.0, advantage)
        return self.lambda_scale * math.exp(-sign * gap)

    def advance(self, batch_accuracy: float) -> float:
        """Return the anchor of this batch, and update what is remembered."""
        if self.anchor == "fixed":
            return self.fixed_anchor
        if self.anchor == "window":
            self._remember(batch_accuracy)
            return statistics.fmean(self.remembered)
        if self.capability is None:
            self.capability = batch_accuracy
            self.remembered = [batch_accuracy]
            return batch_accuracy
        prior = self.capability
        sigma = statistics.pstdev(self.remembered) if len(self.remembered) > 1 else 1.0
        step_size = min(1.0, max(0.0, self.eta_min + self.eta * sigma))
        self.capability = (1 - step_size) * prior + step_size * batch_accuracy
        self._remember(self.capability)
        return prior

    def _remember(self, value: float) -> None:
        self.remembered.append(value)
        self.remembered = self.remembered[-self.history_window :]


def maxrl(total: Sequence[float], uids: Sequence[Hashable], epsilon: float = 1e-6) -> list[float]:
    """Return the advantages of MaxRL: `(r - mean_g) / (mean_g + epsilon)`."""
    advantages = centered(total, uids)
    for rows in groups(uids).values():
        known = scored([total[row] for row in rows])
        for row in rows:
            if known and advantages[row] != 0:  # a zero-variance group may have the mean 0
                advantages[row] /= statistics.fmean(known) + epsilon
    return learnt(advantages)


def whitened(total: Sequence[float], lengths: Sequence[float], over: str, epsilon: float) -> list[float]:
    """Whiten over the batch. Each trajectory counts once, or with `over="token"` once per token."""
    counted: list[float] = []
    for value, length in zip(total, lengths, strict=True):
        if not math.isnan(value):
            count = int(length) if over == "token" else 1
            counted.extend([value] * count)
    if not counted:
        return list(total)
    mean = statistics.fmean(counted)
    variance = statistics.variance(counted) if len(counted) > 1 else 0.0
    divisor = math.sqrt(variance + 1e-8) if over == "token" else math.sqrt(variance) + epsilon
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
    """Return the advantages of GD2PO: conflicting responses are dropped, and the rest of the group is scaled."""
    normalized = []
    for column in columns.values():
        normalized.append(over_std(column, uids, epsilon) if norm_by_std else centered(column, uids))
    total = weighted_total(normalized, weights)
    is_dropped = [_conflicts(values, weights, conflict, tau) for values in zip(*normalized, strict=True)]
    for rows in groups(uids).values():
        scored_rows = [row for row in rows if not math.isnan(total[row])]
        dropped_rows = [row for row in scored_rows if is_dropped[row]]
        for row in scored_rows:
            total[row] = NAN if is_dropped[row] else total[row] * (1 - len(dropped_rows) / len(scored_rows))
    if whiten == "none":
        return learnt(total)
    return learnt(whitened(total, lengths, whiten, epsilon))


def _conflicts(values: Sequence[float], weights: Sequence[float], conflict: str, tau: float) -> bool:
    """Return whether the weighted rewards of one response have different signs and, with `snr`, nearly cancel.

    The sign of a reward counts only if its absolute value, before the weight, is above 1e-6.
    """
    weighted = [weight * value for weight, value in zip(weights, values, strict=True)]
    with_sign = [product for product, value in zip(weighted, values, strict=True) if abs(value) > 1e-6]
    has_both_signs = any(product > 0 for product in with_sign) and any(product < 0 for product in with_sign)
    if not has_both_signs:
        return False
    known = scored(weighted)
    signal_to_noise = abs(math.fsum(known)) / (math.fsum(map(abs, known)) + 1e-8)
    return conflict == "hard" or signal_to_noise < tau


def shares(
    parts: Sequence[Sequence[float]], totals: Sequence[float], advantages: Sequence[float], uids: Sequence[Hashable]
) -> list[float]:
    """Return `cov(c_k, S) / var(S)` of each reward and of the rest. Each group has the sum of A² as its weight."""
    weighted_sums = [0.0] * (len(parts[0]) + 1)
    total_weight = 0.0
    for rows in groups(uids).values():
        scored_rows = [row for row in rows if not math.isnan(totals[row])]
        totals_of_group = [totals[row] for row in scored_rows]
        if not has_variance(totals_of_group):
            continue
        group_weight = sum(advantages[row] ** 2 for row in scored_rows)
        total_weight += group_weight
        contributions = [[*parts[row], totals[row] - sum(parts[row])] for row in scored_rows]
        for index, contribution in enumerate(zip(*contributions, strict=True)):
            covariance = statistics.covariance(contribution, totals_of_group)
            weighted_sums[index] += group_weight * covariance / statistics.variance(totals_of_group)
    if total_weight == 0:
        return []
    return [weighted_sum / total_weight for weighted_sum in weighted_sums]
