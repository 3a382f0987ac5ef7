"""Runs of hadw, whose checkpoints hold its history."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.integration.pipeline import Pipeline, Result

HADW = ("algorithm.adv_estimator=hadw", "+algorithm.rewards.keys=[acc]")


def state_after(updates: int) -> dict[str, Any]:
    """Return a state of hadw after a number of updates. Its numbers have no short decimal representation."""
    capability = 0.1 + 0.2
    history = {"anchor": "soft", "value": capability, "window": [1 / 3, capability], "updates": updates}
    return {"weight_by_history": history}


def train_hadw(
    pipeline: "Pipeline", folder: Path, steps: int, *overrides: str, cls: type[Any] | None = None
) -> "Result":
    """Train hadw on the prompts of `history` up to a step, with a checkpoint in the folder after each step."""
    options = {} if cls is None else {"cls": cls}
    return pipeline.run(
        "history",
        *HADW,
        f"trainer.default_local_dir={folder}",
        f"trainer.total_training_steps={steps}",
        "trainer.save_freq=1",
        *overrides,
        prompts=2,
        **options,
    )


def saved_state(folder: Path, step: int) -> Any:
    """Return the content of the state file in the checkpoint of a step."""
    path = folder / f"global_step_{step}" / "verl_ext.json"
    return json.loads(path.read_text())
