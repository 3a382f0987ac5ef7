"""Dynamic sampling: which groups of a replay buffer the filters keep, and the counts that the filters log."""

from collections import Counter
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from tests.estimators.estimator_variants import unwhitened
from tests.facts import facts
from tests.integration.custom_steps import BySource, Clip, Slower
from verl_ext import Batch, Settings, Step, build, per_turn, rubric
from verl_ext.advantages import group_filter, queue
from verl_ext.advantages.table import Table
from verl_ext.core.batch import Condition
from verl_ext.core.chain import Chain
from verl_ext.core.cross_reward import WeightByVariation
from verl_ext.core.groups import Groups
from verl_ext.core.row_index import RowIndex
from verl_ext.core.step_lists import STEPS
from verl_ext.core.steps import Center, DivideByBatchStd, WeightedSum
from verl_ext.errors import IntegrationError
from verl_ext.registry import ADDED_ESTIMATORS
from verl_ext.run import Run

NAN = float("nan")
KEYS = ("x", "y")
CANCELING = [(1, 0), (0, 1)]
CONSTANT = [(1, 1), (1, 1)]


def test_estimators_of_verl_keep_groups_with_a_varying_reward():
    assert dropped_groups("grpo", {"a": CANCELING}) == set()


@pytest.mark.parametrize("estimator", ["gdpo", "drgrpo", "grpo"])
@pytest.mark.parametrize(
    ("rewards", "settings", "is_kept"),
    [
        (CANCELING, {"weights": [2, 1]}, True),
        ([(1, 0), (1, 1)], {}, True),
        (CONSTANT, {}, False),
        ([(1, 0), (1, 1)], {"weights": [1, 0]}, False),
        ([(1, NAN), (1, 0)], {}, False),
        ([(0.2, 0), (0.2 + 1e-8, 0)], {}, False),
        # y counts only where x reached 1.
        ([(0, 0), (0, 1)], {"conditions": {"y": {"reward": "x", "at_least": 1}}}, False),
    ],
    ids=[
        "other weights",
        "one varies",
        "none varies",
        "weight 0",
        "one of two unscored",
        "rounding",
        "condition not met",
    ],
)
def test_a_group_is_kept_if_a_weighted_conditioned_reward_varies(estimator, rewards, settings, is_kept):
    dropped = dropped_groups(estimator, {"a": rewards}, rewards=settings)
    assert dropped == (set() if is_kept else {"a"})


class ByAccuracy(Step):
    """A custom step that multiplies by the accuracy."""

    name = "by_accuracy"
    needs_accuracy = True

    def apply(self, values, batch):
        return values * batch.accuracy_for(self.name)[:, None]


class CenterOfBatch(Center):
    """A custom step that inherits `reads_one_group` from a built-in step, but reads the whole batch."""

    name = "center_of_batch"

    def apply(self, values, batch):
        return values - np.nanmean(values)


@pytest.mark.parametrize(
    "steps",
    [
        (Center(), WeightByVariation((0.0, 0.0)), WeightedSum()),
        (DivideByBatchStd(), Center(), WeightedSum()),
        (Slower(), Center(), WeightedSum()),
        (BySource(), Center(), WeightedSum()),
        (ByAccuracy(), Center(), WeightedSum()),
        (Clip(), Center(), WeightedSum()),
        (CenterOfBatch(), WeightedSum()),
        (WeightedSum(), BySource(), Center()),
        (WeightedSum(),),
    ],
    ids=lambda steps: ", ".join(step.name for step in steps),
)
def test_a_varying_group_is_kept_after_a_step_that_reads_the_batch(steps):
    """A custom step may read the whole batch."""
    groups = {"a": CANCELING, "b": CONSTANT}
    assert dropped_groups("compose", groups, chain=Chain(steps)) == {"b"}


ONE_UNSCORED = [(1, NAN), (1, 1)]
"""No reward varies, but the sums are 1 and 2."""


@pytest.mark.parametrize(
    ("estimator", "chain", "expected"),
    [
        ("drgrpo", None, {"b", "c", "d"}),
        ("liteppo", None, {"b", "c", "d"}),
        ("compose", (WeightedSum(), BySource(), Center()), {"c", "d"}),
        ("compose", (WeightedSum(),), {"c", "d"}),
        ("rvpo", None, {"a", "b", "c", "d"}),  # a soft minimum excludes rewards that are not scored
    ],
)
def test_a_group_whose_sum_varies_only_by_an_unscored_reward_is_kept(estimator, chain, expected):
    """In group d, one of two responses is not scored at all, so that nothing varies."""
    groups = {"a": ONE_UNSCORED, "b": CANCELING, "c": CONSTANT, "d": [(NAN, NAN), (1, 1)]}
    dropped = dropped_groups(estimator, groups, chain=None if chain is None else Chain(chain))
    assert dropped == expected


def test_a_group_whose_soft_minimum_varies_is_kept():
    groups = {"a": [(1, 0), (0, 0)], "b": [(2, 0), (0, 1), (1, 1), (1, 1)]}
    assert dropped_groups("rvpo", groups) == set()


RLOO_STEPS = ["weighted_sum", {"step": "center", "leave_one_out": True}]
ESTIMATORS = [
    ("gdpo", {"gdpo": {"scale": "std"}}),
    ("gdpo", {"gdpo": {"scale": "mad"}}),
    ("gdpo", {"gdpo": {"scale": "none"}}),
    ("compose", {"compose": {"steps": unwhitened("hard")}}),
    ("compose", {"compose": {"steps": unwhitened("snr")}}),
    ("compose", {"compose": {"steps": RLOO_STEPS}}),
    ("hadw", {"hadw": {"base": "grpo"}}),
    ("hadw", {"hadw": {"base": "gdpo"}}),
    ("dgpo", {}),
    ("drgrpo", {}),
    ("maxrl", {}),
    ("liteppo", {}),
]
"""Estimators whose last steps keep an advantage of 0."""


@given(seed=st.integers(0, 2**32 - 1), estimator=st.sampled_from(ESTIMATORS), weights=st.sampled_from([(1, 1), (2, 1)]))
def test_exactly_the_groups_with_a_nonzero_advantage_are_kept(seed, estimator, weights):
    """The advantages are those of a batch of all groups."""
    rng = np.random.default_rng(seed)
    groups = {f"g{number}": random_group(rng) for number in range(rng.integers(1, 8))}
    name, section = estimator
    algorithm = {**section, "rewards": {"weights": weights}}
    rewards = np.concatenate(list(groups.values()))
    labels = np.repeat(list(groups), [len(group) for group in groups.values()]).tolist()
    batch = Batch.of(rewards, labels, keys=KEYS, accuracy=rng.random(len(rewards)))
    advantages = build(name, settings_of(algorithm))(batch).advantages
    with_nonzero_advantage = set()
    for label, advantage in zip(labels, advantages, strict=True):
        if abs(advantage) > 1e-6:
            with_nonzero_advantage.add(label)
    assert dropped_groups(name, groups, **algorithm) == groups.keys() - with_nonzero_advantage


def random_group(rng: np.random.Generator) -> np.ndarray:
    """Return the rewards of a group of at least two, rounded to float32.

    In many groups the two rewards cancel, either as they are or after a division by their scale.
    """
    size = rng.integers(2, 7)
    levels = rng.choice([1, 2, 4]) + 1
    x = rng.integers(0, levels, size) / 10
    y = rng.choice([x, 1 - x, rng.integers(0, 2, size)])
    scale = rng.choice([1, 1, 3, 70])
    rewards = np.stack([x, y * scale], axis=1)
    random = rng.random(rewards.shape)
    unscored_probability = rng.choice([0, 0, 0.2])
    rewards[random < unscored_probability] = NAN
    return rewards.astype(np.float32).astype(float)


class Buffer:
    """The attributes of verl's replay buffer that a filter reads."""

    def __init__(self, groups):
        self.finished_keys = {"train": set(groups)}
        self.partitions = {"train": {key: {} for keys in groups.values() for key in keys}}

    def _dapo_filtered_keys(self, partition_id):
        raise AssertionError("verl's own filter was called")


REWARDS = {
    "p_0_0": (9.0, 9.0),  # an earlier output of the session, which is not scored
    "p_0_1": (1.0, 0.0),
    "p_1_0": (0.0, 1.0),
    "q_0_0": (1.0, 1.0),
    "q_1_0": (1.0, 1.0),
    "r_0_0": (5.0, 1.0),  # a group of one
}
GROUPS = {"p": ["p_0_0", "p_0_1", "p_1_0"], "q": ["q_0_0", "q_1_0"], "r": ["r_0_0"]}


class Queue:
    """A queue in this process with two rewards per key, whose sum is the score."""

    def __init__(self, rewards, returned=None):
        self.rewards = rewards
        self.returned = returned
        """Additional results of the reward function per key, or None."""
        self.keys_of_read_scores = []

    def fetch(self, keys, partition_id, fields):
        """Return the fields that exist, as `queue.fetch`."""
        columns = self.columns(keys)
        if "rm_scores" in fields:
            self.keys_of_read_scores.extend(keys)
        return {name: columns[name] for name in fields if name in columns}

    def columns(self, keys):
        scores = [torch.tensor([0.0, sum(self.rewards[key])]) for key in keys]
        masks = [torch.ones(2) for _ in keys]
        columns = {
            "rm_scores": torch.nested.nested_tensor(scores, layout=torch.jagged),
            "response_mask": torch.nested.nested_tensor(masks, layout=torch.jagged),
        }
        for column, name in enumerate(KEYS):
            columns[name] = torch.tensor([self.rewards[key][column] for key in keys])
        if self.returned is not None:
            columns["extra_fields"] = np.array([{"reward_extra_info": self.returned[key]} for key in keys])
        return columns

    def installed(self):
        """Return a patch that lets verl_ext read this queue."""
        return mock.patch.object(queue, "fetch", self.fetch)


@pytest.fixture
def read_keys():
    """Install a queue with `REWARDS`. Return the keys whose scores the filter has read."""
    rewards_queue = Queue(REWARDS)
    with rewards_queue.installed():
        yield rewards_queue.keys_of_read_scores


def dropped_groups(estimator, groups, *, chain=None, **algorithm):
    """Return the uids that `any_reward` drops of groups with these rewards."""
    rewards = {}
    keys = {}
    for uid, rewards_of_group in groups.items():
        keys[uid] = [f"{uid}_{number}_0" for number in range(len(rewards_of_group))]
        rewards.update(zip(keys[uid], rewards_of_group, strict=True))
    buffer = Buffer(keys)
    settings = settings_of(algorithm)
    if chain is None and estimator in ADDED_ESTIMATORS:
        chain = build(estimator, settings)
    group_filter.replace_filter(trainer_of(buffer), Run(estimator, settings, chain))
    with Queue(rewards).installed():
        return dropped_by(buffer)


def dropped_by(buffer):
    """Return the uids that the filter of a buffer drops."""
    uids, _ = buffer._dapo_filtered_keys("train")
    return uids


def settings_of(algorithm):
    """Return settings with the rewards x and y, unless the section `rewards` has other keys."""
    rewards = {"keys": KEYS, **algorithm.get("rewards", {})}
    return Settings.parse({**algorithm, "rewards": rewards})


def filtered_buffer(groups, metric="any_reward", **rewards):
    """Return a replay buffer with the filter of a run of gdpo, and the run."""
    buffer = Buffer(groups)
    settings = settings_of({"rewards": rewards})
    run = Run("gdpo", settings, build("gdpo", settings))
    group_filter.replace_filter(trainer_of(buffer, metric), run)
    return buffer, run


def trainer_of(buffer, metric="any_reward", *, enable=True):
    """Return a trainer with a replay buffer and the settings of a filter."""
    config = {"algorithm": {"filter_groups": {"enable": enable, "metric": metric}}}
    return SimpleNamespace(replay_buffer=buffer, config=OmegaConf.create(config))


@pytest.mark.parametrize(
    "trainer",
    [
        trainer_of(Buffer(GROUPS), "reward"),
        trainer_of(Buffer(GROUPS), enable=False),
        SimpleNamespace(replay_buffer=Buffer(GROUPS), config=OmegaConf.create({"algorithm": {}})),
    ],
    ids=["another metric", "not enabled", "no section"],
)
def test_a_run_without_a_metric_of_verl_ext_keeps_verls_filter(trainer):
    group_filter.replace_filter(trainer, Run("gdpo", Settings(), None))
    with pytest.raises(AssertionError, match="verl's own filter"):
        trainer.replay_buffer._dapo_filtered_keys("train")


def test_each_finished_group_is_filtered_and_counted_once(read_keys):
    buffer, run = filtered_buffer(GROUPS, weights=[2, 1])
    buffer.partitions["train"]["unfinished_0_0"] = {}
    for _ in range(2):
        assert buffer._dapo_filtered_keys("train") == ({"q"}, Counter({2.0: 1}))
    assert sorted(read_keys) == ["p_0_1", "p_1_0", "q_0_0", "q_1_0", "r_0_0"]
    assert run.metrics == {
        "filter_groups/finished_total": 3,
        "filter_groups/dropped_total": 1,
        "filter_groups/score_zero_variance_total": 2,
        "filter_groups/kept_with_zero_variance_score_total": 1,
        "filter_groups/x_zero_variance_total": 1,
        "filter_groups/y_zero_variance_total": 1,
    }


def test_counts_include_groups_that_are_no_longer_in_the_buffer(read_keys):
    buffer, run = filtered_buffer({"q": GROUPS["q"]}, weights=[2, 1])
    assert dropped_by(buffer) == {"q"}
    buffer.finished_keys["train"] = {"p"}
    buffer.partitions["train"] = dict.fromkeys(GROUPS["p"])
    assert dropped_by(buffer) == set()
    assert run.metrics["filter_groups/finished_total"] == 2
    assert run.metrics["filter_groups/dropped_total"] == 1
    assert run.metrics["filter_groups/kept_with_zero_variance_score_total"] == 1


@pytest.mark.parametrize("groups", [{"p": GROUPS["p"], "q": []}, {"q": []}], ids=["one of two", "the only one"])
def test_a_finished_group_without_a_trajectory_is_an_error(read_keys, groups):
    buffer, _ = filtered_buffer(groups)
    with pytest.raises(IntegrationError, match=facts("'q'", "algorithm.filter_groups.enable=False")):
        buffer._dapo_filtered_keys("train")


def test_groups_without_scores_are_an_error(monkeypatch):
    rows = RowIndex.of_padding(np.zeros(2, dtype=bool))
    monkeypatch.setattr(queue, "read_table", lambda *_, **__: Table(settings=None, row_index=rows, labels=["q", "q"]))
    buffer, _ = filtered_buffer({"q": GROUPS["q"]})
    with pytest.raises(IntegrationError, match=facts("scores", "algorithm.filter_groups.enable=False")):
        buffer._dapo_filtered_keys("train")


def test_validation_is_neither_filtered_nor_counted(read_keys):
    buffer, run = filtered_buffer(GROUPS)
    assert buffer._dapo_filtered_keys("val") == (set(), Counter())
    assert run.metrics == {}


class OtherParameters(Buffer):
    """A replay buffer whose filter has other parameters."""

    def _dapo_filtered_keys(self, more, partition_id): ...


class WithoutFilter:
    """A replay buffer without a filter."""


@pytest.mark.parametrize("buffer", [OtherParameters(GROUPS), WithoutFilter()], ids=["other parameters", "no filter"])
def test_a_replay_buffer_of_another_verl_is_refused(buffer):
    with pytest.raises(IntegrationError, match=facts("_dapo_filtered_keys", "0.9.0 and 0.9.1")):
        group_filter.replace_filter(trainer_of(buffer), Run("gdpo", Settings(), None))


@pytest.mark.parametrize(
    ("rewards", "dropped", "too_hard", "too_easy"),
    [
        ({"accuracy_key": "y", "accuracy_between": [0.05, 0.95]}, {"q"}, 0, 1),
        ({"accuracy_key": "y", "accuracy_between": [0.5, 1.0]}, set(), 0, 0),  # a mean that equals a bound is kept
        ({"accuracy_key": "y", "accuracy_between": [0.6, 1.0]}, {"p"}, 1, 0),
    ],
)
def test_groups_are_kept_by_their_mean_accuracy(read_keys, rewards, dropped, too_hard, too_easy):
    """`r`, a group of one, is always kept."""
    buffer, run = filtered_buffer(GROUPS, "accuracy_between", **rewards)
    assert dropped_by(buffer) == dropped
    assert run.metrics["filter_groups/too_hard_total"] == too_hard
    assert run.metrics["filter_groups/too_easy_total"] == too_easy


@pytest.mark.parametrize(
    ("accuracy", "bounds", "is_kept"),
    [
        ([np.float32(0.7)] * 4, [0.7, 0.9], True),  # 0.69999999
        ([np.float32(0.7)] * 4, [0.1, 0.7], True),
        ([0.1] * 6, [0.1, 0.9], True),  # the mean of six times 0.1 is 0.09999999999999999
        ([np.float32(0.1)] * 6, [0.0, 0.1], True),  # 0.10000000149
        ([0.69, 0.7], [0.7, 0.9], False),
        ([0.71, 0.7], [0.1, 0.7], False),
    ],
)
def test_a_mean_at_a_bound_of_accuracy_between_is_kept(accuracy, bounds, is_kept):
    labels = ["a"] * len(accuracy)
    rows = RowIndex.of_padding(np.zeros(len(accuracy), dtype=bool))
    settings = Settings.parse({"rewards": {"accuracy_key": "acc"}}).rewards
    table = Table(settings=settings, row_index=rows, labels=labels, fields={"acc": accuracy})
    too_hard, too_easy = group_filter.accuracy_between(Groups.of(labels), table.accuracy(), *bounds)
    is_dropped = bool(too_hard | too_easy)
    assert is_dropped != is_kept


def test_a_group_without_a_scored_accuracy_is_below_the_bounds():
    accuracy = np.array([NAN, NAN, NAN, 0.5])
    too_hard, too_easy = group_filter.accuracy_between(Groups.of("aabb"), accuracy, 0.0, 1.0)
    assert too_hard.tolist() == [True, False]
    assert too_easy.tolist() == [False, False]


def test_a_group_of_one_is_neither_too_hard_nor_too_easy():
    rewards = {"a_0_0": (0.0, 0.0), "b_0_0": (0.0, 1.0)}
    groups = {"a": ["a_0_0"], "b": ["b_0_0"]}
    buffer, run = filtered_buffer(groups, "accuracy_between", accuracy_key="y", accuracy_between=[0.1, 0.9])
    with Queue(rewards).installed():
        assert dropped_by(buffer) == set()
    assert run.metrics["filter_groups/too_hard_total"] == 0
    assert run.metrics["filter_groups/too_easy_total"] == 0


def test_verl_gets_the_mean_score_of_a_dropped_group():
    """The scores are 0 and 3."""
    rewards = {"a_0_0": (0.0, 0.0), "a_1_0": (3.0, 0.0)}
    groups = {"a": ["a_0_0", "a_1_0"]}
    buffer, _ = filtered_buffer(groups, "accuracy_between", accuracy_key="y", accuracy_between=[0.5, 1.0])
    with Queue(rewards).installed():
        assert buffer._dapo_filtered_keys("train") == ({"a"}, Counter({1.5: 1}))


@pytest.mark.parametrize(
    ("kind", "value"), [("per_turn", per_turn([1, 0])), ("rubrics", rubric([1, 0]))], ids=["per turn", "rubric"]
)
def test_rewards_that_are_lists_are_not_counted(kind, value):
    groups = {"a": ["a_0_0", "a_1_0"]}
    rewards = dict.fromkeys(groups["a"], (0.0, 1.0))
    returned = {key: {"score": 1.0, "list": value} for key in groups["a"]}
    settings = {"keys": ["list", "x"], kind: ["list"], "accuracy_key": "y", "accuracy_between": [0.1, 0.9]}
    buffer, run = filtered_buffer(groups, "accuracy_between", **settings)
    with Queue(rewards, returned).installed():
        assert dropped_by(buffer) == {"a"}
    assert run.metrics["filter_groups/x_zero_variance_total"] == 1
    assert not any("list" in name for name in run.metrics)


def test_the_count_of_a_reward_ignores_its_condition():
    """In group a, `format` varies only before its condition. In group b, it does not vary. Names are escaped."""
    rewards = [[0, 0], [0, 1], [1, 1], [0, 1]]
    conditions = {"format": Condition("minimal", 1.0)}
    batch = Batch.of(rewards, list("aabb"), keys=("minimal", "format"), conditions=conditions)
    finished = group_filter.FinishedGroups(batch, np.zeros(4), np.full(4, NAN))
    is_dropped = np.array([False, False])
    counters = group_filter.count_groups(finished, is_dropped)
    assert counters["format_zero_variance"].tolist() == [False, True]
    assert counters["_x6d_inimal_zero_variance"].tolist() == [True, False]


def test_the_count_of_the_score_is_about_the_trainers_score():
    """In group a, the trainer's score varies. In group b, the reward called `score` varies."""
    reward_called_score = [[1], [1], [0], [1]]
    batch = Batch.of(reward_called_score, list("aabb"), keys=("score",))
    trainers_score = np.array([0.0, 1.0, 1.0, 1.0])
    unscored_accuracy = np.full(4, NAN)
    finished = group_filter.FinishedGroups(batch, trainers_score, unscored_accuracy)
    is_dropped = np.array([False, True])
    counters = group_filter.count_groups(finished, is_dropped)
    assert counters["score_zero_variance"].tolist() == [False, True]
    assert counters["kept_with_zero_variance_score"].tolist() == [False, False]


class Compared(Step):
    """A step that compares each value with its group."""

    name = "compared"
    compares = True
    reads_one_group = True

    def apply(self, values, batch):
        return values - batch.groups.broadcast(batch.groups.mean(values))


def test_a_step_that_compares_sets_zero_variance_groups_to_0(monkeypatch):
    """In group a, the rewards cancel, so that every advantage is 0."""
    monkeypatch.setitem(STEPS, "compared", Compared)
    batch = Batch.of([[1, 0], [0, 1], [1, 0], [0, 0]], list("aabb"), keys=("x", "y"))
    has_signal = group_filter.any_reward(batch, Chain((WeightedSum(), Compared())))
    assert has_signal.tolist() == [False, True]
