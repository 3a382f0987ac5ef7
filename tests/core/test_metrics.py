"""Metrics of rewards and advantages by hand, and names that verl and loggers do not misread."""

import math
import re

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.batches import ACC, FMT, LENGTHS, UIDS
from tests.calls import metrics_of
from verl_ext.core.batch import Batch, Condition
from verl_ext.core.metrics import advantage_metrics, metric_name, reward_metrics

NAN = math.nan


def test_a_reward_without_scores_has_no_mean():
    batch = Batch.of([[NAN], [NAN]], ["x", "x"], keys=("a",))
    metrics = reward_metrics(batch)
    assert metrics["reward/a/unscored"] == 2
    assert not any(name.endswith("mean") for name in metrics)


def test_metrics_describe_each_reward():
    """Each reward has one zero-variance group. Group x has a single score of `b`.

    `a` is 1, 3 in group x and 2, 2 in group y. Its mean is 2, and the squared deviations are 1 + 1 + 0 + 0 = 2.
    `b` is 5 in group x and 5, 7 in group y. Its mean is 17/3, and the squared deviations are
    (2/3)^2 + (2/3)^2 + (4/3)^2 = 24/9.
    """
    batch = Batch.of([[1, NAN], [3, 5], [2, 5], [2, 7]], list("xxyy"), keys=("a", "b"))
    expected = {
        "reward/a/mean": 2,
        "reward/a/std": math.sqrt(2 / 4),
        "reward/a/min": 1,
        "reward/a/max": 3,
        "reward/a/zero_variance_group_fraction": 0.5,
        "reward/a/unscored": 0,
        "reward/b/mean": 17 / 3,
        "reward/b/std": math.sqrt(24 / 9 / 3),
        "reward/b/min": 5,
        "reward/b/max": 7,
        "reward/b/zero_variance_group_fraction": 0.5,
        "reward/b/unscored": 1,
    }
    assert reward_metrics(batch) == pytest.approx(expected)


def test_metrics_describe_the_advantages():
    """The mean is 2 / 5 = 0.4, and the variance is the mean of the squares, 6 / 5, minus 0.16."""
    metrics = advantage_metrics(np.array([1.0, -1.0, 0.0, 0.0, 2.0]))
    expected = {
        "advantage/mean": 0.4,
        "advantage/std": math.sqrt(1.04),
        "advantage/min": -1,
        "advantage/max": 2,
        "advantage/zero_fraction": 0.4,
    }
    assert metrics == pytest.approx(expected)


AGGREGATIONS = ["max", "MIN", "sum", "total", "timing_s/", "timing_per_token_ms/", "avg", "mean", "lr", "/lr"]
FRAGMENTS = ["_", "m", "a", "ma", "x", "mi", "n", " ", "é", "İ", "\u017fum", "K"]
REWARD_NAMES = st.one_of(
    st.text(max_size=12),
    st.lists(st.sampled_from(AGGREGATIONS + FRAGMENTS), max_size=6).map("".join),
)
"""Random texts, and texts that contain or nearly contain the words that verl looks for in the name of a metric."""


@given(REWARD_NAMES)
@example("é..")
@example("..")
@example("sumin")
@example("maxminmax")
@example("")
def test_the_name_of_a_metric_contains_nothing_that_verl_or_loggers_misread(key):
    name = metric_name(key)
    assert re.fullmatch(r"[\w.-]+", name)
    assert name.strip(".")  # loggers use the names of metrics for files and folders
    metric = f"reward/{name}/mean".lower()
    for word in ("max", "min", "sum", "total", "timing_s/", "timing_per_token_ms/"):
        assert word not in metric


@given(REWARD_NAMES, REWARD_NAMES)
@example("a b", "a_b")
@example("min", "m_in")
@example("min", metric_name("min"))
@example("_x5 ", "\x05x20_")
@example("सही", "सह")
def test_two_rewards_never_have_the_same_name_of_a_metric(key, other_key):
    assert (metric_name(key) == metric_name(other_key)) == (key == other_key)


def metrics_with_rewards(keys: list[str]) -> dict[str, float]:
    """Return the metrics of five estimators on the worked example, with these names of the two rewards."""
    rewards = {"rewards": {"keys": keys}}
    components = {"acc": ACC, keys[0]: ACC, keys[1]: FMT}
    estimators = [
        ("gdpo", rewards),
        ("dgpo", rewards),
        ("drgrpo", rewards),
        ("hadw", rewards | {"hadw": {"base": "dgpo"}}),
        ("hadw", rewards | {"hadw": {"base": "gdpo"}}),
    ]
    metrics: dict[str, float] = {}
    for name, config in estimators:
        metrics |= metrics_of(name, ACC, UIDS, lengths=LENGTHS, config=config, components=components)
    return metrics


@given(st.lists(REWARD_NAMES.filter(bool), unique=True, min_size=2, max_size=2))
@example(["format_minimal", "lr"])
@example(["timing_s", "total_sum_of_max"])
def test_verl_combines_each_metric_by_the_last_word_of_its_name(keys):
    """verl's aggregator takes the minimum of minima, the maximum of maxima, and the weighted mean of other metrics."""
    aggregator = pytest.importorskip("verl.trainer.ppo.v1.utils").MetricsAggregator()
    metrics = metrics_with_rewards(keys)
    assert len(metrics) > 25
    for metric in metrics:
        last_word = re.split("[/_]", metric)[-1]
        expected = last_word if last_word in ("min", "max") else "weighted_avg"
        assert aggregator._get_aggregation_type(metric) == expected, metric


CONDITIONED = {"keys": ("max_length", "hard"), "conditions": {"max_length": Condition("hard", at_least=0.5)}}


def test_the_fraction_of_scored_responses_that_meet_a_condition_is_logged():
    """The hard reward of two of three responses is at least 0.5. The name is escaped for verl's aggregation."""
    batch = Batch.of([[1, 1.0], [2, 0.5], [3, 0.4], [4, NAN]], ["g"] * 4, **CONDITIONED)
    assert reward_metrics(batch)["reward/_x6d_ax_length/condition_met_fraction"] == 2 / 3


def test_a_condition_without_a_scored_response_is_not_logged():
    batch = Batch.of([[1, NAN]], ["g"], **CONDITIONED)
    assert not any("condition_met_fraction" in name for name in reward_metrics(batch))
