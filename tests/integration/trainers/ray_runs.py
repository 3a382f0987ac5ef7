"""Trainers without workers over `RayPPOTrainer`, and their batches."""

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from verl import DataProto
from verl.trainer.ppo import ray_trainer

from tests.configs import compose
from tests.integration.hadw_checkpoints import HADW
from tests.integration.trainers.trainer_batches import WIDTH, TrainerBatch, mask_first_prompt
from verl_ext.trainers.mixin import with_mixin
from verl_ext.trainers.ray_trainer import RayTrainer

ACCURACY = [1, 0, 0, 0, 1, 1, 1, 0]
FORMAT = [1, 1, 0, 0, 1, 0, 1, 1]
LENGTHS = [4, 2, 3, 1, 2, 2, 5, 3]
UIDS = ["A"] * 4 + ["B"] * 4
KEYS = "+algorithm.rewards.keys=[acc,format]"
# The advantages of groups A and B in the worked example of the specification.
DRGRPO_ON_ACC = [0.75, -0.25, -0.25, -0.25, 0.25, 0.25, 0.25, -0.75]
PROMPT_WIDTH = 2

HAS_SESSIONS = False
"""Whether a response may have several outputs. Here each row that is not padding is a trajectory."""


def example_batch() -> DataProto:
    """Return two groups of four responses of up to five tokens. The score is accuracy + format."""
    fields = {"acc": np.array(ACCURACY, dtype=float), "format": np.array(FORMAT, dtype=object)}
    return data_proto(UIDS, LENGTHS, np.add(ACCURACY, FORMAT), fields)


def data_proto(
    uids: Any, lengths: Any, scores: Any, fields: dict[str, Any], width: int = 5, **tensors: torch.Tensor
) -> DataProto:
    """Return a batch as verl's trainers pass it: responses of up to `width` tokens with the score on the last token.

    `tensors` are added to the tensors of the batch or replace them.
    """
    size = len(lengths)
    length = torch.as_tensor(lengths)
    mask = (torch.arange(width) < length[:, None]).long()
    prompts = torch.ones(size, PROMPT_WIDTH, dtype=torch.long)
    token_level_scores = torch.zeros(size, width)
    token_level_scores[torch.arange(size), length - 1] = torch.as_tensor(scores).float()
    batch = {
        "response_mask": mask,
        "token_level_scores": token_level_scores,
        "token_level_rewards": token_level_scores.clone(),
        "prompts": prompts,
        "responses": torch.ones(size, width, dtype=torch.long),
        "attention_mask": torch.cat([prompts, mask], dim=1),
    }
    batch.update(tensors)
    return DataProto.from_dict(tensors=batch, non_tensors={"uid": np.array(uids, dtype=object), **fields})


def advantages_per_row(data: DataProto) -> list[float]:
    """Return the advantage of each response. Assert that it is the same on all its tokens and 0 on the others."""
    advantages = data.batch["advantages"]
    first_token = advantages[:, :1]
    torch.testing.assert_close(advantages, first_token * data.batch["response_mask"], atol=0, rtol=0)
    return first_token[:, 0].tolist()


VERL_TRAINER: Any = ray_trainer.RayPPOTrainer.__mro__[-2]
"""verl's own class, without the methods of verl_ext."""


class WithoutWorkers(VERL_TRAINER):
    """verl's class without workers."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.global_steps = 0
        self.use_critic = False
        self.actor_rollout_wg = mock.MagicMock()
        self.train_dataloader = mock.MagicMock()
        self.train_dataloader.state_dict.return_value = {}
        self.train_dataloader.__len__.return_value = 4


WithMixin: Any = with_mixin(RayTrainer, WithoutWorkers)
"""The class with the methods of verl_ext, as verl's module has it."""


class OwnFit(WithMixin):
    """A recipe's trainer, whose own `fit` does not call verl's."""

    def advantages(self, data: DataProto | None = None) -> DataProto:
        algorithm = self.config.algorithm
        if data is None:
            data = example_batch()
        return ray_trainer.compute_advantage(data, adv_estimator=algorithm.adv_estimator, config=algorithm)

    def fit(self, steps: int = 1, data: DataProto | None = None) -> list[tuple[DataProto, dict[str, Any]]]:
        """Return the data with advantages, and the metrics, of each step."""
        batches = []
        for _ in range(steps):
            computed = self.advantages() if data is None else self.advantages(data)
            batches.append((computed, self.logged(computed)))
        return batches

    def logged(self, data: DataProto) -> dict[str, Any]:
        """Return the metrics that verl logs for a batch."""
        return ray_trainer.compute_data_metrics(data, use_critic=False)


def run_own_fit(*overrides: str, steps: int = 1) -> tuple[OwnFit, list[tuple[DataProto, dict[str, Any]]]]:
    """Return a trainer that has trained, and the data and metrics of its steps."""
    trainer = OwnFit(compose(*overrides))
    return trainer, trainer.fit(steps)


make_trainer = OwnFit


def data_proto_of(trainer: OwnFit, batch: TrainerBatch) -> DataProto:
    """Return a batch as the trainer has it before it computes advantages."""
    score = batch.on_last_tokens(batch.score)
    rewards = score
    if trainer.config.algorithm.use_kl_in_reward:
        kl_of_token = torch.from_numpy(batch.kl).float()[:, None] * batch.mask
        rewards = score - kl_of_token
    columns = batch.dataset | batch.columns | {"data_source": batch.source}
    fields = {name: np.array(values, dtype=object) for name, values in columns.items()}
    token_fields = {name: batch.on_last_tokens(values) for name, values in batch.token_fields.items()}
    data = data_proto(
        batch.uids,
        batch.length,
        batch.score,
        fields,
        width=WIDTH,
        response_mask=batch.mask.clone(),
        token_level_rewards=rewards,
        token_level_scores_process=batch.process_field,
        **token_fields,
    )
    data.meta_info["reward_extra_keys"] = list(batch.columns)
    return data


def run_step(trainer: OwnFit, batch: TrainerBatch, *, hooked: bool) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the advantages and the metrics of a batch. With `hooked`, a hook masks the first prompt."""
    data = data_proto_of(trainer, batch)
    if hooked:
        data = mask_first_prompt(data)
    [(computed, metrics)] = trainer.fit(data=data)
    return computed.batch["advantages"], metrics


def hadw_trainer(folder: Path, *overrides: str) -> Any:
    """Return a trainer with hadw, without workers, whose `_save_checkpoint` and `_load_checkpoint` are verl's own."""
    settings = (f"trainer.default_local_dir={folder}", "trainer.resume_mode=auto")
    return WithMixin(compose(*HADW, *settings, *overrides))
