"""The default trainer with real workers and scripted responses, as `pipeline` runs it.

The tests are about rewards, missing responses, dynamic sampling, turns, and trainers of other packages.
"""

import functools
import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pandas
import pytest
import transfer_queue as tq
from hypothesis import given, settings
from hypothesis import strategies as st
from verl.trainer.ppo import v1

from tests import reference
from tests.configs import compose
from tests.facts import a_line_says, facts, says
from tests.integration.pipeline import SCENES, Pipeline, Update, value_by_response
from tests.integration.scripted_responses import REWARDS
from tests.integration.trainers import default_runs
from tests.integration.trainers.core_advantages import CONFIGURATIONS, assert_trainer_equals_core, config_for
from tests.integration.trainers.default_runs import ACC, DRGRPO, GDPO, HADW, PADDED
from tests.integration.trainers.random_batches import random_batches
from tests.integration.trainers.ray_runs import OwnFit
from tests.integration.trainers.trainer_batches import MISSING, TrainerBatch, group_of
from verl_ext.errors import DataError, IntegrationError
from verl_ext.trainers.default_trainer import DefaultTrainer, missing_responses


def test_a_reward_and_a_step_read_fields_of_the_agent_loop(pipeline: Pipeline) -> None:
    """The reward `drafts` and the step's `tool_rewards` are both the number of drafts, [1201 | 2220 | 0001].

    So the centered value is the accuracy, [1000 | 1110 | 0000], plus twice the number of drafts.
    """
    steps = "+algorithm.compose.steps=[weighted_sum,tests.integration.custom_steps:AddToolRewards,center]"
    keys = "+algorithm.rewards.keys=[acc,drafts]"
    (update,) = pipeline.run("several", "algorithm.adv_estimator=compose", keys, steps).updates
    expected = value_by_response(
        "several", [0.75, 1.75, -2.25, -0.25], [1.25, 1.25, 1.25, -3.75], [-0.5, -0.5, -0.5, 1.5]
    )
    assert update.advantage_by_response() == pytest.approx(expected)


def test_an_asynchronous_step_of_two_updates_is_two_ticks(pipeline: Pipeline) -> None:
    result = pipeline.run("history", *HADW, ACC, "+trainer.v1.sync={parameter_sync_step: 2}", prompts=4)
    assert len(result.updates) == 2
    assert result.trainer._verl_ext.state["weight_by_history"]["updates"] == 2


@settings(max_examples=3)
@given(
    case=st.sampled_from(sorted(CONFIGURATIONS)),
    batches=st.lists(random_batches(sessions=True), min_size=2, max_size=2),
)
def test_over_verls_queue_the_advantages_are_those_of_the_core(
    pipeline: Pipeline, case: str, batches: list[TrainerBatch]
) -> None:
    assert_trainer_equals_core(default_runs, case, batches, empty_queue=pipeline.empty_queue)


def write_lengths_as_depth(batch: Any) -> None:
    """Write the length of each response into the queue as `depth`, as a colocated reward model writes its fields."""
    from verl.utils import tensordict_utils

    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["responses"])
    lengths = [float(len(response)) for response in data["responses"].unbind()]
    fields = tensordict_utils.get_tensordict({"depth": np.array(lengths, dtype=object)})
    tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)


def test_the_fields_of_a_colocated_reward_model_are_rewards(pipeline: Pipeline) -> None:
    keys = "+algorithm.rewards.keys=[depth]"
    result = pipeline.run("worked", *DRGRPO, keys, before_advantage=write_lengths_as_depth)
    # The lengths are [4231 | 2253 | 3331]. The mean of the second group is 3.
    advantages = result.updates[0].advantage_by_response()
    assert advantages["B", "axxxx"] == pytest.approx(5 - 3)
    assert result.metrics[1]["reward/depth/mean"] == pytest.approx(32 / 12)


@pytest.mark.parametrize(
    ("overrides", "logged_rewards"),
    [
        (("algorithm.adv_estimator=grpo", "+algorithm.rewards.log=all"), {"acc", "format", "score"}),
        (("algorithm.adv_estimator=grpo", "+algorithm.rewards.keys=[acc]"), {"acc"}),
        (("algorithm.adv_estimator=gdpo", "+algorithm.rewards.keys=[acc]"), {"acc", "format", "score"}),
        (("algorithm.adv_estimator=gdpo", "+algorithm.rewards={keys:[acc],log:keys}"), {"acc"}),
    ],
    ids=["grpo, all", "grpo, keys", "gdpo, all", "gdpo, keys"],
)
def test_which_rewards_are_logged(pipeline: Pipeline, overrides: tuple[str, ...], logged_rewards: set[str]) -> None:
    metrics = pipeline.run("pair", *overrides).metrics[1]
    stds = [name for name in metrics if name.startswith("reward/") and name.endswith("/std")]
    assert {name.split("/")[1] for name in stds} == logged_rewards


def test_token_scores_are_written_on_the_last_token_of_each_response() -> None:
    rewards = {"keys": ["a", "b"], "token_scores": True}
    trainer = default_runs.make_trainer(config_for("gdpo", {"rewards": rewards}))
    batch = group_of([1.0, 0.0, 1.0, 1.0], {"a": [1.0, 0.0, 0.5, 0.0], "b": [0.0, 0.0, 1.0, 1.0]})
    with default_runs.queue_in_this_process():
        default_runs.compute_from_queue(trainer, batch)
        fields = tq.kv_batch_get(
            keys=batch.queue_keys, partition_id=default_runs.PARTITION, select_fields=["token_level_scores_a"]
        )
    token_scores = fields["token_level_scores_a"].to_padded_tensor(0.0)
    assert token_scores.tolist() == [[0.0, 1.0], [0.0, 0.0], [0.0, 0.5], [0.0, 0.0]]


def test_the_dump_of_verls_grpo_has_the_trainers_scores_and_verls_advantages(tmp_path: Path) -> None:
    algorithm = {"rewards": {"keys": ["a"]}, "verl_ext": {"dump_dir": str(tmp_path)}}
    scores = [1.0, 0.0, 0.5, 0.25]
    batch = group_of(scores, {"a": [1.0, 0.0, 0.0, 1.0]})
    trainer = default_runs.make_trainer(config_for("grpo", algorithm))
    advantages, _ = default_runs.run_step(trainer, batch, hooked=False)
    (path,) = tmp_path.rglob("*.parquet")
    table = pandas.read_parquet(path)
    assert table["total"].tolist() == scores
    assert table["advantage"].tolist() == pytest.approx(advantages[:, 0].tolist())
    assert table["tokens"].tolist() == [2, 2, 2, 2]


class Incomplete(NamedTuple):
    """A scene in which some sessions fail."""

    missing: int
    expected: int
    """The number of responses if no session failed."""
    advantages: dict[str, list[float]]
    """The advantages of the responses to each prompt, in ascending order."""


INCOMPLETE_SCENES = {
    # Groups of 4, 2 and 1.
    "uneven": Incomplete(5, 12, {"A": [-0.25, -0.25, -0.25, 0.75], "B": [-0.5, 0.5], "C": [0.0]}),
    # A prompt without any response.
    "gone": Incomplete(4, 8, {"A": [-0.25, -0.25, -0.25, 0.75], "B": []}),
}
MISSING_RESPONSES = "advantage/missing_responses"


def advantages_by_prompt(update: Update, prompts: Iterable[str]) -> dict[str, list[float]]:
    """Return the advantages of the responses to each prompt, in ascending order."""
    advantages: dict[str, list[float]] = {prompt: [] for prompt in prompts}
    for row in update.last_outputs():
        advantages[update.prompts[row]].append(update.advantage(row))
    return {prompt: sorted(values) for prompt, values in advantages.items()}


@pytest.mark.parametrize("scene", INCOMPLETE_SCENES)
def test_missing_responses_are_left_out_counted_and_warned_about(
    pipeline: Pipeline, scene: str, caplog: pytest.LogCaptureFixture
) -> None:
    missing, expected, advantages = INCOMPLETE_SCENES[scene]
    with caplog.at_level(logging.WARNING, "verl_ext"):
        result = pipeline.run(scene, *DRGRPO, ACC)
    (update,) = result.updates
    assert len(update.last_outputs()) == expected - missing
    trained = advantages_by_prompt(update, SCENES[scene])
    assert trained == {prompt: pytest.approx(values) for prompt, values in advantages.items()}
    assert result.metrics[1][MISSING_RESPONSES] == missing
    assert a_line_says(caplog.text, "Step 1", f"{missing} of {expected} responses")
    assert says(caplog.text, MISSING_RESPONSES, "sync_refill_failed_groups=True")


@pytest.mark.parametrize(
    ("updates_per_step", "arrived", "missing"), [(1, 32, 0), (1, 30, 2), (2, 16, 0), (2, 15, 1), (2, 20, 0)]
)
def test_the_responses_that_are_missing_are_those_of_one_update(
    updates_per_step: int, arrived: int, missing: int
) -> None:
    """A step of 4 prompts with 8 responses each."""
    config = compose("data.train_batch_size=4", "actor_rollout_ref.rollout.n=8")
    trainer = SimpleNamespace(config=config, parameter_sync_step=updates_per_step, global_steps=1)
    assert missing_responses(trainer, arrived) == missing


ANY_REWARD = ("++algorithm.filter_groups.enable=True", "++algorithm.filter_groups.metric=any_reward")


def test_a_group_with_a_constant_score_and_varying_rewards_is_kept(pipeline: Pipeline) -> None:
    """Each step has one prompt. `conflict` is kept, `dead` is dropped, and `live` takes its place."""
    weights = "+algorithm.rewards.weights=[2,1]"
    result = pipeline.run("filtered", *GDPO, weights, *ANY_REWARD, "trainer.total_training_steps=2", prompts=1)
    assert [set(update.prompts) for update in result.updates] == [{"conflict"}, {"live"}]
    first_step, second_step = result.metrics[1], result.metrics[2]
    assert first_step["filter_groups/finished_total"] == 1
    assert second_step["filter_groups/finished_total"] == 2
    assert first_step["filter_groups/kept_with_zero_variance_score_total"] == 1
    assert second_step["training/filter_groups/evicted_samples"] == 1
    # With these weights, gdpo learns from `conflict`.
    assert first_step["advantage/zero_fraction"] == 0


def test_a_missing_key_is_an_error_that_names_the_prompt(pipeline: Pipeline) -> None:
    with pytest.raises(DataError, match=facts("reward 'acc'", "missing", "data_source='letters'", "prompt")):
        pipeline.run("other keys", *DRGRPO, ACC)


def test_sharing_a_configuration_with_a_ray_trainer_changes_no_advantage() -> None:
    algorithm = {"rewards": {"keys": ["a"]}, "drgrpo": {"check_loss": False}}
    trainer = default_runs.make_trainer(config_for("drgrpo", algorithm))
    ray_trainer = OwnFit(trainer.config)
    assert ray_trainer._verl_ext is not None
    batch = group_of([0.0] * 4, {"a": [1.0, 0.0, 0.0, 1.0]})
    advantages, _ = default_runs.run_step(trainer, batch, hooked=False)
    assert advantages[:, 0].tolist() == [0.5, -0.5, -0.5, 0.5]


def test_an_error_about_a_reward_names_the_data_of_its_own_prompt() -> None:
    one_prompt = group_of([1.0] * 4, {"a": [1.0, 0.0, MISSING, 1.0]})
    two_prompts = replace(
        one_prompt,
        prompt=[0, 0, 1, 1],
        session=[0, 1, 0, 1],
        source=["letters", "letters", "digits", "digits"],
    )
    trainer = default_runs.make_trainer(config_for("gdpo", {"rewards": {"keys": ["a"]}}))
    with pytest.raises(DataError, match=facts("'a'", "data_source='digits'")):
        default_runs.run_step(trainer, two_prompts, hooked=False)


PER_TURN = "+algorithm.rewards={keys:[%s,acc],per_turn:[%s]}"


def outputs_by_session(update: Update) -> dict[str, list[int]]:
    """Return the rows of each session in the order of its outputs, which are its turns."""
    outputs: dict[str, dict[int, int]] = {}
    for row, key in enumerate(update.keys):
        session, _, index = key.rpartition("_")
        if not update.padding[row]:
            outputs.setdefault(session, {})[int(index)] = row
    return {session: [rows[index] for index in sorted(rows)] for session, rows in outputs.items()}


def rewards_per_turn(key: str, turns: int, accuracy: float) -> list[float]:
    """Return the per-turn reward of a session: 1 for each draft, and the accuracy or no entry for the last turn."""
    drafts = [1.0] * (turns - 1)
    if key == "steps":  # text that the reward function returns
        return [*drafts, accuracy]
    return drafts  # `tool_rewards`, a list of the agent loop


def expected_advantages(update: Update, key: str) -> dict[str, float]:
    """Return the advantage of drgrpo for each row, by its key in the queue."""
    labels: list[tuple[str, int]] = []
    returns: list[float] = []
    keys: list[str] = []
    for rows in outputs_by_session(update).values():
        response = update.responses[rows[-1]]
        accuracy, _ = REWARDS[response[0]]
        rewards = rewards_per_turn(key, len(rows), accuracy)
        for turn, row in enumerate(rows):
            # Turns are compared with the same turn of the other responses to the prompt.
            labels.append((update.prompts[row], turn))
            returns.append(sum(rewards[turn:]) + accuracy)
            keys.append(update.keys[row])
    return dict(zip(keys, reference.drgrpo(returns, labels), strict=True))


@pytest.mark.parametrize("key", ["steps", "tool_rewards"])
def test_each_output_of_a_session_is_a_turn_with_its_advantage(pipeline: Pipeline, key: str) -> None:
    result = pipeline.run("several", *DRGRPO, PER_TURN % (key, key), PADDED)
    (update,) = result.updates
    expected = expected_advantages(update, key)
    advantages = {}
    for row, queue_key in enumerate(update.keys):
        if not update.padding[row]:
            advantages[queue_key] = update.advantage(row)
    assert advantages == pytest.approx(expected, abs=1e-6)
    distinct_magnitudes = {abs(value) for value in advantages.values()}
    assert len(distinct_magnitudes) > 2
    metrics = result.metrics[1]
    assert metrics["advantage/turns"] == pytest.approx(len(expected) / 12)
    assert f"reward/{key}/per_turn/1/mean" in metrics


def test_a_response_that_rollout_correction_rejects_keeps_its_turns(pipeline: Pipeline) -> None:
    """Every token is rejected."""
    overrides = (*DRGRPO, PER_TURN % ("steps", "steps"), "actor_rollout_ref.rollout.calculate_log_probs=True")
    reject_all = "+algorithm.rollout_correction={rollout_rs:token_k1,rollout_rs_threshold:0.999_1.001}"
    without_rejection = pipeline.run("several", *overrides).metrics[1]
    result = pipeline.run("several", *overrides, reject_all)
    metrics = result.metrics[1]
    assert metrics["advantage/rejected_responses"] == 12
    for name in ("advantage/turns", "advantage/std", "reward/steps/mean"):
        assert metrics[name] == pytest.approx(without_rejection[name])
    for advantages in result.updates[0].advantages:
        assert not advantages.any()


def trainer_base() -> Any:
    from verl.trainer.ppo.v1 import trainer_base

    return trainer_base


def test_a_subclass_that_does_not_call_verls_method_is_refused(pipeline: Pipeline) -> None:
    class OwnWay(trainer_base().PPOTrainer):
        def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
            return batch

    with pytest.raises(IntegrationError, match=facts("did not call", "'drgrpo'")):
        pipeline.run("worked", *DRGRPO, cls=OwnWay)


class Registered(trainer_base().PPOTrainer):
    """A trainer of another package. Some of its methods do not call `super`."""

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        return batch

    def _save_checkpoint(self) -> None:
        self.saved = True


def test_what_verl_chooses_by_name_has_our_part_whoever_registered_it() -> None:
    base = trainer_base()
    with mock.patch.dict(base.TRAINER_REGISTRY, registered=Registered):
        for name in ("sync", "colocate_async", "separate_async", "registered"):
            chosen = v1.get_trainer_cls(name)
            assert chosen is base.get_trainer_cls(name)
            assert chosen.__mro__[1] is DefaultTrainer
            assert issubclass(chosen, base.TRAINER_REGISTRY[name])
            assert chosen.__qualname__ == base.TRAINER_REGISTRY[name].__qualname__


def plain_trainer(config: Any) -> Any:
    """Make verl's own trainer without the methods of verl_ext. It is registered instead of a class."""
    return default_runs.WithoutWorkers(config)


def trainer_of_choice(config: Any) -> Any:
    """Make the class that verl chooses by another name. It is registered instead of a class."""
    return v1.get_trainer_cls("light")(config=config)


@pytest.fixture
def factories() -> Iterator[None]:
    """Register a class and three functions that make trainers."""
    registered: dict[str, Any] = {
        "light": default_runs.WithoutWorkers,
        "plain": plain_trainer,
        "of_choice": trainer_of_choice,
        "partial": functools.partial(default_runs.WithoutWorkers),
    }
    with mock.patch.dict(trainer_base().TRAINER_REGISTRY, registered):
        yield


@pytest.mark.usefixtures("factories")
def test_a_registered_function_makes_its_trainer_for_a_run_without_verl_ext() -> None:
    config = compose("algorithm.adv_estimator=grpo")
    for name in ("plain", "partial"):
        trainer = v1.get_trainer_cls(name)(config=config)
        assert type(trainer) is default_runs.WithoutWorkers
        assert trainer.config is config
    assert v1.get_trainer_cls("of_choice")(config=config)._verl_ext is None


@pytest.mark.usefixtures("factories")
@pytest.mark.parametrize("overrides", [(*HADW, ACC), ("algorithm.adv_estimator=grpo", ACC)])
def test_a_registered_function_without_our_methods_is_refused(overrides: tuple[str, ...]) -> None:
    config = compose(*overrides)
    for name, function in (("plain", "plain_trainer"), ("partial", "partial")):
        message = facts(f"trainer_mode={name}", function, "get_trainer_cls")
        with pytest.raises(IntegrationError, match=message):
            v1.get_trainer_cls(name)(config=config)
        with pytest.raises(IntegrationError, match=message):
            v1.get_trainer_cls(name)(config)
    assert v1.get_trainer_cls("of_choice")(config=config)._verl_ext is not None


def test_another_plugin_may_wrap_the_method_before_and_after(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One wrapper is on verl's class, and one subclass comes from the function that chooses the class."""
    calls = []
    cls = trainer_base().PPOTrainer
    original = cls._compute_advantage

    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append("method")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(cls, "_compute_advantage", timed)
    choose = v1.get_trainer_cls

    def chosen(name: str) -> Any:
        class Above(choose(name)):
            def _compute_advantage(self, *args: Any, **kwargs: Any) -> Any:
                calls.append("above")
                return super()._compute_advantage(*args, **kwargs)

        return Above

    monkeypatch.setattr(v1, "get_trainer_cls", chosen)
    result = pipeline.run("history", *HADW, ACC)
    assert calls == ["above", "method"]
    assert result.metrics[1]["hadw/updates"] == 1.0


def test_a_trainer_that_verl_did_not_choose_is_an_error(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a trainer holds a function or class of verl from before the plugin was loaded."""
    monkeypatch.setattr(v1, "get_trainer_cls", lambda name: trainer_base().TRAINER_REGISTRY[name])
    with pytest.raises(IntegrationError, match=facts("'drgrpo'", "build('drgrpo'")):
        pipeline.run("worked", *DRGRPO)
