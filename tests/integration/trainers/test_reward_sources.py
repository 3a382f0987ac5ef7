"""Advantages depend only on the trainer's score, on the rewards that the configuration names, and on the accuracy."""

from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.ppo.reward import load_reward_manager

from tests.calls import object_array
from tests.configs import compose
from tests.integration.trainers.core_advantages import TRAINERS, config_for
from tests.integration.trainers.random_batches import random_batches
from tests.integration.trainers.trainer_batches import MISSING, TrainerBatch, group_of
from verl_ext.errors import CheckpointError, ConfigurationError, DataError
from verl_ext.registry import ADDED_ESTIMATORS, build
from verl_ext.settings import Settings

REQUIRED_SETTINGS = {
    "compose": {"compose": {"steps": ["weighted_sum", "center", "scale_by_std"]}},
    "drgrpo": {"drgrpo": {"check_loss": False}},
    "saw": {"saw": {"min_values": [-10.0, -10.0]}},
}
"""Settings without which an estimator cannot be built."""
NAMED_REWARDS = {"keys": ["a", "b"], "accuracy_key": "b", "accuracy_threshold": 0.0}
SCORE_ALONE = {"accuracy_threshold": 0.0}
"""Without keys, the reward is the score, and the accuracy is not named."""
LOGS = (None, "all", "keys", "none")


def algorithm_of(name: str, *, named: bool, log: str | None) -> dict[str, Any] | None:
    """Return the section `algorithm` of a run, or None for an estimator that requires keys if `named` is False."""
    required = REQUIRED_SETTINGS.get(name, {})
    estimator = build(name, Settings.parse(required | {"rewards": NAMED_REWARDS}))
    if estimator.per_reward and not named:
        return None
    rewards = NAMED_REWARDS if named else SCORE_ALONE
    return required | {"rewards": rewards | {"log": log}}


def random_rewards(rng: np.random.Generator, size: int) -> np.ndarray:
    return rng.integers(-64, 65, size) / 64


def random_batch_with_accuracy(batch: TrainerBatch, rng: np.random.Generator) -> TrainerBatch:
    """Return the batch with the random rewards `a`, `b` and `acc` only.

    The reward function returns `acc`. So its `score` and the data set do not determine the accuracy.
    """
    size = len(batch.prompt)
    columns = {
        "a": np.abs(random_rewards(rng, size)),
        "b": np.abs(random_rewards(rng, size)),
        "acc": rng.integers(0, 2, size).astype(float),
    }
    return replace(batch, score=np.abs(batch.score), columns=columns)


def with_other_fields(batch: TrainerBatch, rng: np.random.Generator) -> TrainerBatch:
    """Return the batch with random fields that determine no advantage. Some fields are not numbers."""
    size = len(batch.prompt)
    unusual_values = object_array(["text", None, np.nan, 1.0, [1, 2]])
    columns = batch.columns | {
        "score": random_rewards(rng, size),
        "note": unusual_values[rng.integers(0, len(unusual_values), size)],
    }
    if rng.random() < 0.5:
        del columns["score"]
    dataset = {}
    for name in ("score", "acc", "level"):
        if rng.random() < 0.7:
            dataset[name] = random_rewards(rng, size).tolist()
    token_fields = {}
    for name in ("acc", "score"):
        if rng.random() < 0.5:
            token_fields[f"token_level_scores_{name}"] = random_rewards(rng, size)
    return replace(batch, columns=columns, dataset=dataset, token_fields=token_fields)


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("name", ADDED_ESTIMATORS)
@settings(max_examples=5, phases=[Phase.generate])
@given(data=st.data(), seed=st.integers(0, 2**32 - 1), named=st.booleans(), logs=st.permutations(LOGS))
def test_other_fields_and_the_log_setting_change_no_advantage(
    trainer: str, name: str, data: st.DataObject, seed: int, named: bool, logs: list[str | None]
) -> None:
    runs = import_module(f"tests.integration.trainers.{trainer}_runs")
    rng = np.random.default_rng(seed)
    batch = random_batch_with_accuracy(data.draw(random_batches(sessions=runs.HAS_SESSIONS)), rng)
    results = []
    for log, compared_batch in ((logs[0], batch), (logs[1], with_other_fields(batch, rng))):
        algorithm = algorithm_of(name, named=named, log=log)
        if algorithm is None:
            return
        run = runs.make_trainer(config_for(name, algorithm))
        advantages, _ = runs.run_step(run, compared_batch, hooked=False)
        results.append((advantages.tolist(), run._verl_ext.state))
    assert results[0] == results[1]


def advantages_of(
    trainer: str, name: str, rewards: dict[str, Any], batch: TrainerBatch
) -> tuple[list[float], dict[str, float]]:
    """Return the advantage of each response, and the metrics."""
    runs = import_module(f"tests.integration.trainers.{trainer}_runs")
    algorithm = dict(REQUIRED_SETTINGS.get(name, {}))
    if rewards:
        algorithm["rewards"] = rewards
    run = runs.make_trainer(config_for(name, algorithm))
    advantages, metrics = runs.run_step(run, batch, hooked=False)
    return advantages[:, 0].tolist(), metrics


SCORES = [1.0, 0.0, 1.0, 1.0]
CENTERED_SCORES = [0.25, -0.75, 0.25, 0.25]
ONES = [1.0] * 4
SECOND_TIMED_OUT = {
    "score": [1.0, MISSING, 1.0, 1.0],
    "timeout": [MISSING, True, MISSING, MISSING],
    "acc": [MISSING, 0.0, MISSING, MISSING],
}
SINGLE_REWARD_ESTIMATORS = ["compose", "dgpo", "fgrpo", "hadw", "liteppo", "maxrl", "weighted_grpo"]


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("log", LOGS)
def test_without_keys_the_reward_is_the_trainers_score(trainer: str, log: str | None) -> None:
    """The function returns 1 for each response, and the reward manager subtracts 1 from the second."""
    batch = group_of(SCORES, {"score": ONES, "acc": ONES})
    advantages, metrics = advantages_of(trainer, "drgrpo", {"log": log}, batch)
    assert advantages == CENTERED_SCORES
    assert metrics.get("reward/score/mean") == (None if log == "none" else 0.75)


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("name", SINGLE_REWARD_ESTIMATORS)
def test_without_keys_an_estimator_ignores_the_functions_score(trainer: str, name: str) -> None:
    """With the function's constant score, the advantages of these estimators would be 0."""
    batch = group_of(SCORES, {"score": ONES, "acc": [0.5] * 4})
    advantages, _ = advantages_of(trainer, name, {}, batch)
    assert advantages[1] < 0 < advantages[0]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_overlong_penalty_of_verls_dapo_manager_is_in_the_score(trainer: str) -> None:
    """Four correct responses have 2, 4, 2 and 2 tokens. The token beyond 3 costs 1, as with verl's grpo."""
    config = compose(
        "reward.reward_manager.name=dapo",
        "+reward.reward_kwargs.max_resp_len=4",
        "+reward.reward_kwargs.overlong_buffer_cfg={enable: true, len: 1, penalty_factor: 1.0, log: false}",
        f"reward.custom_reward_function.path={__file__}",
    )
    tokenizer = SimpleNamespace(decode=lambda *_tokens, **_options: "correct")
    manager = load_reward_manager(config, tokenizer)
    scores = []
    columns: dict[str, list[Any]] = {}
    for tokens in (2, 4, 2, 2):
        result = manager.loop.run_until_complete(manager.run_single(response_of(tokens)))
        scores.append(result["reward_score"])
        for name, value in result["reward_extra_info"].items():
            columns.setdefault(name, []).append(value)
    assert columns["score"] == ONES
    advantages, metrics = advantages_of(trainer, "drgrpo", {}, group_of(scores, columns))
    assert advantages == CENTERED_SCORES
    assert metrics["reward/score/min"] == 0.0


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
    """Reward every response as correct. The test above has this file as its reward function."""
    return {"score": 1.0, "acc": 1.0}


def response_of(tokens: int) -> DataProto:
    """Return a response with a number of tokens, as an agent loop gives it to a reward manager."""
    ids = torch.zeros((1, 4), dtype=torch.long)
    prompt_mask = torch.ones(1, 4, dtype=torch.long)
    response_mask = (torch.arange(4) < tokens).long()[None]
    tensors = {
        "prompts": ids,
        "responses": ids,
        "attention_mask": torch.cat([prompt_mask, response_mask], dim=1),
    }
    return DataProto(
        batch=TensorDict(tensors, [1]),
        non_tensor_batch={
            "data_source": object_array(["letters"]),
            "reward_model": object_array([{"ground_truth": ""}]),
            "extra_info": object_array([{}]),
        },
    )


@pytest.mark.parametrize("rewards", [{}, {"keys": ["score"]}])
def test_a_response_whose_scoring_timed_out_has_the_trainers_score(rewards: dict[str, Any]) -> None:
    """verl's manager `rate_limited` gives such a response a score of 0, `timeout`, an `acc` of 0, and no `score`."""
    advantages, _ = advantages_of("default", "drgrpo", rewards, group_of(SCORES, SECOND_TIMED_OUT))
    assert advantages == CENTERED_SCORES


def test_the_acc_of_a_timed_out_response_is_not_the_functions_accuracy() -> None:
    """The function returns only `score`, which is the accuracy of the other responses. Here the accuracy is 0."""
    _, metrics = advantages_of("default", "hadw", {}, group_of(SCORES, SECOND_TIMED_OUT))
    assert metrics["hadw/capability_posterior"] == 0.75


def test_an_unnamed_accuracy_stays_that_of_the_first_batch() -> None:
    from tests.integration.trainers import default_runs

    trainer = default_runs.make_trainer(config_for("dgpo", {}))
    default_runs.run_step(trainer, group_of(SCORES, {"score": SCORES, "acc": SCORES}), hooked=False)
    batch_without_acc = group_of(SCORES, {"score": SCORES})
    with pytest.raises(CheckpointError):
        default_runs.run_step(trainer, batch_without_acc, hooked=False)


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("rewards", [{}, {"keys": ["score"]}])
def test_a_data_set_column_called_score_is_not_the_reward(trainer: str, rewards: dict[str, Any]) -> None:
    batch = group_of(SCORES, {"acc": SCORES}, dataset={"score": [0.0, 5.0, 0.0, 0.0]})
    advantages, _ = advantages_of(trainer, "drgrpo", rewards, batch)
    assert advantages == CENTERED_SCORES


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_key_score_is_what_the_reward_function_returned(trainer: str) -> None:
    batch = group_of(ONES, {"score": SCORES, "acc": ONES})
    advantages, metrics = advantages_of(trainer, "drgrpo", {"keys": ["score"]}, batch)
    assert advantages == CENTERED_SCORES
    assert metrics["reward/score/mean"] == 0.75


RETURNED = {"acc": [0.0, 1.0, 0.0, 0.0], "b": [1.0, 1.0, 0.0, 0.0], "score": [1.0, 1.0, 1.0, 0.0]}
ACCURACIES: dict[str, tuple[dict[str, Any], list[str], float]] = {
    "the function's acc": ({}, ["acc", "score", "b"], 0.25),
    "the function's acc, before a single key": ({"keys": ["b"]}, ["acc", "score", "b"], 0.25),
    "a single key": ({"keys": ["b"]}, ["score", "b"], 0.5),
    "the function's score": ({}, ["score", "b"], 0.75),
    "the trainer's score": ({}, ["b"], 1.0),
    "the named key": ({"accuracy_key": "b"}, ["acc", "score", "b"], 0.5),
}
"""The section `rewards`, the names of `RETURNED` that the function returns, and the mean of the accuracy."""


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("log", ["all", "none"])
@pytest.mark.parametrize("case", ACCURACIES)
def test_which_field_is_the_accuracy(trainer: str, log: str, case: str) -> None:
    """The first batch sets the anchor of hadw to the mean accuracy. A column of the data set is no accuracy."""
    rewards, returned_names, mean_accuracy = ACCURACIES[case]
    columns = {name: RETURNED[name] for name in returned_names}
    dataset = {name: [0.0] * 4 for name in ("acc", "score") if name not in returned_names}
    batch = group_of(ONES, columns, dataset=dataset)
    _, metrics = advantages_of(trainer, "hadw", rewards | {"log": log}, batch)
    assert metrics["hadw/capability_posterior"] == mean_accuracy


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("name", ["gdpo", "grpo"])
def test_with_keys_the_curve_of_the_score_is_the_trainers_score(trainer: str, name: str) -> None:
    batch = group_of(SCORES, {"score": [5.0] * 4, "a": SCORES, "b": SCORES})
    _, metrics = advantages_of(trainer, name, {"keys": ["a", "b"], "log": "all"}, batch)
    assert metrics["reward/score/mean"] == 0.75
    assert metrics["reward/a/mean"] == 0.75


def advantages_without_reward_keys(rewards: dict[str, Any]) -> DataProto:
    """Compute advantages with hadw from a batch that does not list the keys of the reward function.

    A `RayPPOTrainer` with its own `fit` may have lost verl's list.
    """
    from tests.integration.trainers import ray_runs

    trainer = ray_runs.make_trainer(config_for("hadw", {"rewards": rewards}))
    data = ray_runs.data_proto_of(trainer, group_of(SCORES, {"acc": SCORES}))
    del data.meta_info["reward_extra_keys"]
    return trainer.advantages(data)


def test_without_verls_list_of_reward_keys_the_accuracy_must_be_named() -> None:
    with pytest.raises(ConfigurationError):
        advantages_without_reward_keys({})
    advantages_without_reward_keys({"accuracy_key": "acc"})


def test_an_accuracy_that_only_some_results_have_is_an_error() -> None:
    batch = group_of(SCORES, {"acc": [1.0, MISSING, 0.0, 0.0], "score": SCORES})
    with pytest.raises(DataError):
        advantages_of("default", "hadw", {}, batch)
