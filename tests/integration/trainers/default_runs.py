"""What the tests of the default trainer share: settings, and the rows of an update."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.integration.pipeline import Update
from verl_ext import RunState, use_run_state

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


def components(update: Update) -> list[dict[str, Any]]:
    """What the reward worker returned for each row."""
    return [entry["reward_extra_info"] for entry in list(update.data["extra_fields"])]


def as_batch(update: Update, config: Any) -> Any:
    """The update's rows as `RayPPOTrainer` holds them: padded tensors, and components as arrays."""
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


def on_ray_trainer(update: Update, config: Any) -> torch.Tensor:
    """The advantages that `RayPPOTrainer`'s function computes for the update's rows, in a run of their own."""
    from verl.trainer.ppo import ray_trainer

    name = config.algorithm.adv_estimator
    with use_run_state(RunState()):
        data = ray_trainer.compute_advantage(as_batch(update, config), adv_estimator=name, config=config.algorithm)
    return data.batch["advantages"]


def assert_same(update: Update, padded: torch.Tensor) -> None:
    """The trainer's advantages are these, to 1e-6, and 0 behind the mask."""
    expected = update.data["advantages"].to_padded_tensor(0.0)
    torch.testing.assert_close(padded, expected, atol=1e-6, rtol=0)
