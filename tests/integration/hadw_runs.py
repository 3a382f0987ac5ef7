"""Runs of hadw, whose history is the state that is kept: what it holds, and a trainer of verl's to save it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

from tests.integration.configs import compose
from tests.integration.pipeline import Pipeline
from verl_ext.core.state import RunState

HADW = ("algorithm.adv_estimator=hadw", "+algorithm.rewards.keys=[acc]")


def state(ticks: int, value: float = 0.1 + 0.2) -> RunState:
    return RunState({"hadw": {"weigh_by_history": {"anchor": "soft", "value": value, "window": [1 / 3, value], "ticks": ticks}}})


def legacy(folder: Path, *overrides: str) -> Any:
    """verl's own `_save_checkpoint` and `_load_checkpoint` on a trainer without workers."""
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    class Stub(RayPPOTrainer):
        def __init__(self, config: Any) -> None:
            self.config, self.global_steps, self.use_critic = config, 0, False
            self.actor_rollout_wg = mock.MagicMock()
            self.train_dataloader = mock.MagicMock(**{"state_dict.return_value": {}, "__len__.return_value": 4})

    return Stub(compose(*HADW, f"trainer.default_local_dir={folder}", "trainer.resume_mode=auto", *overrides))


def train(pipeline: Pipeline, folder: Path, steps: int, *overrides: str, cls: type[Any] | None = None) -> Any:
    given = {} if cls is None else {"cls": cls}
    return pipeline.run(
        "history",
        *HADW,
        f"trainer.default_local_dir={folder}",
        f"trainer.total_training_steps={steps}",
        "trainer.save_freq=1",
        *overrides,
        prompts=2,
        **given,
    )


def saved(folder: Path, step: int) -> Any:
    return json.loads((folder / f"global_step_{step}" / "verl_ext.json").read_text())
