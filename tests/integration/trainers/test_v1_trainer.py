"""The default trainer with real workers and a table in place of the model; see `pipeline`.

Expected values are those of the worked example in the specification unless their arithmetic stands beside them.
"""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transfer_queue as tq
from tensordict import TensorDict

from tests.integration.configs import compose
from tests.integration.pipeline import Pipeline, Update, answers_to
from tests.integration.stand_ins import REGISTERED, earned
from verl_ext.core.rows import Rows
from verl_ext.errors import ConfigurationError, DataError, IntegrationError
from verl_ext.integration.trainers import rollout_data
from verl_ext.integration.trainers.attach import attach
from verl_ext.integration.trainers.v1 import fetch_components

DRGRPO = ("algorithm.adv_estimator=drgrpo", "+algorithm.drgrpo.check_loss=False")
DGPO = ("algorithm.adv_estimator=dgpo",)
HADW = ("algorithm.adv_estimator=hadw", "+algorithm.hadw.eta_min=0")
GDPO = ("algorithm.adv_estimator=gdpo", "+algorithm.rewards.keys=[acc,format]", "+algorithm.gdpo.epsilon=1e-4")
ACC = "+algorithm.rewards.keys=[acc]"
# Twelve rows, or eight, and a batch that must be a multiple of 16, or of 12: four rows of padding.
PADDED = {
    "worked": "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "pair": "actor_rollout_ref.actor.ppo_mini_batch_size=3",
}

WORKED: dict[str, tuple[str, tuple[str, ...], dict[tuple[str, str], float]]] = {
    "drgrpo on accuracy": (
        "worked",
        (*DRGRPO, ACC),
        answers_to("worked", [0.75, -0.25, -0.25, -0.25], [0.25, 0.25, 0.25, -0.75], [0.0] * 4),
    ),
    "dgpo on accuracy": (
        "worked",
        (*DGPO, ACC),
        answers_to("worked", [3.270627, *[-1.090209] * 3], [*[0.849056] * 3, -2.547167], [0.0] * 4),
    ),
    # The score is accuracy + format; the difficulty still comes from the accuracy.
    "dgpo on the score": (
        "worked",
        DGPO,
        answers_to(
            "worked",
            [2.027433, 0.405487, -1.216460, -1.216460],
            [0.947364, -0.947364, 0.947364, -0.947364],
            [-0.557355, 1.672064, -0.557355, -0.557355],
        ),
    ),
    "gdpo over sequences": (
        "pair",
        GDPO,
        answers_to("pair", [1.705880, 0.263915, -0.984898, -0.984898], [0.720983, -0.720983, 0.720983, -0.720983]),
    ),
    "gdpo over tokens": (
        "pair",
        (*GDPO[:2], "+algorithm.gdpo.whiten=token"),  # verl's epsilon, 1e-6
        answers_to("pair", [1.491430, 0.043456, -1.210526, -1.210526], [0.502445, -0.945528, 0.502445, -0.945528]),
    ),
}


def components(update: Update) -> list[dict[str, Any]]:
    """What the reward worker returned for each row."""
    return [entry["reward_extra_info"] for entry in list(update.data["extra_fields"])]


def as_batch(update: Update, config: Any) -> Any:
    """The update's rows as the legacy trainer holds them: padded tensors, and components as arrays."""
    from verl import DataProto

    mask = update.data["response_mask"].to_padded_tensor(0)
    scores = update.data["rm_scores"].to_padded_tensor(0.0)
    rewards = scores
    if config.algorithm.use_kl_in_reward:
        rewards = update.data["token_level_rewards"].to_padded_tensor(0.0)
    infos = components(update)
    return DataProto.from_dict(
        tensors={"response_mask": mask, "token_level_scores": scores, "token_level_rewards": rewards},
        non_tensors={
            "uid": np.array(update.uids, dtype=object),
            **{key: np.array([info[key] for info in infos]) for key in infos[0]},
        },
    )


def assert_same(update: Update, padded: torch.Tensor) -> None:
    """The trainer's advantages are these, to 1e-6, and 0 behind the mask."""
    expected = update.data["advantages"].to_padded_tensor(0.0)
    torch.testing.assert_close(padded, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("padding", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("case", WORKED)
def test_the_worked_example_comes_out_of_the_trainer(pipeline: Pipeline, case: str, padding: bool) -> None:
    scene, overrides, expected = WORKED[case]
    (update,) = pipeline.shared(scene, *overrides, *([PADDED[scene]] if padding else [])).updates
    assert sum(update.padding) == (4 if padding else 0)
    assert update.by_answer() == pytest.approx(expected, abs=1e-5)
    for row, is_padding in enumerate(update.padding):
        if is_padding:
            assert update.advantage(row) == 0.0


def test_padding_rows_hold_the_first_row_s_rewards_and_are_told_by_their_tag_alone(pipeline: Pipeline) -> None:
    update = pipeline.shared("worked", *DRGRPO, PADDED["worked"]).updates[0]
    infos = components(update)
    pads = [infos[row] for row, is_padding in enumerate(update.padding) if is_padding]
    assert len(pads) == 4
    assert all(info == pads[0] and {"acc", "format", "score"} <= set(info) for info in pads)


def test_rows_are_not_in_the_order_of_the_dataset(pipeline: Pipeline) -> None:
    """Or the tests above would not show that rows are grouped by uid."""
    update = pipeline.shared("worked", *DRGRPO, PADDED["worked"]).updates[0]
    prompts = [update.prompts[row] for row in update.rows()]
    assert prompts != sorted(prompts)


@pytest.mark.parametrize("algorithm", [(*DRGRPO, ACC), GDPO, (*HADW, ACC)], ids=["drgrpo", "gdpo", "hadw"])
def test_several_outputs_of_a_session_count_once_and_share_its_advantage(
    pipeline: Pipeline, algorithm: tuple[str, ...]
) -> None:
    (one,) = pipeline.shared("worked", *algorithm, PADDED["worked"]).updates
    (several,) = pipeline.run("several", *algorithm, PADDED["worked"]).updates
    # As many drafts as the answer's length modulo 3: [1201 | 2220 | 0001] by the lengths [4231 | 2253 | 3331].
    drafts = several.rows(drafts=True)
    assert len(drafts) == 11
    assert several.by_answer() == pytest.approx(one.by_answer(), abs=1e-6)
    for row in drafts:
        session = several.keys[row].rsplit("_", 1)[0]
        (last,) = [other for other in several.rows() if several.keys[other].rsplit("_", 1)[0] == session]
        assert several.advantage(row) == several.advantage(last)


def test_dgpo_balances_by_the_tokens_of_all_outputs(pipeline: Pipeline) -> None:
    """A draft is twice its answer's length: 28 + 48 of 88 tokens are in valid groups.

    [12 10 3 3 | 10 10 25 3 | 3 3 3 3] tokens a session.
    """
    result = pipeline.run("several", *DGPO, ACC)
    assert result.metrics[1]["dgpo/balance_z"] == pytest.approx(88 / 76)


def test_failed_sessions_leave_uneven_groups(pipeline: Pipeline) -> None:
    (update,) = pipeline.run("uneven", *DRGRPO, ACC).updates
    # A 1 of 4 right, B 1 of 2, C one answer alone.
    assert len(update.rows()) == 7
    assert update.by_answer() == pytest.approx(answers_to("uneven", [0.75, -0.25, -0.25, -0.25], [0.5, -0.5], [0.0]))


def test_hadw_remembers_the_batch_before(pipeline: Pipeline) -> None:
    result = pipeline.run("history", *HADW, ACC, "trainer.total_training_steps=2", prompts=2)
    first, second = (update.by_answer() for update in result.updates)
    # grpo on [1 0 0 0]: (1 - 0.25) / 0.5 = 1.5 and -0.5; on [1 1 1 0] the reverse. Phi is 1 in the first batch.
    assert first == pytest.approx({("1A", "a"): 1.5, ("1A", "d"): -0.5, ("1B", "a"): 0.5, ("1B", "d"): -1.5}, abs=1e-5)
    # The anchor is 0.5 there, and Phi 1.669233 for the right answer, 1.012441 for the wrong ones; 2B has no variance.
    assert second == pytest.approx(
        {("2A", "a"): 1.5 * 1.669233, ("2A", "d"): -0.5 * 1.012441, ("2B", "a"): 0.0}, abs=1e-5
    )
    assert result.metrics[2]["hadw/capability_prior"] == pytest.approx(0.5)
    # 0.9 * 0.5 + 0.1 * 5/8
    assert result.metrics[2]["hadw/capability_posterior"] == pytest.approx(0.5125)


def test_an_asynchronous_step_of_two_updates_is_two_ticks(pipeline: Pipeline) -> None:
    result = pipeline.run("history", *HADW, ACC, "+trainer.v1.sync={parameter_sync_step: 2}", prompts=4)
    assert len(result.updates) == 2
    assert result.trainer._verl_ext.state.states["hadw"]["weigh_by_history"].ticks == 2


def test_the_step_s_metrics_hold_each_reward_and_the_advantages(pipeline: Pipeline) -> None:
    metrics = pipeline.shared("worked", *GDPO, PADDED["worked"]).metrics[1]
    expected = {
        "reward/acc/mean": 4 / 12,
        "reward/acc/std": (4 / 12 * 8 / 12) ** 0.5,
        "reward/acc/min": 0.0,
        "reward/acc/max": 1.0,
        "reward/acc/dead_groups": 1 / 3,  # C
        "reward/acc/unscored": 0.0,
        "reward/format/mean": 6 / 12,
        "reward/format/dead_groups": 0.0,
        "advantage/mean": 0.0,
        "advantage/zero_share": 0.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-9)
    assert metrics["critic/score/mean"] == pytest.approx(10 / 12)  # verl's own are there too


def test_the_names_are_registered_where_verl_computes_rewards_and_answers(pipeline: Pipeline) -> None:
    result = pipeline.run("worked", *DRGRPO, "+algorithm.rewards.keys=[registered]")
    assert result.metrics[1]["reward/registered/min"] == len(REGISTERED)
    in_agent_loop = [entry["registered"] for entry in list(result.updates[0].data["extra_fields"])]
    assert in_agent_loop == [list(REGISTERED)] * 12


@pytest.mark.parametrize(
    "algorithm",
    [(*DRGRPO, ACC), DRGRPO, DGPO, (*DGPO, ACC), GDPO, (*GDPO, "+algorithm.gdpo.whiten=token"), (*HADW, ACC)],
    ids=["drgrpo", "drgrpo-score", "dgpo", "dgpo-keys", "gdpo", "gdpo-token", "hadw"],
)
def test_the_legacy_trainer_and_a_direct_call_give_the_same_numbers(
    pipeline: Pipeline, algorithm: tuple[str, ...]
) -> None:
    from verl.trainer.ppo import core_algos, ray_trainer

    import verl_ext

    result = pipeline.shared("worked", *algorithm, PADDED["worked"])
    (update,), config = result.updates, result.trainer.config
    name = config.algorithm.adv_estimator
    with verl_ext.use_run_state(verl_ext.RunState()):
        data = ray_trainer.compute_advantage(as_batch(update, config), adv_estimator=name, config=config.algorithm)
    assert_same(update, data.batch["advantages"])
    batch = as_batch(update, config)
    with verl_ext.use_run_state(verl_ext.RunState()):
        advantages, returns = core_algos.get_adv_estimator_fn(name)(
            token_level_rewards=batch.batch["token_level_rewards"],
            response_mask=batch.batch["response_mask"],
            index=batch.non_tensor_batch["uid"],
            config=config.algorithm,
            non_tensor_batch=batch.non_tensor_batch,
        )
    assert_same(update, advantages)
    assert returns is advantages


def test_token_scores_stand_on_the_last_token_of_each_response(pipeline: Pipeline) -> None:
    result = pipeline.run("several", *GDPO, PADDED["worked"], "+algorithm.rewards.token_scores=True")
    (update,) = result.updates
    for key in ("acc", "format"):
        rows = update.data[f"token_level_scores_{key}"].unbind()
        for row, (field, info, is_padding) in enumerate(zip(rows, components(update), update.padding, strict=True)):
            expected = [0.0] * len(update.advantages[row])
            expected[-1] = 0.0 if is_padding else info[key]
            assert field.tolist() == expected


def test_without_token_scores_no_such_field_is_written(pipeline: Pipeline) -> None:
    (update,) = pipeline.shared("worked", *GDPO, PADDED["worked"]).updates
    assert not [name for name in list(update.data.keys()) if name.startswith("token_level_scores")]


def put_process_rewards(batch: Any) -> None:
    """As a process reward model would: half a point of the opposite accuracy on each of the first two tokens."""
    data = tq.kv_batch_get(
        keys=batch.keys, partition_id=batch.partition_id, select_fields=["response_mask", "extra_fields"]
    )
    rows = []
    for mask, entry in zip(data["response_mask"].unbind(), list(data["extra_fields"]), strict=True):
        row = torch.zeros(len(mask))
        row[:2] = (1.0 - entry["reward_extra_info"]["acc"]) / min(2, len(mask))
        rows.append(row)
    field = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    tq.kv_batch_put(
        keys=batch.keys,
        partition_id=batch.partition_id,
        fields=TensorDict({"token_level_scores_acc": field}, batch_size=len(batch.keys)),
    )


@pytest.mark.parametrize("token_scores", [False, True], ids=["read", "read and written"])
def test_a_process_reward_model_s_field_is_the_component_and_stays_as_it_is(
    pipeline: Pipeline, token_scores: bool
) -> None:
    result = pipeline.run(
        "worked",
        *DRGRPO,
        "+algorithm.rewards.keys=[acc,format]",
        f"+algorithm.rewards.token_scores={token_scores}",
        before_advantage=put_process_rewards,
    )
    (update,) = result.updates
    # acc is [0111 | 0001 | 1111] by the field, format [1100 | 1011 | 0100]: A 1 2 1 1, B 1 0 1 2, C 1 2 1 1.
    assert update.by_answer() == pytest.approx(
        answers_to("worked", [-0.25, 0.75, -0.25, -0.25], [0.0, -1.0, 0.0, 1.0], [-0.25, 0.75, -0.25, -0.25])
    )
    assert result.metrics[1]["reward/acc/mean"] == pytest.approx(8 / 12)
    written = update.data["token_level_scores_acc"].unbind()
    row = update.answers.index("cxx")
    assert written[row].tolist() == [0.5, 0.5, 0.0]


def test_what_is_not_finite_behind_the_mask_is_no_score_and_narrow_numbers_add_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on the legacy trainer, whose fields are padded: here they are jagged, in the model's own type."""
    field = [torch.full((1003,), 1.0), torch.tensor([2.0, math.nan, 0.5])]
    mask = [torch.ones(1003), torch.tensor([1.0, 0.0, 1.0])]
    stored = {
        "token_level_scores_acc": torch.nested.as_nested_tensor(field, layout=torch.jagged).to(torch.bfloat16),
        "response_mask": torch.nested.as_nested_tensor(mask, layout=torch.jagged).long(),
    }
    monkeypatch.setattr(
        rollout_data,
        "read",
        lambda keys, partition_id, fields: {name: stored[name] for name in fields if name in stored},
    )
    batch = SimpleNamespace(keys=["a_0_0", "a_1_0"], partition_id="train")
    run = attach(SimpleNamespace(), compose("algorithm.adv_estimator=gdpo", "+algorithm.rewards.keys=[acc]"))
    rows = Rows.of_sessions(batch.keys, np.zeros(2, dtype=bool))
    assert fetch_components(batch, rows, run).column("acc", "").tolist() == [1003.0, 2.5]


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


def test_verl_s_own_grpo_logs_named_rewards_and_keeps_its_advantages(pipeline: Pipeline) -> None:
    plain = pipeline.run("worked", "algorithm.adv_estimator=grpo", PADDED["worked"])
    watched = pipeline.run(
        "worked", "algorithm.adv_estimator=grpo", "+algorithm.rewards.keys=[acc,format]", PADDED["worked"]
    )
    assert watched.updates[0].by_answer() == pytest.approx(plain.updates[0].by_answer(), abs=1e-6)
    assert not [name for name in plain.metrics[1] if name.startswith("reward/")]
    assert watched.metrics[1]["reward/acc/mean"] == pytest.approx(4 / 12)
    assert watched.metrics[1]["reward/format/dead_groups"] == 0.0
    assert plain.trainer._verl_ext.watches is False


def test_verl_s_own_grpo_writes_token_scores_on_request(pipeline: Pipeline) -> None:
    (update,) = pipeline.run(
        "worked",
        "algorithm.adv_estimator=grpo",
        "+algorithm.rewards={keys: [acc], token_scores: true}",
    ).updates
    sums = [float(row.sum()) for row in update.data["token_level_scores_acc"].unbind()]
    assert sums == [info["acc"] for info in components(update)]


def test_the_score_may_be_one_of_the_keys_though_the_reward_function_returns_a_number(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl then calls the number `acc`; here its entry is taken out of what the queue returns."""
    original = tq.kv_batch_get

    def kv_batch_get(keys: Any, partition_id: Any, select_fields: Any = None) -> TensorDict:
        data = original(keys=keys, partition_id=partition_id, select_fields=select_fields)
        if "extra_fields" in (select_fields or ()):
            for entry in list(data["extra_fields"]):
                entry["reward_extra_info"].pop("score")
        return data

    monkeypatch.setattr(tq, "kv_batch_get", kv_batch_get)
    for estimator in (DRGRPO, ("algorithm.adv_estimator=grpo",)):
        result = pipeline.run("worked", *estimator, "+algorithm.rewards={keys: [score], token_scores: true}")
        assert result.metrics[1]["reward/score/mean"] == pytest.approx(10 / 12)
        sums = [float(row.sum()) for row in result.updates[0].data["token_level_scores_score"].unbind()]
        assert sum(sums) == 10


# Log-probabilities are -0.1 and -0.3 of the reference: 0.2 a token, times a coefficient of 0.1, is 0.02.
KL = ("algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.1", "algorithm.kl_penalty=kl")


def test_kl_in_reward_is_part_of_drgrpo_s_total(pipeline: Pipeline) -> None:
    (update,) = pipeline.run("worked", *DRGRPO, ACC, *KL, PADDED["worked"]).updates
    # A: accuracy 1 0 0 0 less 0.02 * [4 2 3 1] is [0.92 -0.04 -0.06 -0.02], of mean 0.2.
    found = update.by_answer()
    assert [found["A", answer] for answer in ("axxx", "cx", "dxx", "d")] == pytest.approx(
        [0.72, -0.24, -0.26, -0.22], abs=1e-6
    )
    # C: 0 less 0.02 * [3 3 3 1], of mean -0.05.
    assert [found["C", answer] for answer in ("dxx", "cxx", "d")] == pytest.approx([-0.01, -0.01, 0.03], abs=1e-6)


@pytest.mark.parametrize(
    "algorithm", [DGPO, (*DGPO, ACC), HADW, (*HADW, ACC)], ids=["dgpo", "dgpo-keys", "hadw", "hadw-keys"]
)
def test_kl_in_reward_leaves_the_accuracy_alone(pipeline: Pipeline, algorithm: tuple[str, ...]) -> None:
    from verl.trainer.ppo import ray_trainer

    import verl_ext

    result = pipeline.run("worked", *algorithm, *KL)
    (update,), config = result.updates, result.trainer.config
    with verl_ext.use_run_state(verl_ext.RunState()):
        data = ray_trainer.compute_advantage(
            as_batch(update, config), adv_estimator=config.algorithm.adv_estimator, config=config.algorithm
        )
    assert_same(update, data.batch["advantages"])
    if "hadw" in algorithm[0]:
        assert result.metrics[1]["hadw/batch_accuracy"] == pytest.approx(4 / 12)
    else:
        # exp(-p/2): A 0.25, B 0.75, and C, of accuracy 0, as 1: 3 exp(-1/8) / (exp(-1/8) + exp(-3/8) + exp(-1/2))
        odds = np.exp([-1 / 8, -3 / 8, -1 / 2])
        assert result.metrics[1]["dgpo/difficulty_weight_max"] == pytest.approx(3 * odds[0] / odds.sum())


def test_an_unknown_component_stops_the_run_and_lists_those_there_are(pipeline: Pipeline) -> None:
    with pytest.raises(
        ConfigurationError, match=r"unknown reward component 'fromat' .*'format'.* valid: 'acc', 'format'"
    ):
        pipeline.run("worked", *DRGRPO, "+algorithm.rewards.keys=[fromat]")


def test_a_component_that_is_no_number_stops_the_run_and_is_shown(pipeline: Pipeline) -> None:
    with pytest.raises(DataError, match=r"reward 'note' of uid '[0-9a-f-]+' is 'read .*' \(str\)"):
        pipeline.run("worked", *DRGRPO, "+algorithm.rewards.keys=[note]")


def test_a_trainer_is_refused_where_it_is_built(pipeline: Pipeline) -> None:
    with pytest.raises(ConfigurationError, match=r"set \+algorithm.rewards.keys"):
        pipeline.run("worked", "algorithm.adv_estimator=gdpo")


def trainer_base() -> Any:
    from verl.trainer.ppo.v1 import trainer_base

    return trainer_base


def test_a_subclass_that_calls_super_computes_and_logs_once(pipeline: Pipeline) -> None:
    class Polite(trainer_base().PPOTrainer):
        def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
            metrics["polite"] = 1.0
            return super()._compute_advantage(batch, metrics)

    result = pipeline.run("history", *HADW, ACC, cls=Polite)
    assert result.metrics[1]["polite"] == 1.0
    assert result.metrics[1]["reward/acc/mean"] == pytest.approx(9 / 16)
    assert result.metrics[1]["hadw/tick"] == 1.0


def test_a_subclass_with_a_copy_of_verl_s_method_still_has_its_components(pipeline: Pipeline) -> None:
    class Copied(trainer_base().PPOTrainer):
        # What a trainer that pasted verl's code amounts to: the function as verl wrote it.
        def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
            return trainer_base().PPOTrainer._compute_advantage.__wrapped__(self, batch, metrics)

    scene, overrides, expected = WORKED["gdpo over sequences"]
    result = pipeline.run(scene, *overrides, cls=Copied)
    assert result.updates[0].by_answer() == pytest.approx(expected, abs=1e-5)
    assert result.metrics[1]["reward/acc/mean"] == pytest.approx(4 / 8)


def test_a_subclass_that_goes_its_own_way_is_refused(pipeline: Pipeline) -> None:
    class OwnWay(trainer_base().PPOTrainer):
        def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
            return batch

    with pytest.raises(IntegrationError, match=r"OwnWay\._compute_advantage did not call the estimator 'drgrpo'"):
        pipeline.run("worked", *DRGRPO, cls=OwnWay)


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_every_trainer_mode_of_verl_inherits_the_hook(mode: str) -> None:
    from verl.trainer.ppo.v1 import get_trainer_cls

    cls = get_trainer_cls(mode)
    for method in ("__init__", "_compute_advantage", "_save_checkpoint", "_load_checkpoint"):
        owner = next(base for base in cls.__mro__ if method in vars(base))
        assert getattr(vars(owner)[method], "__verl_ext__", False), f"{owner.__qualname__}.{method}"


def test_one_answer_a_prompt_is_said_to_teach_nothing(pipeline: Pipeline, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "verl_ext"):
        (update,) = pipeline.run("alone", *DRGRPO).updates
    assert update.by_answer() == {("A", "axxx"): 0.0, ("B", "d"): 0.0}
    assert "2 of 2 prompts have one response" in caplog.text


def test_the_reward_table_is_that_of_the_example() -> None:
    assert [earned(answer)["acc"] for answer in ("axxx", "cx", "dxx", "d")] == [1, 0, 0, 0]
