"""The advantages of `RayPPOTrainer`: verl's own functions in the `fit` of a trainer without workers."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from verl import DataProto
from verl.trainer.ppo import ray_trainer

from tests.golden.cases import Case, Outcome, Rows, checksum, per_row
from tests.golden.configs import config_for
from tests.integration.trainers.ray_runs import Base

OF_VERL = re.compile(r"(critic|response\w*|prompt\w*|num_turns|tool_call_counts)/")


class Trainer(Base):
    """A recipe's trainer, whose own `fit` calls verl's functions as verl's does."""

    def fit(self, batches: list[DataProto]) -> list[tuple[DataProto, dict[str, Any]]]:
        algorithm = self.config.algorithm
        done = []
        for data in batches:
            data = ray_trainer.compute_advantage(
                data,
                adv_estimator=algorithm.adv_estimator,
                norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
                config=algorithm,
            )
            done.append((data, ray_trainer.compute_data_metrics(data, use_critic=False)))
        return done


def through_ray_trainer(case: Case) -> list[Outcome]:
    """Advantages and metrics; here every row that is no padding is a trajectory."""
    given = [data_of(case, rows) for rows in case.batches]
    return [
        outcome(rows, data, metrics)
        for rows, (data, metrics) in zip(case.batches, Trainer(config_for(case)).fit(given), strict=True)
    ]


def outcome(rows: Rows, data: DataProto, metrics: dict[str, Any]) -> Outcome:
    ours = {name: float(value) for name, value in metrics.items() if not OF_VERL.match(name)}
    fields = {name: checksum(field) for name, field in data.batch.items() if name.startswith("token_level_scores_")}
    return Outcome(per_row(data.batch["advantages"], rows.mask), ours | fields)


def data_of(case: Case, rows: Rows) -> DataProto:
    size, width = rows.mask.shape
    present = (torch.arange(width) < torch.from_numpy(rows.length.astype(np.int64))[:, None]).long()
    return DataProto.from_dict(
        tensors={
            "response_mask": rows.mask.clone(),
            "token_level_scores": rows.scores.clone(),
            "token_level_rewards": rows.rewards.clone(),
            "prompts": torch.ones(size, 2, dtype=torch.long),
            "responses": torch.ones(size, width, dtype=torch.long),
            "attention_mask": torch.cat([torch.ones(size, 2, dtype=torch.long), present], dim=1),
            **case.token_fields(rows),
        },
        non_tensors={"uid": np.array(rows.uids, dtype=object), **case.infos(rows)},
    )
