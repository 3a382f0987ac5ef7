"""The default trainer with real workers and a table in place of the model; see `pipeline`.

Rewards and where they go, missing responses, dynamic sampling, turns, and trainers of other packages.
"""

import functools
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
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
from tests.integration.pipeline import Pipeline, Update, answers_to
from tests.integration.scripted_responses import REWARDS
from tests.integration.trainers import default_runs
from tests.integration.trainers.default_runs import ACC, DRGRPO, GDPO, HADW, PADDED
from tests.integration.trainers.random_batches import (
    CONFIGURATIONS,
    TrainerBatch,
    assert_trainer_equals_core,
    config_for,
    random_batches,
)
from tests.integration.trainers.ray_runs import OwnFit
from tests.integration.trainers.test_reward_sources import group
from verl_ext.errors import DataError, IntegrationError
from verl_ext.trainers.default_trainer import DefaultTrainer, missing_responses


def test_a_reward_and_a_step_read_what_the_agent_loop_wrote(pipeline: Pipeline) -> None:
    """Accuracy [1000 | 1110 | 0000] plus twice the drafts [1201 | 2220 | 0001], centered."""
    steps = "+algorithm.compose.steps=[weighted_sum,tests.integration.custom_steps:AddToolRewards,center]"
    keys = "+algorithm.rewards.keys=[acc,drafts]"
    (update,) = pipeline.run("several", "algorithm.adv_estimator=compose", keys, steps).updates
    rows = [[0.75, 1.75, -2.25, -0.25], [1.25, 1.25, 1.25, -3.75], [-0.5, -0.5, -0.5, 1.5]]
    assert update.by_answer() == pytest.approx(answers_to("several", *rows))


def test_an_asynchronous_step_of_two_updates_is_two_ticks(pipeline: Pipeline) -> None:
    result = pipeline.run("history", *HADW, ACC, "+trainer.v1.sync={parameter_sync_step: 2}", prompts=4)
    assert len(result.updates) == 2
    assert result.trainer._verl_ext.state["weight_by_history"]["updates"] == 2


@settings(max_examples=3)
@given(case=st.sampled_from(sorted(CASES)), run=st.lists(batches(sessions=True), min_size=2, max_size=2))
def test_over_verls_queue_it_gives_what_the_core_gives(pipeline: Pipeline, case: str, run: list[Drawn]) -> None:
    check(default_runs, case, run, empty=pipeline.empty)


def test_a_colocated_reward_model_s_fields_are_components(pipeline: Pipeline) -> None:
    def put(batch: Any) -> None:
        from verl.utils import tensordict_utils as tu

        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["responses"])
        lengths = [float(len(row)) for row in data["responses"].unbind()]
        tq.kv_batch_put(
            keys=batch.keys,
            partition_id=batch.partition_id,
            fields=tu.get_tensordict({"depth": np.array(lengths, dtype=object)}),
        )

    result = pipeline.run("worked", *DRGRPO, "+algorithm.rewards.keys=[depth]", before_advantage=put)
    # Lengths [4231 | 2253 | 3331], as the worked example has them.
    assert result.updates[0].by_answer()[("B", "axxxx")] == pytest.approx(5 - 3)
    assert result.metrics[1]["reward/depth/mean"] == pytest.approx(32 / 12)


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (("algorithm.adv_estimator=grpo", "+algorithm.rewards.log=all"), {"acc", "format", "score"}),
        (("algorithm.adv_estimator=grpo", "+algorithm.rewards.keys=[acc]"), {"acc"}),
        (("algorithm.adv_estimator=gdpo", "+algorithm.rewards.keys=[acc]"), {"acc", "format", "score"}),
        (("algorithm.adv_estimator=gdpo", "+algorithm.rewards={keys:[acc],log:keys}"), {"acc"}),
    ],
)
def test_which_rewards_are_logged(pipeline: Pipeline, overrides: tuple[str, ...], names: set[str]) -> None:
    metrics = pipeline.run("pair", *overrides).metrics[1]
    assert {name.split("/")[1] for name in metrics if name.startswith("reward/") and name.endswith("/std")} == names


def test_token_scores_are_written_to_the_queue_on_the_last_token_of_each_response() -> None:
    rewards = {"keys": ["a", "b"], "token_scores": True}
    trainer = default_runs.make_trainer(config_for("gdpo", {"rewards": rewards}))
    drawn = group([1.0, 0.0, 1.0, 1.0], {"a": [1.0, 0.0, 0.5, 0.0], "b": [0.0, 0.0, 1.0, 1.0]})
    with default_runs.queue_in_this_process():
        default_runs.compute_from_queue(trainer, drawn)
        fields = tq.kv_batch_get(
            keys=drawn.queue_keys, partition_id=default_runs.PARTITION, select_fields=["token_level_scores_a"]
        )
    padded = fields["token_level_scores_a"].to_padded_tensor(0.0)
    assert padded.tolist() == [[0.0, 1.0], [0.0, 0.0], [0.0, 0.5], [0.0, 0.0]]


def test_the_dump_of_an_estimator_of_verl_has_the_trainers_scores_and_verls_advantages(tmp_path: Path) -> None:
    algorithm = {"rewards": {"keys": ["a"]}, "verl_ext": {"dump_dir": str(tmp_path)}}
    scores = [1.0, 0.0, 0.5, 0.25]
    drawn = group(scores, {"a": [1.0, 0.0, 0.0, 1.0]})
    advantages, _ = default_runs.run_step(default_runs.make_trainer(config_for("grpo", algorithm)), drawn, hooked=False)
    (path,) = tmp_path.rglob("*.parquet")
    table = pandas.read_parquet(path)
    assert table["total"].tolist() == scores
    assert table["advantage"].tolist() == pytest.approx(advantages[:, 0].tolist())
    assert table["tokens"].tolist() == [2, 2, 2, 2]


MISSING = "advantage/missing_responses"


LOST: dict[str, tuple[int, int, dict[str, list[float]]]] = {
    # Groups of 4, 2 and 1.
    "uneven": (5, 12, {"A": [0.75, -0.25, -0.25, -0.25], "B": [0.5, -0.5], "C": [0.0]}),
    # A prompt without any response.
    "gone": (4, 8, {"A": [0.75, -0.25, -0.25, -0.25], "B": []}),
}


@pytest.mark.parametrize("scene", LOST)
def test_responses_that_did_not_come_are_left_out_counted_and_said(
    pipeline: Pipeline, scene: str, caplog: pytest.LogCaptureFixture
) -> None:
    missing, expected, advantages = LOST[scene]
    with caplog.at_level(logging.WARNING, "verl_ext"):
        result = pipeline.run(scene, *DRGRPO, ACC)
    (update,) = result.updates
    assert len(update.rows()) == expected - missing
    found = {
        name: sorted(update.advantage(row) for row in update.rows() if update.prompts[row] == name)
        for name in advantages
    }
    assert found == {name: pytest.approx(sorted(values)) for name, values in advantages.items()}
    assert result.metrics[1][MISSING] == missing
    assert a_line_says(caplog.text, "Step 1", f"{missing} of {expected} responses")
    assert says(caplog.text, MISSING, "sync_refill_failed_groups=True")


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


FILTER = ("++algorithm.filter_groups.enable=True", "++algorithm.filter_groups.metric=any_reward")


def test_a_group_whose_rewards_vary_is_trained_on_although_its_score_does_not(pipeline: Pipeline) -> None:
    """One prompt a step: `conflict` is kept; `dead` is dropped, and `live` drawn in its place."""
    two = "trainer.total_training_steps=2"
    result = pipeline.run("filtered", *GDPO, "+algorithm.rewards.weights=[2,1]", *FILTER, two, prompts=1)
    assert [set(update.prompts) for update in result.updates] == [{"conflict"}, {"live"}]
    assert [result.metrics[step]["filter_groups/finished_total"] for step in (1, 2)] == [1, 2]
    assert result.metrics[1]["filter_groups/kept_with_zero_variance_score_total"] == 1
    assert result.metrics[2]["training/filter_groups/evicted_samples"] == 1
    # gdpo learns from `conflict`, where the weights differ.
    assert result.metrics[1]["advantage/zero_fraction"] == 0


def test_a_key_that_one_sample_lacks_stops_the_run_and_names_it(pipeline: Pipeline) -> None:
    with pytest.raises(DataError, match=facts("reward 'acc'", "missing", "data_source='letters'", "prompt")):
        pipeline.run("other keys", *DRGRPO, ACC)


def test_a_configuration_that_a_ray_trainer_of_the_process_shares_is_computed_from_the_queue() -> None:
    trainer = default_runs.make_trainer(
        config_for("drgrpo", {"rewards": {"keys": ["a"]}, "drgrpo": {"check_loss": False}})
    )
    other = OwnFit(trainer.config)
    assert other._verl_ext is not None
    drawn = group([0.0] * 4, {"a": [1.0, 0.0, 0.0, 1.0]})
    advantages, _ = default_runs.run_step(trainer, drawn, hooked=False)
    assert advantages[:, 0].tolist() == [0.5, -0.5, -0.5, 0.5]


def test_an_error_about_a_reward_names_the_data_of_its_own_prompt() -> None:
    drawn = group([1.0] * 4, {"a": [1.0, 0.0, ..., 1.0]})
    source = ["letters", "letters", "digits", "digits"]
    drawn = replace(drawn, prompt=[0, 0, 1, 1], session=[0, 1, 0, 1], source=source)
    trainer = default_runs.make_trainer(config_for("gdpo", {"rewards": {"keys": ["a"]}}))
    with pytest.raises(DataError, match=facts("'a'", "data_source='digits'")):
        default_runs.run_step(trainer, drawn, hooked=False)


BY_TURN = "+algorithm.rewards={keys:[%s,acc],per_turn:[%s]}"


def wanted(update: Update, entries) -> dict[str, float]:
    """The advantage of each row by its key: outputs are the turns of a session."""
    sessions: dict[str, list[tuple[int, int]]] = {}
    for row, key in enumerate(update.keys):
        session, _, index = key.rpartition("_")
        if not update.padding[row]:
            sessions.setdefault(session, []).append((int(index), row))
    labels, returns, keys = [], [], []
    for turns in map(sorted, sessions.values()):
        accuracy = REWARDS[update.answers[turns[-1][1]][0]][0]
        given = entries(len(turns) - 1, accuracy)
        for turn, row in turns:
            labels.append((update.prompts[row], turn))
            returns.append(sum(given[turn:]) + accuracy)
            keys.append(update.keys[row])
    return dict(zip(keys, reference.drgrpo(returns, labels), strict=True))


CASES = {
    "steps": lambda drafts, accuracy: [1.0] * drafts + [accuracy],  # text of the reward function
    "tool_rewards": lambda drafts, _: [1.0] * drafts,  # a list of the agent loop, shorter by a turn
}


@pytest.mark.parametrize("key", CASES)
def test_each_output_of_a_session_is_a_turn_with_its_advantage(pipeline: Pipeline, key: str) -> None:
    result = pipeline.run("several", *DRGRPO, BY_TURN % (key, key), PADDED)
    (update,) = result.updates
    expected = wanted(update, CASES[key])
    found = {name: update.advantage(row) for row, name in enumerate(update.keys) if not update.padding[row]}
    assert found == pytest.approx(expected, abs=1e-6)
    assert len({abs(value) for value in found.values()}) > 2
    assert result.metrics[1]["advantage/turns"] == pytest.approx(len(expected) / 12)
    assert f"reward/{key}/per_turn/1/mean" in result.metrics[1]


def test_turns_are_those_before_rollout_correction_rejects_a_token(pipeline: Pipeline) -> None:
    """Every token is rejected; the responses count with the turns that they had."""
    reject = "+algorithm.rollout_correction={rollout_rs:token_k1,rollout_rs_threshold:0.999_1.001}"
    given = (*DRGRPO, BY_TURN % ("steps", "steps"), "actor_rollout_ref.rollout.calculate_log_probs=True")
    plain = pipeline.run("several", *given)
    result = pipeline.run("several", *given, reject)
    assert result.metrics[1]["advantage/rejected_responses"] == 12
    for name in ("advantage/turns", "advantage/std", "reward/steps/mean"):
        assert result.metrics[1][name] == pytest.approx(plain.metrics[1][name])
    assert not any(row.any() for row in result.updates[0].advantages)


def trainer_base() -> Any:
    from verl.trainer.ppo.v1 import trainer_base

    return trainer_base


def test_a_subclass_that_goes_its_own_way_is_refused(pipeline: Pipeline) -> None:
    class OwnWay(trainer_base().PPOTrainer):
        def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
            return batch

    with pytest.raises(IntegrationError, match=facts("did not call", "'drgrpo'")):
        pipeline.run("worked", *DRGRPO, cls=OwnWay)


class Registered(trainer_base().PPOTrainer):
    """Of another package: some methods are its own, without `super`."""

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
    """Registered in the place of a class: it makes verl's own trainer, which has no part of ours."""
    return default_runs.WithoutWorkers(config)


def trainer_of_choice(config: Any) -> Any:
    """Registered in the place of a class: it makes the class that verl chooses by another name."""
    return v1.get_trainer_cls("light")(config=config)


@pytest.fixture
def factories() -> Iterator[None]:
    registered: dict[str, Any] = {
        "light": default_runs.WithoutWorkers,
        "plain": plain_trainer,
        "of_choice": trainer_of_choice,
    }
    registered["partial"] = functools.partial(default_runs.WithoutWorkers)
    with mock.patch.dict(trainer_base().TRAINER_REGISTRY, registered):
        yield


@pytest.mark.usefixtures("factories")
def test_a_registered_function_makes_its_trainer_for_a_run_without_this_package() -> None:
    config = compose("algorithm.adv_estimator=grpo")
    for name in ("plain", "partial"):
        made = v1.get_trainer_cls(name)(config=config)
        assert type(made) is default_runs.WithoutWorkers
        assert made.config is config
    assert v1.get_trainer_cls("of_choice")(config=config)._verl_ext is None


@pytest.mark.usefixtures("factories")
@pytest.mark.parametrize("overrides", [(*HADW, ACC), ("algorithm.adv_estimator=grpo", ACC)])
def test_a_registered_function_must_make_a_trainer_with_our_part_for_a_run_of_ours(overrides: tuple[str, ...]) -> None:
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
    """Whichever way: on verl's class, or around the function that chooses the class."""
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


def test_a_trainer_that_verl_did_not_choose_stops_before_its_first_update(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that holds a function or class of verl's from before the plugin was loaded."""
    monkeypatch.setattr(v1, "get_trainer_cls", lambda name: trainer_base().TRAINER_REGISTRY[name])
    with pytest.raises(IntegrationError, match=facts("'drgrpo'", "build('drgrpo'")):
        pipeline.run("worked", *DRGRPO)
