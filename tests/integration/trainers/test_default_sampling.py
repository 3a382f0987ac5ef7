"""Dynamic sampling by any reward: the rule, and verl's default trainer with it."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from tests.facts import facts
from tests.integration.pipeline import Pipeline
from verl_ext import Batch, Settings, build
from verl_ext.core.groups import Groups
from verl_ext.core.rows import Rows
from verl_ext.errors import IntegrationError
from verl_ext.integration import components, queue, sampling
from verl_ext.integration.run import Run
from verl_ext.integration.sampling import live

GDPO = ("algorithm.adv_estimator=gdpo", "+algorithm.rewards.keys=[acc,format]")
NAN = float("nan")


def filtering(metric: str) -> tuple[str, ...]:
    return ("++algorithm.filter_groups.enable=True", f"++algorithm.filter_groups.metric={metric}")


def prompts_of(result) -> list[list[str]]:
    return [sorted(set(update.prompts)) for update in result.updates]


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
    rows = Rows.of_padding(np.zeros(len(values), dtype=bool))
    rewards = components.Components(rows=rows, labels=labels, fields={"acc": values})
    settings = Settings.parse({"rewards": {"accuracy_key": "acc", "accuracy_between": bounds}}).rewards
    below, above = sampling.outside(Groups.of(labels), rewards, settings)
    assert bool(below | above) != kept


def test_a_group_whose_rewards_vary_is_trained_on_although_its_score_does_not(pipeline: Pipeline) -> None:
    """One prompt a step: `conflict` is kept; `dead` is dropped, and `live` drawn in its place."""
    two = "trainer.total_training_steps=2"
    result = pipeline.run(
        "filtered", *GDPO, "+algorithm.rewards.weights=[2,1]", *filtering("any_reward"), two, prompts=1
    )
    assert prompts_of(result) == [["conflict"], ["live"]]
    assert [result.metrics[step]["filter_groups/finished_total"] for step in (1, 2)] == [1, 2]
    assert result.metrics[1]["filter_groups/kept_with_constant_score_total"] == 1
    assert result.metrics[2]["training/filter_groups/evicted_samples"] == 1
    # gdpo learns from `conflict`, where the weights differ.
    assert result.metrics[1]["advantage/zero_share"] == 0


def test_groups_of_middle_accuracy_are_drawn(pipeline: Pipeline) -> None:
    """`conflict` has accuracy .5, `dead` 1, `live` .25."""
    bounds = "+algorithm.rewards={accuracy_key:acc,accuracy_between:[0.1,0.4]}"
    result = pipeline.run("filtered", "algorithm.adv_estimator=grpo", bounds, *filtering("accuracy_between"), prompts=1)
    assert prompts_of(result) == [["live"]]
    assert result.metrics[1]["filter_groups/too_easy_total"] == 2


KEYS = ("x", "y")


@pytest.mark.parametrize(
    ("rewards", "algorithm", "kept"),
    [
        ([[1, 0], [0, 1]], {}, True),
        ([[1, 1], [1, 1]], {}, False),
        ([[1, 0], [1, 1]], {"rewards": {"keys": KEYS, "weights": [1, 0]}}, False),
        ([[1, NAN], [1, 3]], {}, False),
        ([[0.2, 0], [0.2 + 1e-8, 0]], {}, False),
        # y counts only where x reached 1.
        ([[0, 0], [0, 1]], {"rewards": {"keys": KEYS, "conditions": {"y": {"on": "x", "at_least": 1}}}}, False),
    ],
)
def test_the_rule(rewards, algorithm, kept):
    settings = Settings.parse({"rewards": {"keys": KEYS}} | algorithm)
    batch = Batch.of(rewards, ["a", "a"], keys=KEYS, conditions=settings.rewards.conditions)
    assert bool(live(batch, settings.rewards.weights)[0]) is kept


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


@pytest.fixture
def asked(monkeypatch):
    """The keys whose scores the rule has read, from a queue in this process."""
    found = []

    def fetch(keys, partition_id, fields):
        jagged = {"layout": torch.jagged}
        stored = {
            "rm_scores": torch.nested.nested_tensor([torch.tensor([0.0, sum(REWARDS[key])]) for key in keys], **jagged),
            "response_mask": torch.nested.nested_tensor([torch.ones(2) for _ in keys], **jagged),
        } | {name: torch.tensor([REWARDS[key][at] for key in keys]) for at, name in enumerate(KEYS)}
        if "rm_scores" in fields:
            found.extend(keys)
        return {name: stored[name] for name in fields if name in stored}

    monkeypatch.setattr(queue, "fetch", fetch)
    return found


def installed(groups, metric="any_reward", **rewards):
    buffer = Buffer(groups)
    settings = Settings.parse({"rewards": {"keys": KEYS, **rewards}})
    run = Run("gdpo", settings, build("gdpo", settings))
    sampling.replace_rule(trainer_of(buffer, metric), run)
    return buffer, run


def trainer_of(buffer, metric="any_reward"):
    chosen = {"algorithm": {"filter_groups": {"enable": True, "metric": metric}}}
    return SimpleNamespace(replay_buffer=buffer, config=OmegaConf.create(chosen))


def test_groups_are_judged_once_and_counted(asked):
    buffer, run = installed(GROUPS)
    for _ in range(2):
        assert buffer._dapo_filtered_keys("train") == ({"q"}, Counter({2.0: 1}))
    assert sorted(asked) == ["p_0_1", "p_1_0", "q_0_0", "q_1_0", "r_0_0"]
    assert run.metrics == {
        "filter_groups/finished_total": 3,
        "filter_groups/dropped_total": 1,
        "filter_groups/score_constant_total": 2,
        "filter_groups/kept_with_constant_score_total": 1,
        "filter_groups/x_constant_total": 1,
        "filter_groups/y_constant_total": 1,
    }


def test_what_was_dropped_is_forgotten_and_a_new_group_is_judged(asked):
    buffer, _ = installed({"q": GROUPS["q"]})
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
            sampling.replace_rule(trainer_of(buffer), Run("gdpo", Settings(), None))


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
