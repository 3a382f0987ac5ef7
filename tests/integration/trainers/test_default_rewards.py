"""Where the default trainer's rewards come from and go to: reward models, metrics, dumps of verl's own estimators."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import transfer_queue as tq

from tests.integration.pipeline import Pipeline
from tests.integration.trainers.default_runs import (
    DRGRPO,
)


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
