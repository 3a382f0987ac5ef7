"""Where the default trainer's rewards come from and go to: token scores, reward models, verl's own estimators, KL."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import transfer_queue as tq
from tensordict import TensorDict

from tests.integration.pipeline import Pipeline, answers_to
from tests.integration.trainers.default_runs import (
    DRGRPO,
    GDPO,
    PADDED,
    components,
)
from verl_ext import integration


def test_token_scores_stand_on_the_last_token_of_each_response(pipeline: Pipeline) -> None:
    result = pipeline.run("several", *GDPO, PADDED["worked"], "+algorithm.rewards.token_scores=True")
    (update,) = result.updates
    for key in ("acc", "format"):
        rows = update.data[f"token_level_scores_{key}"].unbind()
        for row, (field, info, is_padding) in enumerate(zip(rows, components(update), update.padding, strict=True)):
            expected = [0.0] * len(update.advantages[row])
            expected[-1] = 0.0 if is_padding else info[key]
            assert field.tolist() == expected


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
    """As with RayPPOTrainer, whose fields are padded: here they are jagged, in the model's own type."""
    field = [torch.full((1003,), 1.0), torch.tensor([2.0, math.nan, 0.5])]
    mask = [torch.ones(1003), torch.tensor([1.0, 0.0, 1.0])]
    stored = {
        "token_level_scores_acc": torch.nested.as_nested_tensor(field, layout=torch.jagged).to(torch.bfloat16),
        "response_mask": torch.nested.as_nested_tensor(mask, layout=torch.jagged).long(),
    }
    monkeypatch.setattr(
        integration.components,
        "read_queue",
        lambda keys, partition_id, fields: {name: stored[name] for name in fields if name in stored},
    )
    rewards = integration.components.of_queue(["a_0_0", "a_1_0"], "train", ["acc"])
    assert rewards.column("acc", "").tolist() == [1003.0, 2.5]


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
        (("algorithm.adv_estimator=grpo", "+algorithm.rewards.log=all"), {"acc", "format", "score", "registered"}),
        (("algorithm.adv_estimator=grpo", "+algorithm.rewards.keys=[acc]"), {"acc"}),
        (("algorithm.adv_estimator=gdpo", "+algorithm.rewards.keys=[acc]"), {"acc", "format", "score", "registered"}),
        (("algorithm.adv_estimator=gdpo", "+algorithm.rewards={keys:[acc],log:keys}"), {"acc"}),
        (("algorithm.adv_estimator=gdpo", "+algorithm.rewards={keys:[acc],log:none}"), set()),
        (("algorithm.adv_estimator=maxrl",), {"acc", "format", "score", "registered"}),
    ],
)
def test_which_rewards_are_logged(pipeline: Pipeline, overrides: tuple[str, ...], names: set[str]) -> None:
    metrics = pipeline.run("pair", *overrides).metrics[1]
    assert {name.split("/")[1] for name in metrics if name.startswith("reward/") and name.endswith("/std")} == names


def test_all_rewards_are_logged_by_source_and_change_no_number(pipeline: Pipeline) -> None:
    plain = pipeline.run("pair", "algorithm.adv_estimator=grpo", "+algorithm.rewards.log=none")
    logged = pipeline.run("pair", "algorithm.adv_estimator=grpo", "+algorithm.rewards.log=all")
    assert logged.updates[0].by_answer() == plain.updates[0].by_answer()
    means = {name: value for name, value in logged.metrics[1].items() if name.startswith("reward/acc/by_source")}
    assert means == {"reward/acc/by_source/letters/mean": 0.25, "reward/acc/by_source/digits/mean": 0.75}
    assert logged.metrics[1]["reward/format/dead_groups"] == 0.0


def test_verl_s_own_grpo_dumps_its_advantages_beside_the_named_rewards(pipeline: Pipeline, tmp_path: Path) -> None:
    result = pipeline.run(
        "worked",
        "algorithm.adv_estimator=grpo",
        "+algorithm.rewards.keys=[acc,format]",
        f"+algorithm.verl_ext.dump_dir={tmp_path}",
        PADDED["worked"],
    )
    (path,) = tmp_path.glob("from-0-0/*.parquet")
    table = pq.read_table(path).to_pydict()
    assert len(table["uid"]) == 12  # without padding
    assert sum(table["reward/acc"]) == 4
    assert sum(table["total"]) == 10
    (update,) = result.updates
    assert sorted(table["advantage"]) == pytest.approx(sorted(map(update.advantage, update.rows())), abs=1e-6)


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
