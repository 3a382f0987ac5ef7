"""Trainers without workers over `RayPPOTrainer` and the experimental trainers built on it, and their batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from verl import DataProto
from verl.trainer.ppo import ray_trainer
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

from tests.integration.configs import compose
from tests.integration.hadw_runs import HADW

ACCURACY = [1, 0, 0, 0, 1, 1, 1, 0]
FORMAT = [1, 1, 0, 0, 1, 0, 1, 1]
LENGTHS = [4, 2, 3, 1, 2, 2, 5, 3]
UIDS = ["A"] * 4 + ["B"] * 4
KEYS = "+algorithm.rewards.keys=[acc,format]"
# Groups A and B of the specification's worked example.
DRGRPO_ON_ACC = [0.75, -0.25, -0.25, -0.25, 0.25, 0.25, 0.25, -0.75]
GDPO = [1.705880, 0.263915, -0.984898, -0.984898, 0.720983, -0.720983, 0.720983, -0.720983]


def batch() -> DataProto:
    """Two groups of four responses of up to five tokens; the score is accuracy + format."""
    fields = {"acc": np.array(ACCURACY, dtype=float), "format": np.array(FORMAT, dtype=object)}
    return data_of(UIDS, LENGTHS, np.add(ACCURACY, FORMAT), fields)


def data_of(uids: Any, lengths: Any, scores: Any, fields: dict[str, Any]) -> DataProto:
    """A batch of responses of up to five tokens, the score on the last one, as verl's trainers pass it."""
    size = len(lengths)
    mask = (torch.arange(5) < torch.as_tensor(lengths)[:, None]).long()
    token_level = torch.zeros(size, 5)
    token_level[torch.arange(size), torch.as_tensor(lengths) - 1] = torch.as_tensor(scores).float()
    return DataProto.from_dict(
        tensors={
            "response_mask": mask,
            "token_level_scores": token_level,
            "token_level_rewards": token_level.clone(),
            "prompts": torch.ones(size, 2, dtype=torch.long),
            "responses": torch.ones(size, 5, dtype=torch.long),
            "attention_mask": torch.cat([torch.ones(size, 2, dtype=torch.long), mask], dim=1),
        },
        non_tensors={"uid": np.array(uids, dtype=object), **fields},
    )


def per_row(data: DataProto) -> list[float]:
    """The advantage of each response, asserting that it is one number on its tokens and 0 behind them."""
    advantages, mask = data.batch["advantages"], data.batch["response_mask"]
    torch.testing.assert_close(advantages, advantages[:, :1] * mask, atol=0, rtol=0)
    return advantages[:, 0].tolist()


class OwnFit(RayPPOTrainer):
    """A recipe's trainer: its own `__init__` and `fit`, neither of which calls verl's."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def advantages(self, data: DataProto | None = None) -> DataProto:
        algorithm = self.config.algorithm
        return ray_trainer.compute_advantage(
            batch() if data is None else data, adv_estimator=algorithm.adv_estimator, config=algorithm
        )

    def fit(self, steps: int) -> list[tuple[DataProto, dict[str, Any]]]:
        done = []
        for _ in range(steps):
            data = self.advantages()
            done.append((data, ray_trainer.compute_data_metrics(data, use_critic=False)))
        return done


def own_fit(*overrides: str, steps: int = 1) -> tuple[OwnFit, list[tuple[DataProto, dict[str, Any]]]]:
    trainer = OwnFit(compose(*overrides))
    return trainer, trainer.fit(steps)


def stub(folder: Path, *overrides: str) -> Any:
    """verl's own `_save_checkpoint` and `_load_checkpoint` of hadw on a trainer without workers."""

    class Stub(RayPPOTrainer):
        def __init__(self, config: Any) -> None:
            self.config, self.global_steps, self.use_critic = config, 0, False
            self.actor_rollout_wg = mock.MagicMock()
            self.train_dataloader = mock.MagicMock(**{"state_dict.return_value": {}, "__len__.return_value": 4})

    return Stub(compose(*HADW, f"trainer.default_local_dir={folder}", "trainer.resume_mode=auto", *overrides))


def separate(cls: type[Any], *overrides: str) -> Any:
    """An instance of one of verl's experimental trainers, as its `_fit_compute_advantage` needs it."""

    class Stub(cls):
        def __init__(self, config: Any) -> None:  # no super, as those trainers
            self.config = config

    trainer = Stub(compose(*overrides))
    trainer.metrics, trainer.timing_raw, trainer.global_steps = {}, {}, 3
    trainer.reward_tensor = batch().batch["token_level_scores"]
    trainer.reward_extra_infos_dict = {"acc": ACCURACY, "format": FORMAT}
    return trainer


def advance(trainer: Any) -> DataProto:
    """The advantage step of an experimental trainer and its metrics, as `fit_step` has them."""
    from verl.experimental.separation import ray_trainer as separation

    data = trainer._fit_compute_advantage(without_rewards())
    trainer.metrics.update(separation.compute_data_metrics(data, use_critic=False))
    return data


def without_rewards() -> DataProto:
    data = batch()
    for key in ("acc", "format"):
        del data.non_tensor_batch[key]
    data.batch.pop("token_level_rewards")
    return data


def trainer_classes() -> list[type[Any]]:
    from verl.experimental.fully_async_policy.fully_async_trainer import FullyAsyncTrainer
    from verl.experimental.one_step_off_policy.ray_trainer import OneStepOffRayTrainer
    from verl.experimental.separation.ray_trainer import SeparateRayPPOTrainer

    return [SeparateRayPPOTrainer, OneStepOffRayTrainer, FullyAsyncTrainer.__ray_metadata__.modified_class]
