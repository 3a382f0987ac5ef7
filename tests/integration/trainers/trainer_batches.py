"""A batch that each trainer of verl can be given in its own format."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from verl import DataProto

WIDTH = 8
"""The number of tokens of the longest response."""
PADDING = -1
"""The prompt of a row of padding."""
MISSING = ...
"""An entry of a column for a response whose result lacks the key."""


@dataclass(frozen=True)
class TrainerBatch:
    """A batch with one entry per row, in no trainer's own format."""

    prompt: list[int]
    session: list[int]
    output: list[int]
    """The index of the row among the outputs of its session. The last output has the score of the session."""
    length: np.ndarray
    """The number of tokens of the response, including those that the mask excludes."""
    mask: torch.Tensor
    score: np.ndarray
    kl: np.ndarray
    """The KL divergence of each token of the row."""
    kl_tokens: np.ndarray
    """The number of tokens in the KL term. A hook may exclude some of these tokens from the mask later."""
    columns: dict[str, np.ndarray]
    """The rewards that the reward function returns. NaN means that a response is not scored. `rubric` is text."""
    process: np.ndarray
    """A reward with one value on the first token and one on the last."""
    source: list[str]
    dataset: dict[str, list[Any]] = field(default_factory=dict)
    """Additional columns of the data set."""
    token_fields: dict[str, np.ndarray] = field(default_factory=dict)
    """Additional fields of the batch, by name, with a value on the last token of each response."""

    @property
    def uids(self) -> list[str]:
        """The uid of each row. Each row of padding has its own."""
        return [f"pad{row}" if prompt == PADDING else f"p{prompt}" for row, prompt in enumerate(self.prompt)]

    @property
    def results(self) -> list[dict[str, Any]]:
        """The results of the reward function for each row, without the entries that are `MISSING`."""
        results: list[dict[str, Any]] = [{} for _ in self.prompt]
        for name, column in self.columns.items():
            for row, value in enumerate(column.tolist()):
                if value is not MISSING:
                    results[row][name] = value
        return results

    @property
    def queue_keys(self) -> list[str]:
        """The key of each row in verl's queue."""
        rows = zip(self.uids, self.session, self.output, strict=True)
        return [f"{uid}_{session}_{output}" for uid, session, output in rows]

    def on_last_tokens(self, values: np.ndarray) -> torch.Tensor:
        """Return a tensor `[rows, tokens]` with a value on the last token of each response."""
        rows = torch.arange(len(self.prompt))
        last_token = torch.from_numpy(self.length) - 1
        tokens = torch.zeros(len(self.prompt), WIDTH)
        tokens[rows, last_token] = torch.from_numpy(values).float()
        return tokens

    @property
    def process_field(self) -> torch.Tensor:
        """The process reward per token: 1 on the first token, and the rest of the value on the last."""
        tokens = self.on_last_tokens(self.process - 1.0)
        tokens[:, 0] += 1.0
        return tokens

    @property
    def trajectories(self) -> list[list[int]]:
        """The rows of each trajectory in the order of its outputs, so that the row with the score is the last."""
        rows_by_session: dict[tuple[int, int], list[int]] = {}
        for row, (prompt, session) in enumerate(zip(self.prompt, self.session, strict=True)):
            if prompt != PADDING:
                rows_by_session.setdefault((prompt, session), []).append(row)
        return [sorted(rows, key=lambda row: self.output[row]) for rows in rows_by_session.values()]


def group_of(score: list[float], columns: dict[str, list[Any]], **options: Any) -> TrainerBatch:
    """Return a batch of one prompt with a response of two tokens for each score."""
    size = len(score)
    mask_of_row = (torch.arange(WIDTH) < 2).long()
    return TrainerBatch(
        prompt=[0] * size,
        session=list(range(size)),
        output=[0] * size,
        length=np.full(size, 2),
        mask=mask_of_row.repeat(size, 1),
        score=np.array(score),
        kl=np.zeros(size),
        kl_tokens=np.full(size, 2.0),
        columns={key: np.array(values, dtype=object) for key, values in columns.items()},
        process=np.ones(size),
        source=["letters"] * size,
        **options,
    )


def mask_first_prompt(data: DataProto) -> DataProto:
    """Exclude the tokens of the first prompt, as a hook of `trainer.pre_advantage_hooks` may."""
    is_first = torch.from_numpy(data.non_tensor_batch["uid"] == "p0")
    data.batch["response_mask"] = data.batch["response_mask"].masked_fill(is_first[:, None], 0)
    return data


def with_first_prompt_masked(batch: TrainerBatch) -> TrainerBatch:
    """Return the batch as `mask_first_prompt` leaves it."""
    is_first = torch.tensor(batch.prompt) == 0
    return replace(batch, mask=batch.mask.masked_fill(is_first[:, None], 0))
