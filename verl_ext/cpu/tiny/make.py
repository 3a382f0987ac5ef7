"""Write a tiny task's folder: `model/` with its tokenizer, `train.parquet`, `val.parquet`, `task.json`."""

from __future__ import annotations

import hashlib
import json
import os
import random
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from verl_ext.core.typed import number
from verl_ext.cpu.tiny.task import Task
from verl_ext.cpu.tiny.tasks import task_named
from verl_ext.errors import ConfigurationError

MARKER = "task.json"


def code() -> str:
    """A digest of the modules that make a task: a change of the code makes another task."""
    files = sorted(path for path in Path(__file__).parent.glob("*.py") if path.name != "train.py")
    return hashlib.blake2b(b"".join(path.read_bytes() for path in files), digest_size=8).hexdigest()


@dataclass(frozen=True)
class Recipe:
    """All that a task's folder depends on."""

    task: str
    warm_up_steps: int
    train_rows: int = 2048
    val_rows: int = 128
    seed: int = 0
    code: str = field(default_factory=code)

    def __post_init__(self) -> None:
        task_named(self.task)
        for name in ("warm_up_steps", "train_rows", "val_rows"):
            number(name, getattr(self, name), low=1)


def made(folder: Path) -> dict[str, Any] | None:
    """The content of a finished folder's `task.json`, or None."""
    path = folder / MARKER
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def make(folder: Path, recipe: Recipe, report: Callable[[int, float], None] | None = None) -> bool:
    """Write the folder unless it was made by the same recipe; return whether it was written.

    It is made in a temporary folder and moved, so a folder is either finished or missing.
    """
    marker = made(folder)
    if marker is not None and marker["recipe"] == asdict(recipe):
        return False
    if folder.exists() and marker is None:
        raise ConfigurationError(
            f"{folder} is not a tiny task (it has no {MARKER}), so it is not overwritten: choose another folder"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        new = Path(scratch) / "task"
        _write(new, recipe, report)
        if marker is not None:  # moved, not removed in place: so it is complete as long as it exists
            os.replace(folder, Path(scratch) / "old")
        try:
            os.replace(new, folder)
        except OSError:  # another process may have made it meanwhile
            if (other := made(folder)) is None or other["recipe"] != asdict(recipe):
                raise
            return False
    return True


def rows(task: Task, count: int, *, seed: str) -> list[dict[str, Any]]:
    """Rows in verl's parquet format, drawn with their own seed."""
    rng = random.Random(seed)
    examples = [task.draw(rng) for _ in range(count)]
    return [
        {
            "data_source": task.data_source,
            "prompt": list(example.messages),
            "ability": task.name,
            "reward_model": {"style": "rule", "ground_truth": example.ground_truth},
            "extra_info": {"split": seed.partition("-")[0], "index": index},
        }
        for index, example in enumerate(examples)
    ]


def score(task: Task, answers: list[tuple[Any, str]]) -> dict[str, float]:
    """The mean of each reward over examples with their answers."""
    reward = import_module(task.reward)
    scores = [reward.compute_score(task.data_source, text, example.ground_truth) for example, text in answers]
    return {key: sum(result[key] for result in scores) / len(scores) for key in task.keys}


def _write(folder: Path, recipe: Recipe, report: Callable[[int, float], None] | None) -> None:
    import pandas

    from verl_ext.cpu.tiny.model import make_model, sample, warm_up
    from verl_ext.cpu.tiny.tokenizer import make_tokenizer

    task = task_named(recipe.task)
    tokenizer = make_tokenizer(task.words)
    model = make_model(tokenizer, seed=recipe.seed)
    warm_up(model, task, tokenizer, steps=recipe.warm_up_steps, seed=recipe.seed, report=report)
    sampled = sample(model, task, tokenizer, count=256, seed=recipe.seed)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    for split, count in (("train", recipe.train_rows), ("val", recipe.val_rows)):
        pandas.DataFrame(rows(task, count, seed=f"{split}-{recipe.seed}")).to_parquet(folder / f"{split}.parquet")
    marker = {"recipe": asdict(recipe), "rewards_after_warm_up": score(task, sampled)}
    (folder / MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
