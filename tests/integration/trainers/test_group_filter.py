"""Dynamic sampling: which groups of a replay buffer are kept."""

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
from verl_ext import Batch, Settings, Step, build
from verl_ext.advantages import group_filter, queue, table
from verl_ext.core.chain import Chain
from verl_ext.core.cross_reward import WeightByVariation
from verl_ext.core.groups import Groups
from verl_ext.core.row_index import RowIndex
from verl_ext.core.step_lists import STEPS
from verl_ext.core.steps import Center, DivideByBatchStd, WeightedSum
from verl_ext.errors import IntegrationError
from verl_ext.registry import INSTALLED
from verl_ext.run import Run

NAN = float("nan")
KEYS = ("x", "y")
CANCEL = [(1, 0), (0, 1)]


def test_below_verls_own_estimator_any_reward_that_varies_counts():
    assert dropped("grpo", {"a": CANCEL}) == set()


@pytest.mark.parametrize("estimator", ["gdpo", "drgrpo", "grpo"])
@pytest.mark.parametrize(
    ("rewards", "settings", "kept"),
    [
        (CANCEL, {"weights": [2, 1]}, True),
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


@pytest.mark.parametrize(
    "steps",
    [
        (Center(), WeightByVariation((0.0, 0.0)), WeightedSum()),
        (DivideByBatchStd(), Center(), WeightedSum()),
        (Slower(), Center(), WeightedSum()),
        (BySource(), Center(), WeightedSum()),
        (ByAccuracy(), Center(), WeightedSum()),
        (Clip(), Center(), WeightedSum()),  # of one's own: it might read the batch
        (WeightedSum(), BySource(), Center()),
        (WeightedSum(),),
    ],
    ids=lambda steps: ", ".join(step.name for step in steps),
)
def test_after_a_step_that_may_read_more_than_a_group_any_reward_that_varies_counts(steps):
    assert dropped("compose", {"a": CANCEL, "b": [(1, 1), (1, 1)]}, chain=Chain(steps)) == {"b"}


UNSCORED = [(1, NAN), (1, 1)]
"""No reward varies, but their sum does: 1 and 2."""


@pytest.mark.parametrize(
    ("estimator", "chain", "found"),
    [
        ("drgrpo", None, {"b", "c"}),
        ("liteppo", None, {"b", "c"}),
        ("compose", (WeightedSum(), BySource(), Center()), {"c"}),
        ("compose", (WeightedSum(),), {"c"}),
        ("rvpo", None, {"a", "b", "c"}),  # a soft minimum leaves out what is not scored
    ],
)
def test_a_sum_that_varies_only_because_a_reward_is_not_scored_keeps_its_group(estimator, chain, found):
    groups = {"a": UNSCORED, "b": CANCEL, "c": [(1, 1), (1, 1)]}
    assert dropped(estimator, groups, chain=None if chain is None else Chain(chain)) == found


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
    """The last steps keep an advantage of 0, or are left out."""
    rng = np.random.default_rng(seed)
    groups = {f"g{number}": drawn(rng) for number in range(rng.integers(1, 8))}
    name, section = trained
    algorithm = {**section, "rewards": {"weights": weights}}
    matrix = np.concatenate(list(groups.values()))
    labels = [uid for uid, rewards in groups.items() for _ in rewards]
    batch = Batch.of(matrix, labels, keys=KEYS, accuracy=rng.random(len(matrix)))
    advantages = build(name, settings_of(algorithm))(batch).advantages
    learnt = {uid for uid, advantage in zip(labels, advantages, strict=True) if abs(advantage) > 1e-6}
    assert dropped(name, groups, **algorithm) == groups.keys() - learnt


def drawn(rng: np.random.Generator) -> np.ndarray:
    """The rewards of a group of at least two, as float32, of which many cancel, by the sum or but for their scales."""
    size = rng.integers(2, 7)
    x = rng.integers(0, rng.choice([1, 2, 4]) + 1, size) / 10
    y = rng.choice([x, 1 - x, rng.integers(0, 2, size)]) * rng.choice([1, 1, 3, 70])
    values = np.stack([x, y], axis=1)
    values[rng.random(values.shape) < rng.choice([0, 0, 0.2])] = NAN
    return values.astype(np.float32).astype(float)


class Buffer:
    """As much of a replay buffer as the rule looks at."""

    def __init__(self, groups):
        self.finished_keys = {"train": set(groups)}
        self.partitions = {"train": {key: {} for keys in groups.values() for key in keys}}

    def _dapo_filtered_keys(self, partition_id):
        raise AssertionError("verl's own rule was asked")


REWARDS = {
    "p_0_0": (9.0, 9.0),  # an earlier output of the session, not scored
    "p_0_1": (1.0, 0.0),
    "p_1_0": (0.0, 1.0),
    "q_0_0": (1.0, 1.0),
    "q_1_0": (1.0, 1.0),
    "r_0_0": (5.0, 1.0),  # alone
}
GROUPS = {"p": ["p_0_0", "p_0_1", "p_1_0"], "q": ["q_0_0", "q_1_0"], "r": ["r_0_0"]}


def queue_of(stored, asked):
    """A queue in this process; the keys whose scores are read are added to `asked`."""

    def fetch(keys, partition_id, fields):
        jagged = {"layout": torch.jagged}
        columns = {
            "rm_scores": torch.nested.nested_tensor([torch.tensor([0.0, sum(stored[key])]) for key in keys], **jagged),
            "response_mask": torch.nested.nested_tensor([torch.ones(2) for _ in keys], **jagged),
        } | {name: torch.tensor([stored[key][at] for key in keys]) for at, name in enumerate(KEYS)}
        if "rm_scores" in fields:
            asked.extend(keys)
        return {name: columns[name] for name in fields if name in columns}

    return mock.patch.object(queue, "fetch", fetch)


@pytest.fixture
def asked():
    """The keys whose scores the rule has read, from a queue in this process."""
    found = []
    with queue_of(REWARDS, found):
        yield found


def dropped(estimator, groups, *, chain=None, **algorithm):
    """The uids that `any_reward` drops of groups with these rewards."""
    stored = {f"{uid}_{number}_0": row for uid, rewards in groups.items() for number, row in enumerate(rewards)}
    buffer = Buffer({uid: [f"{uid}_{number}_0" for number in range(len(rewards))] for uid, rewards in groups.items()})
    settings = settings_of(algorithm)
    if chain is None and estimator in INSTALLED:
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


def trainer_of(buffer, metric="any_reward"):
    chosen = {"algorithm": {"filter_groups": {"enable": True, "metric": metric}}}
    return SimpleNamespace(replay_buffer=buffer, config=OmegaConf.create(chosen))


def test_groups_are_judged_once_and_counted(asked):
    buffer, run = installed(GROUPS, weights=[2, 1])
    for _ in range(2):
        assert buffer._dapo_filtered_keys("train") == ({"q"}, Counter({2.0: 1}))
    assert sorted(asked) == ["p_0_1", "p_1_0", "q_0_0", "q_1_0", "r_0_0"]
    assert run.metrics == {
        "filter_groups/finished_total": 3,
        "filter_groups/dropped_total": 1,
        "filter_groups/score_zero_variance_total": 2,
        "filter_groups/kept_with_zero_variance_score_total": 1,
        "filter_groups/x_zero_variance_total": 1,
        "filter_groups/y_zero_variance_total": 1,
    }


def test_what_was_dropped_is_forgotten_and_a_new_group_is_judged(asked):
    buffer, _ = installed({"q": GROUPS["q"]}, weights=[2, 1])
    assert buffer._dapo_filtered_keys("train")[0] == {"q"}
    buffer.finished_keys["train"] = {"p"}
    buffer.partitions["train"] = dict.fromkeys(GROUPS["p"])
    assert buffer._dapo_filtered_keys("train")[0] == set()


def test_validation_is_neither_filtered_nor_counted(asked):
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
        ({"accuracy_key": "y", "accuracy_between": [0.5, 1.0]}, set(), 0, 0),  # the bounds are within
        ({"accuracy_key": "y", "accuracy_between": [0.6, 1.0]}, {"p"}, 1, 0),
    ],
)
def test_groups_are_kept_by_their_accuracy(asked, rewards, dropped, hard, easy):
    """`r`, a group of one, is kept."""
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
    settings = Settings.parse({"rewards": {"accuracy_key": "acc", "accuracy_between": bounds}}).rewards
    rewards = table.Table(settings=settings, rows=rows, labels=labels, fields={"acc": values})
    below, above = group_filter.outside(Groups.of(labels), rewards)
    assert bool(below | above) != kept


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
    assert group_filter.has_signal(batch, Chain((WeightedSum(), Compared())), None).tolist() == [False, True]
