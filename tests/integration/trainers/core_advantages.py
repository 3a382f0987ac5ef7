"""The advantages that the core computes from the batch of a trainer, and the comparison with the trainer's."""

import copy
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf, open_dict

from tests.configs import compose
from tests.integration.conftest import has_default_trainer
from tests.integration.trainers.trainer_batches import TrainerBatch, with_first_prompt_masked
from verl_ext import Batch, Settings, build
from verl_ext.core.batch import unit_accuracy
from verl_ext.core.chain import Result, State
from verl_ext.core.rubrics import Criteria, to_columns

TRAINERS = ("ray", "default") if has_default_trainer() else ("ray",)
"""Trainers of the installed verl. Each has a module `{trainer}_runs`, which makes it and computes its advantages."""

TWO_KEYS = {"keys": ["a", "b"], "weights": [1.0, 0.5]}
WITH_RUBRIC = {"keys": ["a", "rubric"], "weights": [1.0, 0.5], "rubrics": ["rubric"]}
A_IF_B = {"a": {"reward": "b", "at_least": 0.5}}
B_IF_A = {"b": {"reward": "a", "at_least": 0.5}}
ANY_LOSS = {"check_loss": False}
CUSTOM_STEPS = ["weighted_sum", "tests.integration.custom_steps:BySource", "center"]
CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "gdpo": ("gdpo", {"rewards": TWO_KEYS}),
    "gdpo, conditioned": ("gdpo", {"rewards": {**TWO_KEYS, "conditions": B_IF_A}}),
    "gdpo whitened over tokens, rejected responses excluded": (
        "gdpo",
        {"rewards": {**TWO_KEYS, "rejected": "exclude", "token_scores": True}, "gdpo": {"whiten": "token"}},
    ),
    "gd2po": ("gd2po", {"rewards": TWO_KEYS}),
    "drgrpo on the score, with KL": ("drgrpo", {"drgrpo": ANY_LOSS, "use_kl_in_reward": True}),
    "drgrpo on a process reward": ("drgrpo", {"drgrpo": ANY_LOSS, "rewards": {"keys": ["process"]}}),
    "dgpo with a conditioned accuracy": (
        "dgpo",
        {
            "rewards": {**TWO_KEYS, "accuracy_key": "a", "accuracy_threshold": 0.5, "conditions": A_IF_B},
            "dgpo": {"balance": "sequence"},
        },
    ),
    "hadw on the score, with KL": (
        "hadw",
        {"rewards": {"accuracy_key": "score", "accuracy_threshold": 0.25}, "use_kl_in_reward": True},
    ),
    "hadw on gdpo": (
        "hadw",
        {"rewards": {**TWO_KEYS, "accuracy_key": "acc"}, "hadw": {"base": "gdpo", "anchor": "window"}},
    ),
    "gdpo with a rubric, rejected responses excluded": ("gdpo", {"rewards": {**WITH_RUBRIC, "rejected": "exclude"}}),
    "drgrpo with a rubric and KL": ("drgrpo", {"drgrpo": ANY_LOSS, "rewards": WITH_RUBRIC, "use_kl_in_reward": True}),
    "maxrl": ("maxrl", {"rewards": {"keys": ["acc"]}}),
    "a list with a custom step": ("compose", {"rewards": TWO_KEYS, "compose": {"steps": CUSTOM_STEPS}}),
}
"""The estimator and the section `algorithm` of each case."""


def advantages_of_core(
    name: str, algorithm: dict[str, Any], batch: TrainerBatch, state: State | None
) -> tuple[np.ndarray, Result | None]:
    """Return the advantage of each row and the result of the chain, which is None if no trajectory counts."""
    settings = Settings.parse(algorithm)
    chain = build(name, settings)
    tokens = batch.mask.sum(dim=1).numpy()
    trajectories = [
        rows for rows in batch.trajectories if settings.rewards.rejected == "keep" or tokens[rows].sum() > 0
    ]
    advantages = np.zeros(len(batch.prompt))
    if not trajectories:
        return advantages, None
    result = chain(core_batch(batch, trajectories, settings, needs_accuracy=chain.needs_accuracy), state)
    for rows, advantage in zip(trajectories, result.advantages, strict=True):
        advantages[rows] = advantage
    return advantages, result


def core_batch(
    batch: TrainerBatch, trajectories: list[list[int]], settings: Settings, *, needs_accuracy: bool
) -> Batch:
    """Return the batch of the core with one row per trajectory."""
    scored_rows = [rows[-1] for rows in trajectories]
    uids = [batch.uids[row] for row in scored_rows]
    columns: dict[str, Any] = {"process": batch.process[scored_rows], "score": batch.score[scored_rows]}
    for name, column in batch.columns.items():
        columns[name] = column[scored_rows]
    columns["rubric"] = Criteria.of("rubric", uids, columns["rubric"])
    accuracy = None
    if needs_accuracy:
        accuracy_key = settings.rewards.accuracy_key or "acc"
        threshold = settings.rewards.accuracy_threshold
        accuracy = unit_accuracy(columns[accuracy_key], uids, key=accuracy_key, threshold=threshold)
    keys = settings.rewards.keys or ("score",)
    tokens = batch.mask.sum(dim=1).numpy()
    kl_of_row = -batch.kl * batch.kl_tokens
    return Batch.of(
        labels=uids,
        **to_columns(keys, [columns[key] for key in keys]),
        conditions=settings.rewards.conditions,
        lengths=[tokens[rows].sum() for rows in trajectories],
        outputs=[len(rows) for rows in trajectories],
        accuracy=accuracy,
        kl_reward=kl_of_row[scored_rows] if settings.kl_in_reward else None,
        fields={"data_source": [batch.source[row] for row in scored_rows]},
    )


def assert_same_advantages(advantages: torch.Tensor, batch: TrainerBatch, expected_of_row: np.ndarray) -> None:
    """Assert that each row has its advantage on every token of the mask and exactly 0 on the others."""
    expected = torch.from_numpy(expected_of_row)[:, None] * batch.mask
    torch.testing.assert_close(advantages.double(), expected, atol=1e-5, rtol=1e-6)
    assert (advantages[batch.mask == 0] == 0).all()


def assert_same_metrics(name: str, metrics: Mapping[str, Any], batch: TrainerBatch, result: Result | None) -> None:
    """Assert that the trainer logged the metrics of the chain and the number of rejected responses."""
    rejected = [rows for rows in batch.trajectories if not batch.mask[rows].any()]
    assert metrics.get("advantage/rejected_responses", 0) == len(rejected)
    if result is None:
        return
    for short_name, value in result.metrics.items():
        tolerance = 1e-9 * max(1.0, abs(value))
        assert abs(metrics[f"{name}/{short_name}"] - value) <= tolerance, short_name


@functools.cache
def _base_config() -> DictConfig:
    return compose("data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2")


def config_for(name: str, algorithm: dict[str, Any]) -> Any:
    """Return verl's whole configuration with an estimator and entries of the section `algorithm`."""
    config = copy.copy(_base_config())
    section = copy.deepcopy(_base_config().algorithm)
    OmegaConf.set_struct(section, False)
    with open_dict(config):
        config.algorithm = OmegaConf.merge(section, algorithm, {"adv_estimator": name})
    return config


def assert_trainer_equals_core(
    runs: Any, case: str, batches: list[TrainerBatch], *, hooked: bool = False, **options: Any
) -> None:
    """Compare a trainer with the core over the batches of a run. With `hooked`, a hook masks the first prompt."""
    name, algorithm = CONFIGURATIONS[case]
    trainer = runs.make_trainer(config_for(name, algorithm))
    state = None
    for batch in batches:
        advantages, metrics = runs.run_step(trainer, batch, hooked=hooked, **options)
        batch_of_core = with_first_prompt_masked(batch) if hooked else batch
        expected, result = advantages_of_core(name, algorithm, batch_of_core, state)
        if result is not None:
            state = result.state
        assert_same_advantages(advantages, batch_of_core, expected)
        assert_same_metrics(name, metrics, batch_of_core, result)
        assert trainer._verl_ext.state == state
