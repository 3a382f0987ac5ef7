"""What is logged and dumped beside the advantages of verl's own estimators: padding, several outputs, a critic."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from verl_ext.core.rows import Rows
from verl_ext.integration.advantage import log_and_dump
from verl_ext.integration.components import Components
from verl_ext.integration.run import Run
from verl_ext.settings import Settings

KEYS = ["a_0_0", "a_1_0", "a_1_1", "pad_0_0", "b_0_0"]
"""Session a_1 has two outputs; a row of padding stands in between."""
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 0, 1], [0, 0, 0], [1, 1, 0]])
ADVANTAGES = torch.tensor([[0.5, 1.0, 1.5], [2.0, 9.0, 9.0], [4.0, 9.0, 6.0], [9.0, 9.0, 9.0], [-3.0, -1.0, 9.0]])
"""As with a critic, they differ from token to token; the 9 are outside of the mask."""
SCORES = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 2.0], [0.0, 0.0, 0.0], [0.0, 3.0, 0.0]])


def watched(folder: Path) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """The metrics, and the rows of the dump."""
    rows = Rows.of_sessions(KEYS, np.array([key.startswith("pad") for key in KEYS]))
    rewards = Components(rows=rows, labels=["a", "a", "b"], fields={"acc": np.array([1.0, 0.0, 1.0])})
    settings = Settings.parse({"rewards": {"keys": ["acc"]}, "verl_ext": {"dump_dir": str(folder)}})
    run = Run("gae", settings, None, SimpleNamespace(global_steps=3))
    given = {"advantages": ADVANTAGES, "response_mask": MASK, "token_level_scores": SCORES}
    log_and_dump(run, rewards, lambda: given)
    return run.metrics, [row for path in sorted(folder.rglob("*.parquet")) for row in pq.read_table(path).to_pylist()]


def test_each_trajectory_has_its_own_reward_tokens_score_and_mean_advantage(tmp_path: Path) -> None:
    metrics, found = watched(tmp_path)
    assert [(row["uid"], row["reward/acc"]) for row in found] == [("a", 1.0), ("a", 0.0), ("b", 1.0)]
    assert [row["tokens"] for row in found] == [3, 3, 2]  # of both outputs of the session
    assert [row["total"] for row in found] == [1.0, 2.0, 3.0]
    assert [row["advantage"] for row in found] == pytest.approx([1.0, 5.0, -2.0])
    assert [row["group_std/acc"] for row in found] == pytest.approx([0.5**0.5, 0.5**0.5, 0.0])
    assert metrics["reward/acc/mean"] == pytest.approx(2 / 3)


def test_a_batch_of_padding_alone_has_nothing_to_show() -> None:
    run = Run("grpo", Settings.parse({"rewards": {"keys": ["acc"]}}), None)
    log_and_dump(run, Components(rows=Rows.of_sessions(["pad_0_0"], np.array([True])), labels=[]), None)
    assert run.metrics == {}
