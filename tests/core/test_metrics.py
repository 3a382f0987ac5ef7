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


def test_a_reward_that_is_nowhere_scored_has_no_mean():
    batch = Batch.of([[NAN], [NAN]], ["x", "x"], keys=("a",))
    found = reward_metrics(batch)
    assert found["reward/a/unscored"] == 2
    assert not [name for name in found if name.endswith("mean")]


def test_rewards_are_described_by_key():
    # a: groups [1, 3] and [2, 2]: mean 2, population std sqrt(2/4); the second group has no variance.
    # b: [NaN, 5] and [5, 7]: mean 17/3, variance (2/3)^2 * 2 / 3 + (4/3)^2 / 3 = 24/27; one scored value: no variance.
    batch = Batch.of([[1, NAN], [3, 5], [2, 5], [2, 7]], list("xxyy"), keys=("a", "b"))
    assert reward_metrics(batch) == pytest.approx(
        {
            "reward/a/mean": 2,
            "reward/a/std": math.sqrt(0.5),
            "reward/a/min": 1,
            "reward/a/max": 3,
            "reward/a/zero_variance_group_fraction": 0.5,
            "reward/a/unscored": 0,
            "reward/b/mean": 17 / 3,
            "reward/b/std": math.sqrt(24 / 27),
            "reward/b/min": 5,
            "reward/b/max": 7,
            "reward/b/zero_variance_group_fraction": 0.5,
            "reward/b/unscored": 1,
        }
    )


def test_advantages_are_described():
    assert advantage_metrics(np.array([1.0, -1.0, 0.0, 0.0, 2.0])) == pytest.approx(
        {
            "advantage/mean": 0.4,
            "advantage/std": math.sqrt(1.04),  # mean of squares 6 / 5, less 0.16
            "advantage/min": -1,
            "advantage/max": 2,
            "advantage/zero_fraction": 0.4,
        }
    )


HOSTILE = st.one_of(
    st.text(max_size=12),
    st.lists(
        st.sampled_from(["max", "MIN", "sum", "total", "timing_s/", "timing_per_token_ms/", "lr", "/lr", "_", "m", "a",
                         "ma", "x", "mi", "n", "avg", "mean", " ", "é", "İ", "\u017fum", "K"]),
        max_size=6,
    ).map("".join),
)  # fmt: skip


@given(HOSTILE)
@example("é..")
@example("..")
@example("sumin")
@example("maxminmax")
@example("")
def test_a_name_holds_nothing_that_is_looked_for(key):
    name = metric_name(key)
    assert re.fullmatch(r"[\w.-]+", name)
    assert name.strip(".")  # loggers make files and folders of metrics' names
    for word in ("max", "min", "sum", "total", "timing_s/", "timing_per_token_ms/"):
        assert word not in f"reward/{name}/mean".lower()


@given(HOSTILE, HOSTILE)
@example("a b", "a_b")
@example("min", "m_in")
@example("min", metric_name("min"))
@example("_x5 ", "\x05x20_")
@example("सही", "सह")
def test_two_names_never_become_one(key, other):
    assert (metric_name(key) == metric_name(other)) == (key == other)


@given(st.lists(HOSTILE.filter(bool), unique=True, min_size=2, max_size=2))
@example(["format_minimal", "lr"])
@example(["timing_s", "total_sum_of_max"])
def test_verl_combines_each_metric_as_its_last_word_says(keys):
    """Against the aggregator itself: minima by min, maxima by max, all else by the weighted mean."""
    aggregator = pytest.importorskip("verl.trainer.ppo.v1.utils").MetricsAggregator()
    rewards = {"rewards": {"keys": keys}}
    components = {keys[0]: ACC, keys[1]: FMT} | ({} if "acc" in keys else {"acc": ACC})
    found: dict[str, float] = {}
    for name, config in (
        ("gdpo", rewards),
        ("dgpo", rewards),
        ("drgrpo", rewards),
        ("hadw", rewards | {"hadw": {"base": "dgpo"}}),
        ("hadw", rewards | {"hadw": {"base": "gdpo"}}),
    ):
        found |= metrics_of(name, ACC, UIDS, lengths=LENGTHS, config=config, components=components)
    assert len(found) > 25
    for metric in found:
        last = metric.rpartition("/")[2].rpartition("_")[2]
        wanted = last if last in ("min", "max") else "weighted_avg"
        assert aggregator._get_aggregation_type(metric) == wanted, metric


def test_how_often_a_condition_was_met_is_logged():
    """Of the responses whose `on` is scored; the name is safe for verl's aggregation."""
    conditions = {"max_length": Condition("hard", 0.5)}
    rows = [[1, 1.0], [2, 0.5], [3, 0.4], [4, NAN]]
    batch = Batch.of(rows, ["g"] * 4, keys=("max_length", "hard"), conditions=conditions)
    assert reward_metrics(batch)["reward/_x6d_ax_length/condition_met_fraction"] == 2 / 3
    unscored = Batch.of([[1, NAN]], ["g"], keys=("max_length", "hard"), conditions=conditions)
    assert not any("condition_met_fraction" in name for name in reward_metrics(unscored))
