"""Dynamic sampling: which groups of a replay buffer the filters keep, and what they count."""

from collections import Counter
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from tests.estimators.every import unwhitened
from tests.facts import facts
from tests.integration.own_steps import BySource, Clip, Slower
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
CANCEL = [(1, 0), (0, 1)]


def test_with_an_estimator_of_verl_a_reward_that_varies_keeps_its_group():
    assert dropped("grpo", {"a": CANCEL}) == set()


@pytest.mark.parametrize("estimator", ["gdpo", "drgrpo", "grpo"])
@pytest.mark.parametrize(
    ("rewards", "settings", "kept"),
    [
        (CANCEL, {"weights": [2, 1]}, True),
        ([(1, 0), (1, 1)], {}, True),
        ([(1, 1), (1, 1)], {}, False),
        ([(1, 0), (1, 1)], {"weights": [1, 0]}, False),
        ([(1, NAN), (1, 0)], {}, False),
        ([(0.2, 0), (0.2 + 1e-8, 0)], {}, False),
        # y counts only where x reached 1.
        ([(0, 0), (0, 1)], {"conditions": {"y": {"reward": "x", "at_least": 1}}}, False),
    ],
)
def test_weights_conditions_and_rewards_that_do_not_vary(estimator, rewards, settings, kept):
    assert dropped(estimator, {"a": rewards}, rewards=settings) == (set() if kept else {"a"})


class ByAccuracy(Step):
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
        (Clip(), Center(), WeightedSum()),  # a custom step may read the batch
        (CenterOfBatch(), WeightedSum()),
        (WeightedSum(), BySource(), Center()),
        (WeightedSum(),),
    ],
    ids=lambda steps: ", ".join(step.name for step in steps),
)
def test_after_a_step_that_may_read_more_than_a_group_a_reward_that_varies_keeps_its_group(steps):
    assert dropped("compose", {"a": CANCEL, "b": [(1, 1), (1, 1)]}, chain=Chain(steps)) == {"b"}


UNSCORED = [(1, NAN), (1, 1)]
"""No reward varies, but their sum does: 1 and 2."""


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
def test_a_sum_that_varies_only_because_a_reward_is_not_scored_keeps_its_group(estimator, chain, expected):
    """In group d one of two responses is not scored at all, so that nothing varies."""
    groups = {"a": UNSCORED, "b": CANCEL, "c": [(1, 1), (1, 1)], "d": [(NAN, NAN), (1, 1)]}
    assert dropped(estimator, groups, chain=None if chain is None else Chain(chain)) == expected


def test_two_rewards_of_which_the_soft_minimum_varies_keep_their_group():
    assert dropped("rvpo", {"a": [(1, 0), (0, 0)], "b": [(2, 0), (0, 1), (1, 1), (1, 1)]}) == set()


RLOO = {"compose": {"steps": ["weighted_sum", {"step": "center", "leave_one_out": True}]}}
TRAINED = [
    *(("gdpo", {"gdpo": {"scale": scale}}) for scale in ("std", "mad", "none")),
    *(("compose", {"compose": {"steps": unwhitened(conflict)}}) for conflict in ("hard", "snr")),
    *(("hadw", {"hadw": {"base": base}}) for base in ("grpo", "gdpo")),
    *(("dgpo", {}), ("drgrpo", {}), ("maxrl", {}), ("liteppo", {}), ("compose", RLOO)),
]


@given(st.integers(0, 2**32 - 1), st.sampled_from(TRAINED), st.sampled_from([(1, 1), (2, 1)]))
def test_a_group_is_kept_exactly_if_it_has_an_advantage_in_a_batch_of_all(seed, trained, weights):
    """The last steps of the methods in `TRAINED` keep an advantage of 0, or were removed."""
    rng = np.random.default_rng(seed)
    groups = {f"g{number}": random_group(rng) for number in range(rng.integers(1, 8))}
    name, section = trained
    algorithm = {**section, "rewards": {"weights": weights}}
    matrix = np.concatenate(list(groups.values()))
    labels = [uid for uid, rewards in groups.items() for _ in rewards]
    batch = Batch.of(matrix, labels, keys=KEYS, accuracy=rng.random(len(matrix)))
    advantages = build(name, settings_of(algorithm))(batch).advantages
    nonzero = {uid for uid, advantage in zip(labels, advantages, strict=True) if abs(advantage) > 1e-6}
    assert dropped(name, groups, **algorithm) == groups.keys() - nonzero


def random_group(rng: np.random.Generator) -> np.ndarray:
    """The rewards of a group of at least two, as float32. Many cancel: as they are, or after a division by scale."""
    size = rng.integers(2, 7)
    x = rng.integers(0, rng.choice([1, 2, 4]) + 1, size) / 10
    y = rng.choice([x, 1 - x, rng.integers(0, 2, size)]) * rng.choice([1, 1, 3, 70])
    values = np.stack([x, y], axis=1)
    values[rng.random(values.shape) < rng.choice([0, 0, 0.2])] = NAN
    return values.astype(np.float32).astype(float)


class Buffer:
    """The attributes of verl's replay buffer that a filter reads."""

    def __init__(self, groups):
        self.finished_keys = {"train": set(groups)}
        self.partitions = {"train": {key: {} for keys in groups.values() for key in keys}}

    def _dapo_filtered_keys(self, partition_id):
        raise AssertionError("verl's own filter was called")


REWARDS = {
    "p_0_0": (9.0, 9.0),  # an earlier output of the session, not scored
    "p_0_1": (1.0, 0.0),
    "p_1_0": (0.0, 1.0),
    "q_0_0": (1.0, 1.0),
    "q_1_0": (1.0, 1.0),
    "r_0_0": (5.0, 1.0),  # a group of one
}
GROUPS = {"p": ["p_0_0", "p_0_1", "p_1_0"], "q": ["q_0_0", "q_1_0"], "r": ["r_0_0"]}


def queue_of(stored, read_keys, returned=None):
    """A queue in this process. The keys whose scores are read are added to `read_keys`.

    `stored` has two rewards per key, whose sum is the score. `returned` has more results of the reward function.
    """

    def fetch(keys, partition_id, fields):
        jagged = {"layout": torch.jagged}
        columns = {
            "rm_scores": torch.nested.nested_tensor([torch.tensor([0.0, sum(stored[key])]) for key in keys], **jagged),
            "response_mask": torch.nested.nested_tensor([torch.ones(2) for _ in keys], **jagged),
        } | {name: torch.tensor([stored[key][at] for key in keys]) for at, name in enumerate(KEYS)}
        if returned is not None:
            columns["extra_fields"] = np.array([{"reward_extra_info": returned[key]} for key in keys])
        if "rm_scores" in fields:
            read_keys.extend(keys)
        return {name: columns[name] for name in fields if name in columns}

    return mock.patch.object(queue, "fetch", fetch)


@pytest.fixture
def read_keys():
    """The keys whose scores the filter has read, from a queue in this process with `REWARDS`."""
    keys = []
    with queue_of(REWARDS, keys):
        yield keys


def dropped(estimator, groups, *, chain=None, **algorithm):
    """Return the uids that `any_reward` drops of groups with these rewards."""
    stored = {f"{uid}_{number}_0": row for uid, rewards in groups.items() for number, row in enumerate(rewards)}
    buffer = Buffer({uid: [f"{uid}_{number}_0" for number in range(len(rewards))] for uid, rewards in groups.items()})
    settings = settings_of(algorithm)
    if chain is None and estimator in ADDED_ESTIMATORS:
        chain = build(estimator, settings)
    group_filter.replace_filter(trainer_of(buffer), Run(estimator, settings, chain))
    with queue_of(stored, []):
        return buffer._dapo_filtered_keys("train")[0]


def settings_of(algorithm):
    return Settings.parse({**algorithm, "rewards": {"keys": KEYS, **algorithm.get("rewards", {})}})


def installed(groups, metric="any_reward", **rewards):
    buffer = Buffer(groups)
    settings = settings_of({"rewards": rewards})
    run = Run("gdpo", settings, build("gdpo", settings))
    group_filter.replace_filter(trainer_of(buffer, metric), run)
    return buffer, run


def trainer_of(buffer, metric="any_reward", *, enable=True):
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
def test_a_run_with_neither_metric_keeps_the_filter_of_verl(trainer):
    group_filter.replace_filter(trainer, Run("gdpo", Settings(), None))
    with pytest.raises(AssertionError, match="verl's own filter"):
        trainer.replay_buffer._dapo_filtered_keys("train")


def test_each_finished_group_is_decided_and_counted_once(read_keys):
    buffer, run = installed(GROUPS, weights=[2, 1])
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


def test_a_group_that_is_no_longer_in_the_buffer_is_forgotten_and_a_new_group_adds_to_the_metrics(read_keys):
    buffer, run = installed({"q": GROUPS["q"]}, weights=[2, 1])
    assert buffer._dapo_filtered_keys("train")[0] == {"q"}
    buffer.finished_keys["train"] = {"p"}
    buffer.partitions["train"] = dict.fromkeys(GROUPS["p"])
    assert buffer._dapo_filtered_keys("train")[0] == set()
    assert run.metrics["filter_groups/finished_total"] == 2
    assert run.metrics["filter_groups/dropped_total"] == 1
    assert run.metrics["filter_groups/kept_with_zero_variance_score_total"] == 1


@pytest.mark.parametrize("groups", [{"p": GROUPS["p"], "q": []}, {"q": []}], ids=["one of two", "the only one"])
def test_a_finished_group_without_a_trajectory_is_an_error(read_keys, groups):
    buffer, _ = installed(groups)
    with pytest.raises(IntegrationError, match=facts("'q'", "algorithm.filter_groups.enable=False")):
        buffer._dapo_filtered_keys("train")


def test_groups_without_scores_are_an_error(monkeypatch):
    rows = RowIndex.of_padding(np.zeros(2, dtype=bool))
    monkeypatch.setattr(queue, "read_table", lambda *_, **__: Table(settings=None, row_index=rows, labels=["q", "q"]))
    buffer, _ = installed({"q": GROUPS["q"]})
    with pytest.raises(IntegrationError, match=facts("scores", "algorithm.filter_groups.enable=False")):
        buffer._dapo_filtered_keys("train")


def test_validation_is_neither_filtered_nor_counted(read_keys):
    buffer, run = installed(GROUPS)
    assert buffer._dapo_filtered_keys("val") == (set(), Counter())
    assert run.metrics == {}


def test_a_buffer_without_the_method_or_of_another_shape_is_refused():
    class Other(Buffer):
        def _dapo_filtered_keys(self, more, partition_id): ...

    class Without:
        """A replay buffer of another verl."""

    for buffer in (Other(GROUPS), Without()):
        with pytest.raises(IntegrationError, match=facts("_dapo_filtered_keys", "0.9.0 and 0.9.1")):
            group_filter.replace_filter(trainer_of(buffer), Run("gdpo", Settings(), None))


@pytest.mark.parametrize(
    ("rewards", "dropped", "hard", "easy"),
    [
        ({"accuracy_key": "y", "accuracy_between": [0.05, 0.95]}, {"q"}, 0, 1),
        ({"accuracy_key": "y", "accuracy_between": [0.5, 1.0]}, set(), 0, 0),  # a mean that equals a bound is kept
        ({"accuracy_key": "y", "accuracy_between": [0.6, 1.0]}, {"p"}, 1, 0),
    ],
)
def test_groups_are_kept_by_their_accuracy(read_keys, rewards, dropped, hard, easy):
    """`r`, a group of one, is always kept."""
    buffer, run = installed(GROUPS, "accuracy_between", **rewards)
    assert buffer._dapo_filtered_keys("train")[0] == dropped
    assert run.metrics["filter_groups/too_hard_total"] == hard
    assert run.metrics["filter_groups/too_easy_total"] == easy


@pytest.mark.parametrize(
    ("values", "bounds", "kept"),
    [
        ([np.float32(0.7)] * 4, [0.7, 0.9], True),  # 0.69999999
        ([np.float32(0.7)] * 4, [0.1, 0.7], True),
        ([0.1] * 6, [0.1, 0.9], True),  # the mean of six times 0.1 is 0.09999999999999999
        ([np.float32(0.1)] * 6, [0.0, 0.1], True),  # 0.10000000149
        ([0.69, 0.7], [0.7, 0.9], False),
        ([0.71, 0.7], [0.1, 0.7], False),
    ],
)
def test_a_mean_at_a_bound_of_accuracy_between_is_kept(values, bounds, kept):
    labels = ["a"] * len(values)
    rows = RowIndex.of_padding(np.zeros(len(values), dtype=bool))
    settings = Settings.parse({"rewards": {"accuracy_key": "acc"}}).rewards
    table = Table(settings=settings, row_index=rows, labels=labels, fields={"acc": values})
    too_hard, too_easy = group_filter.accuracy_between(Groups.of(labels), table.accuracy(), *bounds)
    assert bool(too_hard | too_easy) != kept


def test_a_group_without_a_scored_accuracy_is_below_the_bounds():
    accuracy = np.array([NAN, NAN, NAN, 0.5])
    too_hard, too_easy = group_filter.accuracy_between(Groups.of("aabb"), accuracy, 0.0, 1.0)
    assert too_hard.tolist() == [True, False]
    assert too_easy.tolist() == [False, False]


def test_a_group_of_one_is_neither_too_hard_nor_too_easy():
    stored = {"a_0_0": (0.0, 0.0), "b_0_0": (0.0, 1.0)}
    groups = {"a": ["a_0_0"], "b": ["b_0_0"]}
    buffer, run = installed(groups, "accuracy_between", accuracy_key="y", accuracy_between=[0.1, 0.9])
    with queue_of(stored, []):
        assert buffer._dapo_filtered_keys("train")[0] == set()
    assert run.metrics["filter_groups/too_hard_total"] == 0
    assert run.metrics["filter_groups/too_easy_total"] == 0


def test_verl_gets_the_mean_score_of_a_dropped_group():
    """The scores are 0 and 3."""
    stored = {"a_0_0": (0.0, 0.0), "a_1_0": (3.0, 0.0)}
    buffer, _ = installed({"a": list(stored)}, "accuracy_between", accuracy_key="y", accuracy_between=[0.5, 1.0])
    with queue_of(stored, []):
        assert buffer._dapo_filtered_keys("train") == ({"a"}, Counter({1.5: 1}))


@pytest.mark.parametrize(
    ("kind", "value"), [("per_turn", per_turn([1, 0])), ("rubrics", rubric([1, 0]))], ids=["per turn", "rubric"]
)
def test_rewards_that_are_lists_are_not_counted(kind, value):
    stored = {"a_0_0": (0.0, 1.0), "a_1_0": (0.0, 1.0)}
    returned = {key: {"score": 1.0, "list": value} for key in stored}
    rewards = {"keys": ["list", "x"], kind: ["list"], "accuracy_key": "y", "accuracy_between": [0.1, 0.9]}
    buffer, run = installed({"a": list(stored)}, "accuracy_between", **rewards)
    with queue_of(stored, [], returned):
        assert buffer._dapo_filtered_keys("train")[0] == {"a"}
    assert run.metrics["filter_groups/x_zero_variance_total"] == 1
    assert not any("list" in name for name in run.metrics)


def test_the_counter_of_a_reward_is_about_its_values_before_the_conditions_and_has_an_escaped_name():
    """In group a `format` varies only before its condition. In group b it does not vary."""
    rewards = [[0, 0], [0, 1], [1, 1], [0, 1]]
    conditions = {"format": Condition("minimal", 1.0)}
    batch = Batch.of(rewards, list("aabb"), keys=("minimal", "format"), conditions=conditions)
    finished = group_filter.FinishedGroups(batch, np.zeros(4), np.full(4, NAN))
    counters = group_filter.count_groups(finished, np.array([False, False]))
    assert counters["format_zero_variance"].tolist() == [False, True]
    assert counters["_x6d_inimal_zero_variance"].tolist() == [True, False]


def test_the_counter_of_the_score_is_about_the_trainers_score_even_if_a_reward_is_called_score():
    """In group a the trainer's score varies, and in group b the reward `score` does."""
    batch = Batch.of([[1], [1], [0], [1]], list("aabb"), keys=("score",))
    finished = group_filter.FinishedGroups(batch, np.array([0.0, 1.0, 1.0, 1.0]), np.full(4, NAN))
    counters = group_filter.count_groups(finished, np.array([False, True]))
    assert counters["score_zero_variance"].tolist() == [False, True]
    assert counters["kept_with_zero_variance_score"].tolist() == [False, False]


def test_a_step_that_compares_decides_whether_a_group_has_a_signal(monkeypatch):
    """In group a the rewards cancel, so that every advantage is 0."""

    class Compared(Step):
        name = "compared"
        compares = True
        reads_one_group = True

        def apply(self, values, batch):
            return values - batch.groups.broadcast(batch.groups.mean(values))

    monkeypatch.setitem(STEPS, "compared", Compared)
    batch = Batch.of([[1, 0], [0, 1], [1, 0], [0, 0]], list("aabb"), keys=("x", "y"))
    assert group_filter.any_reward(batch, Chain((WeightedSum(), Compared()))).tolist() == [False, True]
