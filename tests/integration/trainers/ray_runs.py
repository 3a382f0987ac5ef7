"""Trainers without workers over `RayPPOTrainer`, and their batches."""

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from verl import DataProto
from verl.trainer.ppo import ray_trainer

from tests.configs import compose
from tests.integration.hadw_runs import HADW
from tests.integration.trainers.drawn import WIDTH, Drawn, mask_first_prompt
from verl_ext.trainers.mixin import with_mixin
from verl_ext.trainers.ray_trainer import RayTrainer

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


def data_of(
    uids: Any, lengths: Any, scores: Any, fields: dict[str, Any], width: int = 5, **more: torch.Tensor
) -> DataProto:
    """A batch of responses of up to `width` tokens, the score on the last one, as verl's trainers pass it."""
    size = len(lengths)
    mask = (torch.arange(width) < torch.as_tensor(lengths)[:, None]).long()
    token_level = torch.zeros(size, width)
    token_level[torch.arange(size), torch.as_tensor(lengths) - 1] = torch.as_tensor(scores).float()
    tensors = {
        "response_mask": mask,
        "token_level_scores": token_level,
        "token_level_rewards": token_level.clone(),
        "prompts": torch.ones(size, 2, dtype=torch.long),
        "responses": torch.ones(size, width, dtype=torch.long),
        "attention_mask": torch.cat([torch.ones(size, 2, dtype=torch.long), mask], dim=1),
    }
    return DataProto.from_dict(tensors=tensors | more, non_tensors={"uid": np.array(uids, dtype=object), **fields})


def per_row(data: DataProto) -> list[float]:
    """The advantage of each response, asserting that it is one number on its tokens and 0 behind them."""
    advantages, mask = data.batch["advantages"], data.batch["response_mask"]
    torch.testing.assert_close(advantages, advantages[:, :1] * mask, atol=0, rtol=0)
    return advantages[:, 0].tolist()


VERLS: Any = ray_trainer.RayPPOTrainer.__mro__[-2]
"""verl's own class."""


class Light(VERLS):
    """verl's class without workers."""

    def __init__(self, config: Any) -> None:
        self.config, self.global_steps, self.use_critic = config, 0, False
        self.actor_rollout_wg = mock.MagicMock()
        self.train_dataloader = mock.MagicMock(**{"state_dict.return_value": {}, "__len__.return_value": 4})


Base: Any = with_mixin(RayTrainer, Light)
"""As the module has it in the place of verl's."""


class OwnFit(Base):
    """A recipe's trainer, whose own `fit` does not call verl's."""

    def advantages(self, data: DataProto | None = None) -> DataProto:
        algorithm = self.config.algorithm
        return ray_trainer.compute_advantage(
            batch() if data is None else data, adv_estimator=algorithm.adv_estimator, config=algorithm
        )

    def fit(self, steps: int = 1, data: DataProto | None = None) -> list[tuple[DataProto, dict[str, Any]]]:
        done = []
        for _ in range(steps):
            computed = self.advantages() if data is None else self.advantages(data)
            done.append((computed, self.logged(computed)))
        return done

    def logged(self, data: DataProto) -> dict[str, Any]:
        return ray_trainer.compute_data_metrics(data, use_critic=False)


def own_fit(*overrides: str, steps: int = 1) -> tuple[OwnFit, list[tuple[DataProto, dict[str, Any]]]]:
    trainer = OwnFit(compose(*overrides))
    return trainer, trainer.fit(steps)


SESSIONS = False
"""Each row that is no padding is a trajectory."""
made = OwnFit


def batch_of(trainer: OwnFit, drawn: Drawn) -> DataProto:
    """A drawn batch as the trainer has it before its advantages."""
    kl = torch.from_numpy(drawn.kl).float()[:, None] * drawn.mask * bool(trainer.config.algorithm.use_kl_in_reward)
    data = data_of(
        drawn.uids,
        drawn.length,
        drawn.score,
        {
            name: np.array(values, dtype=object)
            for name, values in (drawn.dataset | drawn.columns | {"data_source": drawn.source}).items()
        },
        width=WIDTH,
        response_mask=drawn.mask.clone(),
        token_level_rewards=drawn.ends(drawn.score) - kl,
        token_level_scores_process=drawn.process_field,
        **{name: drawn.ends(values) for name, values in drawn.token_fields.items()},
    )
    data.meta_info["reward_extra_keys"] = list(drawn.columns)
    return data


def step(trainer: OwnFit, drawn: Drawn, *, hooked: bool) -> tuple[torch.Tensor, dict[str, Any]]:
    """The advantages and the metrics of a drawn batch."""
    data = batch_of(trainer, drawn)
    [(data, metrics)] = trainer.fit(data=mask_first_prompt(data) if hooked else data)
    return data.batch["advantages"], metrics


def stub(folder: Path, *overrides: str) -> Any:
    """verl's own `_save_checkpoint` and `_load_checkpoint` of hadw on a trainer without workers."""
    return Base(compose(*HADW, f"trainer.default_local_dir={folder}", "trainer.resume_mode=auto", *overrides))
