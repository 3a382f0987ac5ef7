"""Drawn batches as a trainer of verl has them, and what the core makes of their trajectories."""

import copy
import functools
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf, open_dict
from verl import DataProto

from tests.configs import compose
from verl_ext import Batch, Settings, build, rubric
from verl_ext.core.batch import unit_accuracy
from verl_ext.core.chain import State
from verl_ext.core.rubrics import Criteria, to_columns

WIDTH = 8  # tokens of the longest response
KEYS = {"keys": ["a", "b"], "weights": [1.0, 0.5]}
ITEMS = {"keys": ["a", "rubric"], "weights": [1.0, 0.5], "rubrics": ["rubric"]}
ON_B = {"reward": "b", "at_least": 0.5}
STEPS = ["weighted_sum", "tests.integration.own_steps:BySource", "center"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gdpo": ("gdpo", {"rewards": KEYS}),
    "gdpo, conditioned": ("gdpo", {"rewards": {**KEYS, "conditions": {"b": {"reward": "a", "at_least": 0.5}}}}),
    "gdpo over tokens without the rejected": (
        "gdpo",
        {"rewards": {**KEYS, "rejected": "exclude", "token_scores": True}, "gdpo": {"whiten": "token"}},
    ),
    "gd2po": ("gd2po", {"rewards": KEYS}),
    "drgrpo on the score, with KL": ("drgrpo", {"drgrpo": {"check_loss": False}, "use_kl_in_reward": True}),
    "drgrpo on a process reward": ("drgrpo", {"drgrpo": {"check_loss": False}, "rewards": {"keys": ["process"]}}),
    "dgpo, its accuracy conditioned": (
        "dgpo",
        {
            "rewards": {**KEYS, "accuracy_key": "a", "accuracy_threshold": 0.5, "conditions": {"a": ON_B}},
            "dgpo": {"balance": "sequence"},
        },
    ),
    "hadw on the score, with KL": (
        "hadw",
        {"rewards": {"accuracy_key": "score", "accuracy_threshold": 0.25}, "use_kl_in_reward": True},
    ),
    "hadw on gdpo": (
        "hadw",
        {"rewards": {**KEYS, "accuracy_key": "acc"}, "hadw": {"base": "gdpo", "anchor": "window"}},
    ),
    "gdpo by item without the rejected": ("gdpo", {"rewards": {**ITEMS, "rejected": "exclude"}}),
    "by item, with KL": ("drgrpo", {"drgrpo": {"check_loss": False}, "rewards": ITEMS, "use_kl_in_reward": True}),
    "maxrl": ("maxrl", {"rewards": {"keys": ["acc"]}}),
    "a list": ("compose", {"rewards": KEYS, "compose": {"steps": STEPS}}),
}


@dataclass(frozen=True)
class Drawn:
    """One batch, one entry a row."""

    prompt: list[int]
    """-1: padding."""
    session: list[int]
    output: list[int]
    """The last output of a session carries its score."""
    length: np.ndarray
    """Tokens of the response, of which the mask leaves some out."""
    mask: torch.Tensor
    score: np.ndarray
    kl: np.ndarray
    """Of each token."""
    tokens: np.ndarray
    """Those in the KL term, before a hook leaves some out of the mask."""
    columns: dict[str, np.ndarray]
    """What the reward function returns; NaN is "not scored", and `rubric` text."""
    process: np.ndarray
    """A reward with a value on the first token and one on the last."""
    source: list[str]
    dataset: dict[str, list[Any]] = field(default_factory=dict)
    """More columns of the data set."""
    token_fields: dict[str, np.ndarray] = field(default_factory=dict)
    """More fields of the batch with a value on the last token of each response, by name."""

    @property
    def uids(self) -> list[str]:
        return [f"pad{row}" if prompt < 0 else f"p{prompt}" for row, prompt in enumerate(self.prompt)]

    @property
    def results(self) -> list[dict[str, Any]]:
        """What the reward function returns for each row, on the default trainer; an entry of `...` is missing."""
        columns = {name: values.tolist() for name, values in self.columns.items()}
        rows = [{name: values[row] for name, values in columns.items()} for row in range(len(self.prompt))]
        return [{name: value for name, value in row.items() if value is not ...} for row in rows]

    @property
    def names(self) -> list[str]:
        """The rows' names in verl's queue."""
        return [f"{uid}_{a}_{b}" for uid, a, b in zip(self.uids, self.session, self.output, strict=True)]

    def ends(self, values: np.ndarray) -> torch.Tensor:
        """`[rows, tokens]` with a value on the last token of each response."""
        tokens = torch.zeros(len(self.prompt), WIDTH)
        tokens[torch.arange(len(self.prompt)), torch.from_numpy(self.length) - 1] = torch.from_numpy(values).float()
        return tokens

    @property
    def process_field(self) -> torch.Tensor:
        tokens = self.ends(self.process - 1.0)
        tokens[:, 0] += 1.0
        return tokens

    @property
    def trajectories(self) -> list[list[int]]:
        """The rows of each one, that with the score last."""
        found: dict[tuple[int, int], list[int]] = {}
        for row, (prompt, session) in enumerate(zip(self.prompt, self.session, strict=True)):
            if prompt >= 0:
                found.setdefault((prompt, session), []).append(row)
        return [sorted(rows, key=lambda row: self.output[row]) for rows in found.values()]


@st.composite
def batches(draw: st.DrawFn, *, sessions: bool) -> Drawn:
    """Up to four prompts, uneven, with padding, in any order; with `sessions` some have several outputs.

    Numbers are multiples of 1/64, so that sums are exact in float32.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    named = [
        (prompt, session, output)
        for prompt in range(rng.integers(1, 5))
        for session in range(rng.integers(1, 6))
        for output in range(rng.integers(1, 4) if sessions and rng.random() < 0.3 else 1)
    ]
    rows = rng.permutation(np.array([*named, *[(-1, pad, 0) for pad in range(rng.integers(3))]]))
    size, real = len(rows), rows[:, 0] >= 0
    length = rng.integers(1, WIDTH + 1, size)
    mask = (np.arange(WIDTH) < length[:, None]) & (rng.random((size, WIDTH)) < rng.choice([0.3, 1.0], (size, 1)))
    missing = rng.choice([0.0, 0.0, 0.2])

    def numbers() -> np.ndarray:
        usual = rng.choice([0.0, 1.0, -1.0, 0.5], size)
        return usual if rng.random() < 0.5 else rng.integers(-640, 641, size) / 64

    return Drawn(
        *(rows[:, column].tolist() for column in range(3)),
        length=length,
        mask=torch.from_numpy((mask & real[:, None]).astype(np.int64)),
        tokens=(mask & real[:, None]).sum(axis=1),
        score=numbers(),
        kl=rng.integers(-64, 65, size) / 64,
        columns={key: np.where(rng.random(size) < missing, np.nan, numbers()) for key in "ab"}
        | {"acc": rng.integers(0, 5, size) / 4, "rubric": rubrics(rng, rows[:, 0])},
        process=numbers(),
        source=rng.choice(["letters", "digits"], size).tolist(),
    )


def rubrics(rng: np.random.Generator, prompts: np.ndarray) -> np.ndarray:
    """The text of each row's criteria, up to five, with weights of its prompt."""
    weights = {prompt: rng.choice([-2.0, 1.0, 3.0], rng.integers(1, 6)) for prompt in [-1, *range(4)]}
    texts = [rubric(rng.choice([0.0, 1.0, np.nan], len(weights[at])), weights[at]) for at in prompts.tolist()]
    return np.array(texts, dtype=object)


def mask_first_prompt(data: DataProto) -> DataProto:
    """A hook of `trainer.pre_advantage_hooks`: it runs on the batch right before its advantages."""
    rows = torch.from_numpy(data.non_tensor_batch["uid"] == "p0")
    data.batch["response_mask"] = data.batch["response_mask"].masked_fill(rows[:, None], 0)
    return data


def masked(drawn: Drawn) -> Drawn:
    """What that hook leaves of a batch."""
    return replace(drawn, mask=drawn.mask.masked_fill(torch.tensor(drawn.prompt)[:, None] == 0, 0))


def by_core(name: str, algorithm: dict[str, Any], drawn: Drawn, state: State | None) -> Any:
    """The advantage of each row, and what the chain returned; None where there is nothing to compute."""
    settings = Settings.parse(algorithm)
    chain, own = build(name, settings), settings.rewards
    tokens = drawn.mask.sum(dim=1).numpy()
    kept = [rows for rows in drawn.trajectories if own.rejected == "keep" or tokens[rows].sum() > 0]
    advantages = np.zeros(len(drawn.prompt))
    if not kept:
        return advantages, None
    scored = [rows[-1] for rows in kept]
    uids = [drawn.uids[row] for row in scored]
    named = {**drawn.columns, "process": drawn.process, "score": drawn.score}
    columns: dict[str, Any] = {key: values[scored] for key, values in named.items()}
    columns["rubric"] = Criteria.of("rubric", uids, columns["rubric"])
    accuracy = None
    if chain.needs_accuracy:
        key = own.accuracy_key or "acc"
        accuracy = unit_accuracy(columns[key], uids, key=key, threshold=own.accuracy_threshold)
    keys = own.keys or ("score",)
    batch = Batch.of(
        labels=uids,
        **to_columns(keys, [columns[key] for key in keys]),
        conditions=own.conditions,
        lengths=[tokens[rows].sum() for rows in kept],
        outputs=[len(rows) for rows in kept],
        accuracy=accuracy,
        kl_reward=-(drawn.kl * drawn.tokens)[scored] if settings.kl_in_reward else None,
        fields={"data_source": [drawn.source[row] for row in scored]},
    )
    result = chain(batch, state)
    for rows, advantage in zip(kept, result.advantages, strict=True):
        advantages[rows] = advantage
    return advantages, result


def assert_same(name: str, drawn: Drawn, found: torch.Tensor, metrics: dict[str, Any], wanted: Any) -> None:
    """The trainer's advantages are the core's on each token of the mask and exactly 0 elsewhere; so are the metrics."""
    advantages, result = wanted
    expected = torch.from_numpy(advantages)[:, None] * drawn.mask
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-6)
    assert (found[drawn.mask == 0] == 0).all()
    rejected = sum(not drawn.mask[rows].any() for rows in drawn.trajectories)
    assert metrics.get("advantage/rejected_responses", 0) == rejected
    for short, value in ({} if result is None else result.metrics).items():
        assert abs(metrics[f"{name}/{short}"] - value) <= 1e-9 * max(1.0, abs(value)), short


@functools.cache
def _base() -> DictConfig:
    return compose("data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2")


def config_for(name: str, algorithm: dict[str, Any]) -> Any:
    """verl's whole configuration."""
    config = copy.copy(_base())
    section = copy.deepcopy(_base().algorithm)
    OmegaConf.set_struct(section, False)
    with open_dict(config):
        config.algorithm = OmegaConf.merge(section, algorithm, {"adv_estimator": name})
    return config


def check(runs: Any, case: str, run: list[Drawn], *, hooked: bool = False, **how: Any) -> None:
    """Compare a trainer with the core over the batches of a run; `hooked`: a hook masks the first prompt."""
    name, algorithm = CASES[case]
    trainer, state = runs.made(config_for(name, algorithm)), None
    for drawn in run:
        found, metrics = runs.step(trainer, drawn, hooked=hooked, **how)
        seen = masked(drawn) if hooked else drawn
        wanted = by_core(name, algorithm, seen, state)
        state = state if wanted[1] is None else wanted[1].state
        assert_same(name, seen, found, metrics, wanted)
        assert trainer._verl_ext.state == state
