"""pass@k: the probability that at least one of k answers to a question is right."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import comb

from verl_ext.errors import DataError


def pass_at_k(right: int, samples: int, k: int) -> float:
    """The unbiased estimate 1 - C(n-c, k) / C(n, k), for c right answers among n samples.

    >>> pass_at_k(1, 4, 1), pass_at_k(1, 4, 2), pass_at_k(0, 4, 4)
    (0.25, 0.5, 0.0)
    """
    if not 1 <= k <= samples or not 0 <= right <= samples:
        raise DataError(f"pass@{k} is not defined for {right} right answers among {samples}")
    return 1 - comb(samples - right, k) / comb(samples, k)


def passes(prompts: Iterable[tuple[int, int]]) -> Mapping[int, float]:
    """The mean pass@k over prompts, each (right, samples), for k = 1, 2, 4, ... and the fewest samples."""
    counts = list(prompts)
    fewest = min(samples for _, samples in counts)
    ks = [2**power for power in range(fewest.bit_length()) if 2**power < fewest] + [fewest]
    return {k: sum(pass_at_k(right, samples, k) for right, samples in counts) / len(counts) for k in ks}
