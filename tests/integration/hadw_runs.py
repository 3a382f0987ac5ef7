"""Runs of hadw, whose history is the state that is kept."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.integration.pipeline import Pipeline

HADW = ("algorithm.adv_estimator=hadw", "+algorithm.rewards.keys=[acc]")


def capability(updates: int, value: float = 0.1 + 0.2) -> dict[str, Any]:
    return {"weight_by_history": {"anchor": "soft", "value": value, "window": [1 / 3, value], "updates": updates}}


def train(pipeline: "Pipeline", folder: Path, steps: int, *overrides: str, cls: type[Any] | None = None) -> Any:
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
