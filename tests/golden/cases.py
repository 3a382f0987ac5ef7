"""What goes into an estimator: settings and a few batches, as plain numbers. Nothing of the package is imported."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

WIDTH = 8  # tokens of the longest response


@dataclass(frozen=True)
class Rows:
    """One batch, with one entry a row."""

    prompt: np.ndarray
    """Number of the prompt; -1 is padding."""
    session: np.ndarray
    """Number of the answer to that prompt."""
    output: np.ndarray
    """Number of the output in its session; the last one carries the score."""
    length: np.ndarray
    """Tokens of the response, from 1 to 8."""
    bits: np.ndarray
    """The response mask, one bit a token."""
    score: np.ndarray
    kl: np.ndarray
    """KL of each token, in 1/1024."""
    columns: dict[str, np.ndarray]
    """Named rewards; NaN is "not scored"."""

    def __len__(self) -> int:
        return len(self.prompt)

    @cached_property
    def padding(self) -> np.ndarray:
        return self.prompt < 0

    @cached_property
    def uids(self) -> list[str]:
        return [f"pad{row}" if prompt < 0 else f"p{prompt}" for row, prompt in enumerate(self.prompt.tolist())]

    @cached_property
    def keys(self) -> list[str]:
        """Names of the rows in verl's queue."""
        numbers = zip(self.uids, self.session.tolist(), self.output.tolist(), strict=True)
        return [f"{uid}_{session}_{output}" for uid, session, output in numbers]

    @cached_property
    def mask(self) -> torch.Tensor:
        """`[rows, tokens]` of 0 and 1."""
        return torch.from_numpy(np.unpackbits(self.bits[:, None], axis=1, bitorder="little").astype(np.int64))

    @cached_property
    def scores(self) -> torch.Tensor:
        """`[rows, tokens]`: the score on the last token of each response."""
        return self.on_last_token(self.score)

    @cached_property
    def total_score(self) -> np.ndarray:
        """The score of each row; NaN counts as 0 on a token outside the mask."""
        outside = (self.bits >> (self.length - 1)) & 1 == 0
        return np.where(np.isnan(self.score) & outside, 0.0, self.score.astype(np.float64))

    @cached_property
    def kl_tokens(self) -> torch.Tensor:
        """`[rows, tokens]` of the KL, exact in float32."""
        return torch.from_numpy(self.kl / 1024).float()[:, None].expand(-1, WIDTH)

    @cached_property
    def rewards(self) -> torch.Tensor:
        """`[rows, tokens]`: the scores less the KL."""
        return self.scores - self.kl_tokens * self.mask

    def on_last_token(self, values: np.ndarray) -> torch.Tensor:
        field = torch.zeros(len(self), WIDTH)
        field[torch.arange(len(self)), torch.from_numpy(self.length.astype(np.int64)) - 1] = torch.from_numpy(
            values.astype(np.float32)
        )
        return field

    def on_both_ends(self, values: np.ndarray) -> torch.Tensor:
        """As a process reward model may: half of the value on the first token, half on the last."""
        field = self.on_last_token(values / 2)
        field[:, 0] += torch.from_numpy((values / 2).astype(np.float32))
        return field

    @cached_property
    def sessions(self) -> list[list[int]]:
        """The rows of each trajectory, the scored one last, in the order in which trajectories appear."""
        found: dict[tuple[int, int], list[int]] = {}
        for row in np.flatnonzero(~self.padding).tolist():
            found.setdefault((int(self.prompt[row]), int(self.session[row])), []).append(row)
        return [sorted(rows, key=lambda row: self.output[row]) for rows in found.values()]


@dataclass(frozen=True)
class Case:
    """An estimator with its settings, and the batches of one run, in order."""

    name: str
    estimator: str
    algorithm: dict[str, Any]
    """The section `algorithm`, without the estimator's name."""
    loss: str
    """`loss_agg_mode` of the actor."""
    keys: tuple[str, ...] | None
    """The rewards by name; None: the score."""
    accuracy: tuple[str, float | None] | None
    """Which column is the accuracy, and its threshold; None: no step needs one."""
    per_token: tuple[str, ...] = ()
    """Columns that come as a batch field with one value a token."""
    batches: tuple[Rows, ...] = field(default=(), repr=False)

    @property
    def number(self) -> int:
        return int(self.name.partition("-")[0])

    @property
    def text(self) -> str:
        """The case in a line, for messages and for patterns."""
        return f"{self.name}: {self.estimator} {self.algorithm} loss={self.loss}"

    def infos(self, rows: Rows) -> dict[str, np.ndarray]:
        """The columns that the reward function returns."""
        return {key: column for key, column in rows.columns.items() if key not in self.per_token}

    def token_fields(self, rows: Rows) -> dict[str, torch.Tensor]:
        """The columns that are fields of the batch."""
        return {f"token_level_scores_{key}": rows.on_both_ends(rows.columns[key]) for key in self.per_token}


@dataclass(frozen=True)
class Outcome:
    """What one batch gave: one advantage a trajectory, or a row, and the metrics."""

    advantages: np.ndarray
    metrics: dict[str, float] = field(default_factory=dict)


def per_row(advantages: torch.Tensor, mask: torch.Tensor) -> np.ndarray:
    """The advantage of each row; raise unless it is one number on its tokens and exactly 0 elsewhere."""
    mask = mask.bool()
    values = torch.where(mask.any(dim=1), advantages.gather(1, mask.int().argmax(dim=1, keepdim=True))[:, 0], 0.0)
    wanted = torch.where(mask, values[:, None], 0.0)
    if not torch.equal(torch.nan_to_num(advantages, 9e9), torch.nan_to_num(wanted, 9e9)):
        raise AssertionError(f"not one advantage a row, 0 behind the mask:\n{advantages}\n{mask}")
    return values.numpy()


def checksum(field: torch.Tensor) -> float:
    """One number for a padded field with one value a token, in which every position has a weight of its own."""
    weights = torch.arange(1, len(field) + 1)[:, None] + torch.arange(field.shape[1])[None, :] / 16
    return float((field.double() * weights).sum())
