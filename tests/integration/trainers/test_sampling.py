"""Dynamic sampling by any reward: the rule, and verl's default trainer with it."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch

from tests.facts import a_line_says, facts
from tests.integration.pipeline import Pipeline
from verl_ext import Batch, Settings, build
from verl_ext.integration.advantage.components import Components
from verl_ext.integration.trainers import rollout_data
from verl_ext.integration.trainers.attach import TrainerRun
from verl_ext.integration.trainers.dynamic_sampling import GroupFilter, live

GDPO = ("algorithm.adv_estimator=gdpo", "+algorithm.rewards.keys=[acc,format]")
NAN = float("nan")


def filtering(metric: str) -> tuple[str, ...]:
    return ("++algorithm.filter_groups.enable=True", f"++algorithm.filter_groups.metric={metric}")


def prompts_of(result) -> list[list[str]]:
    return [sorted(set(update.prompts)) for update in result.updates]


def test_a_group_whose_rewards_vary_is_trained_on_although_its_score_does_not(pipeline: Pipeline) -> None:
    """One prompt a step: `conflict` is kept; `dead` is dropped, and `live` drawn in its place."""
    two = "trainer.total_training_steps=2"
    result = pipeline.run(
        "filtered", *GDPO, "+algorithm.rewards.weights=[2,1]", *filtering("any_reward"), two, prompts=1
    )
    assert prompts_of(result) == [["conflict"], ["live"]]
    counts = [
        {name: value for name, value in result.metrics[step].items() if name.startswith("filter_groups/")}
        for step in (1, 2)
    ]
    assert counts == [
        {
            "filter_groups/finished_total": 1,
            "filter_groups/dropped_total": 0,
            "filter_groups/score_constant_total": 1,
            "filter_groups/kept_with_constant_score_total": 1,
            "filter_groups/acc_constant_total": 0,
            "filter_groups/format_constant_total": 0,
        },
        {
            "filter_groups/finished_total": 2,
            "filter_groups/dropped_total": 1,
            "filter_groups/score_constant_total": 1,
            "filter_groups/kept_with_constant_score_total": 0,
            "filter_groups/acc_constant_total": 1,
            "filter_groups/format_constant_total": 1,
        },
    ]
    assert result.metrics[2]["training/filter_groups/evicted_samples"] == 1
    # gdpo learns from `conflict`, where the weights differ.
    assert result.metrics[1]["advantage/zero_share"] == 0


def test_verls_own_rule_drops_it(pipeline: Pipeline) -> None:
    """By the score among the reward function's results, because verl 0.9.0 has no metric `reward`."""
    result = pipeline.run("filtered", *GDPO, *filtering("score"), prompts=1)
    assert prompts_of(result) == [["live"]]
    assert result.metrics[1]["training/filter_groups/evicted_samples"] == 2
    assert not [name for name in result.metrics[1] if name.startswith("filter_groups/")]


KEYS = ("x", "y")


@pytest.mark.parametrize(
    ("rewards", "algorithm", "kept"),
    [
        ([[1, 0], [0, 1]], {}, True),
        ([[1, 1], [1, 1]], {}, False),
        ([[1, 0], [1, 1]], {}, True),
        ([[1, 0], [1, 1]], {"rewards": {"keys": KEYS, "weights": [1, 0]}}, False),
        ([[1, NAN], [1, NAN]], {}, False),
        ([[1, NAN], [1, 3]], {}, False),
        ([[0.2, 0], [0.2 + 1e-8, 0]], {}, False),
        # y counts only where x reached 1.
        ([[0, 0], [0, 1]], {"gdpo": {"conditions": {"y": {"on": "x", "at_least": 1}}}}, False),
        ([[1, 0], [1, 1]], {"gdpo": {"conditions": {"y": {"on": "x", "at_least": 1}}}}, True),
    ],
)
def test_the_rule(rewards, algorithm, kept):
    settings = Settings.parse({"rewards": {"keys": KEYS}} | algorithm)
    batch = Batch.of(rewards, ["a", "a"], keys=KEYS)
    assert bool(live(batch, build("gdpo", settings), settings.rewards.weights).any()) is kept


class Buffer:
    """As much of a replay buffer as the filter looks at."""

    train_batch_size = 2

    def __init__(self, groups):
        self.finished_keys = {"train": set(groups)}
        self.partitions = {"train": {key: {} for keys in groups.values() for key in keys}}
        self.sampled = []

    def _dapo_filtered_keys(self, partition_id):
        raise AssertionError("verl's own rule was asked")

    def sample(self, global_steps, partition_id, batch_size):
        self.sampled.append(partition_id)
        return "batch", {"training/x": 1}


REWARDS = {
    "p_0_0": (9.0, 9.0),  # an earlier output of the session, not scored
    "p_0_1": (1.0, 0.0),
    "p_1_0": (0.0, 1.0),
    "q_0_0": (1.0, 1.0),
    "q_1_0": (1.0, 1.0),
    "r_0_0": (5.0, 5.0),  # alone
}


def fetch(batch, rows, run):
    keys = [batch.keys[row] for row in rows.scored.tolist()]
    columns = {name: [REWARDS[key][at] for key in keys] for at, name in enumerate(KEYS)}
    return Components(labels=[key.rsplit("_", 2)[0] for key in keys], fields=columns)


@pytest.fixture
def asked(monkeypatch):
    """The keys whose scores the filter has read."""
    found = []

    def read(keys, partition_id, fields):
        found.extend(keys)
        rows = [torch.tensor([0.0, sum(REWARDS[key])]) for key in keys]
        return {"rm_scores": torch.nested.nested_tensor(rows, layout=torch.jagged)}

    monkeypatch.setattr(rollout_data, "read", read)
    monkeypatch.setattr(rollout_data, "fetch_components", fetch)
    return found


def installed(groups):
    buffer = Buffer(groups)
    run = TrainerRun("gdpo", Settings.parse({"rewards": {"keys": KEYS}}))
    GroupFilter(buffer, run).install()
    return buffer


GROUPS = {"p": ["p_0_0", "p_0_1", "p_1_0"], "q": ["q_0_0", "q_1_0"], "r": ["r_0_0"]}


def test_groups_are_judged_once_and_counted_when_they_are_sampled(asked):
    buffer = installed(GROUPS)
    assert buffer._dapo_filtered_keys("train") == ({"q"}, Counter({2.0: 1}))
    assert buffer._dapo_filtered_keys("train") == ({"q"}, Counter({2.0: 1}))
    assert sorted(asked) == ["p_0_1", "p_1_0", "q_0_0", "q_1_0", "r_0_0"]
    batch, metrics = buffer.sample(global_steps=1, partition_id="train", batch_size=2)
    assert batch == "batch"
    assert metrics == {
        "training/x": 1,
        "filter_groups/finished_total": 3,
        "filter_groups/dropped_total": 1,
        "filter_groups/score_constant_total": 2,
        "filter_groups/kept_with_constant_score_total": 1,
        "filter_groups/x_constant_total": 1,
        "filter_groups/y_constant_total": 1,
    }
    _, again = buffer.sample(global_steps=2, partition_id="train", batch_size=2)
    assert {value for name, value in again.items() if name.startswith("filter")} == {0.0}


def test_what_was_dropped_is_forgotten_and_a_new_group_is_judged(asked):
    buffer = installed({"q": GROUPS["q"]})
    assert buffer._dapo_filtered_keys("train")[0] == {"q"}
    buffer.finished_keys["train"] = {"p"}
    buffer.partitions["train"] = {key: {} for key in GROUPS["p"]}
    assert buffer._dapo_filtered_keys("train") == (set(), Counter())


def test_groups_that_are_dropped_again_and_again_are_said(caplog, asked):
    buffer = installed({"q": GROUPS["q"]})

    def finish(name, count=1):
        """The group, and then another with the same rewards, and so on."""
        buffer.partitions["train"] = {key: {} for key in GROUPS[name]}
        for _ in range(count):
            buffer.finished_keys["train"] = set()
            buffer._dapo_filtered_keys("train")
            buffer.finished_keys["train"] = {name}
            buffer._dapo_filtered_keys("train")

    finish("q", 7)
    assert caplog.text == ""
    finish("q")  # four batches of two
    assert a_line_says(caplog.text, "8 groups", "'x'", "'y'")
    finish("q", 7)
    assert len(caplog.records) == 1
    finish("q")
    assert "16 groups" in caplog.text
    caplog.clear()
    finish("p")  # of which the rewards vary
    finish("q", 7)
    assert caplog.text == ""
    finish("q")
    assert "8 groups" in caplog.text


def test_validation_is_neither_filtered_nor_counted(asked):
    buffer = installed(GROUPS)
    assert buffer._dapo_filtered_keys("val") == (set(), Counter())
    assert buffer.sample(global_steps=1, partition_id="val", batch_size=2) == ("batch", {"training/x": 1})


def test_the_metrics_are_plain_numbers_whose_names_verl_adds_up(asked):
    from verl.trainer.ppo.v1.utils import MetricsAggregator

    buffer = installed(GROUPS)
    buffer._dapo_filtered_keys("train")
    _, metrics = buffer.sample(global_steps=1, partition_id="train", batch_size=2)
    json.dumps(metrics)
    aggregator = MetricsAggregator()
    for _ in range(2):
        aggregator.add_step_metrics(metrics, sample_count=4)
    found = aggregator.get_aggregated_metrics()
    assert found["filter_groups/finished_total"] == 6
    assert found["filter_groups/x_constant_total"] == 2


def test_a_buffer_of_another_shape_is_refused():
    from verl_ext.errors import IntegrationError

    class Other(Buffer):
        def _dapo_filtered_keys(self, partition_id, more):
            return set(), Counter()

    buffer = Other(GROUPS)
    run = TrainerRun("gdpo", Settings.parse({"rewards": {"keys": KEYS}}))
    with pytest.raises(IntegrationError, match=facts("_dapo_filtered_keys", "(self, partition_id, more)")):
        GroupFilter(buffer, run).install()


def test_the_rows_of_a_group_that_never_came_are_an_error(asked):
    from verl_ext.errors import IntegrationError

    buffer = installed({"p": GROUPS["p"]})
    buffer.finished_keys["train"].add("nobody")
    with pytest.raises(IntegrationError, match="nobody"):
        buffer._dapo_filtered_keys("train")
