"""Advantages depend on the trainer's score, on what the configuration names, and on the accuracy; on nothing else."""

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

from tests.configs import compose
from tests.integration.trainers.drawn import WIDTH, Drawn, batches, config_for
from tests.integration.trainers.test_against_core import TRAINERS
from verl_ext.errors import CheckpointError, ConfigurationError, DataError
from verl_ext.registry import ADDED_ESTIMATORS, build
from verl_ext.settings import Settings

NEEDED = {
    "compose": {"compose": {"steps": ["weighted_sum", "center", "scale_by_std"]}},
    "drgrpo": {"drgrpo": {"check_loss": False}},
    "saw": {"saw": {"min_values": [-10.0, -10.0]}},
}
"""The settings without which an estimator cannot be built."""
NAMED = {"keys": ["a", "b"], "accuracy_key": "b", "accuracy_threshold": 0.0}
ALONE = {"accuracy_threshold": 0.0}
"""Without keys: the score, and an accuracy that is not named."""
LOGS = (None, "all", "keys", "none")


def algorithm_of(name: str, *, named: bool, log: str | None) -> dict[str, Any] | None:
    """The section `algorithm` of a run; None for an estimator that cannot do without keys."""
    own = NEEDED.get(name, {})
    if not named and build(name, Settings.parse(own | {"rewards": NAMED})).per_reward:
        return None
    return own | {"rewards": (NAMED if named else ALONE) | {"log": log}}


def numbers(rng: np.random.Generator, size: int) -> np.ndarray:
    return rng.integers(-64, 65, size) / 64


def with_other_fields(drawn: Drawn, rng: np.random.Generator) -> Drawn:
    """The batch with fields that decide nothing: drawn anew, left out, or no numbers."""
    size = len(drawn.prompt)
    odd = np.array(["text", None, np.nan, 1.0, [1, 2]], dtype=object)
    unnamed = {"score": numbers(rng, size), "note": odd[rng.integers(0, len(odd), size)]}
    if rng.random() < 0.5:
        del unnamed["score"]
    dataset = {name: numbers(rng, size).tolist() for name in ("score", "acc", "level") if rng.random() < 0.7}
    tokens = {f"token_level_scores_{name}": numbers(rng, size) for name in ("acc", "score") if rng.random() < 0.5}
    return replace(drawn, columns=drawn.columns | unnamed, dataset=dataset, token_fields=tokens)


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("name", ADDED_ESTIMATORS)
@settings(max_examples=5, phases=[Phase.generate])
@given(data=st.data(), seed=st.integers(0, 2**32 - 1), named=st.booleans(), logs=st.permutations(LOGS))
def test_no_other_field_and_no_log_changes_an_advantage(
    trainer: str, name: str, data: st.DataObject, seed: int, named: bool, logs: list[str | None]
) -> None:
    """The function's `acc` is there, so that neither its `score` nor the data set decides about the accuracy."""
    runs, rng = import_module(f"tests.integration.trainers.{trainer}_runs"), np.random.default_rng(seed)
    drawn = data.draw(batches(sessions=runs.SESSIONS))
    size = len(drawn.prompt)
    drawn = replace(drawn, score=np.abs(drawn.score), columns={key: np.abs(numbers(rng, size)) for key in "ab"})
    drawn = replace(drawn, columns=drawn.columns | {"acc": rng.integers(0, 2, size).astype(float)})
    found = []
    for log, other in zip(logs[:2], (drawn, with_other_fields(drawn, rng)), strict=True):
        algorithm = algorithm_of(name, named=named, log=log)
        if algorithm is None:
            return
        made = runs.made(config_for(name, algorithm))
        advantages, _ = runs.step(made, other, hooked=False)
        found.append((advantages.tolist(), made._verl_ext.state))
    assert found[0] == found[1]


def group(score: list[float], columns: dict[str, list[Any]], **more: Any) -> Drawn:
    """One prompt with a response for each score."""
    size = len(score)
    ones = np.ones(size)
    return Drawn(
        prompt=[0] * size,
        session=list(range(size)),
        output=[0] * size,
        length=np.full(size, 2),
        mask=(torch.arange(WIDTH) < 2).long().repeat(size, 1),
        score=np.array(score),
        kl=0 * ones,
        tokens=2 * ones,
        columns={key: np.array(values, dtype=object) for key, values in columns.items()},
        process=ones,
        source=["letters"] * size,
        **more,
    )


def advantages_of(
    trainer: str, name: str, rewards: dict[str, Any], drawn: Drawn
) -> tuple[list[float], dict[str, float]]:
    """The advantage of each response, and the metrics."""
    runs = import_module(f"tests.integration.trainers.{trainer}_runs")
    algorithm = NEEDED.get(name, {}) | ({"rewards": rewards} if rewards else {})
    found, metrics = runs.step(runs.made(config_for(name, algorithm)), drawn, hooked=False)
    return found[:, 0].tolist(), metrics


FOUR = [1.0, 0.0, 1.0, 1.0]
TIMED_OUT = {"score": [1.0, ..., 1.0, 1.0], "timeout": [..., True, ..., ...], "acc": [..., 0.0, ..., ...]}
CENTERED = [0.25, -0.75, 0.25, 0.25]
LISTS = {"weighted_grpo", "liteppo", "fgrpo", "maxrl", "hadw", "dgpo", "compose"}


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("log", LOGS)
def test_without_keys_the_reward_is_the_trainers_score(trainer: str, log: str | None) -> None:
    """The function returns 1 for each response, and the reward manager subtracts 1 from the second."""
    drawn = group(FOUR, {"score": [1.0] * 4, "acc": [1.0] * 4})
    found, metrics = advantages_of(trainer, "drgrpo", {"log": log}, drawn)
    assert found == CENTERED
    assert metrics.get("reward/score/mean") == (None if log == "none" else 0.75)


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("name", sorted(LISTS))
def test_no_estimator_takes_the_functions_score_for_the_trainers(trainer: str, name: str) -> None:
    """Each of these gives 0 where nothing varies."""
    drawn = group(FOUR, {"score": [1.0] * 4, "acc": [0.5] * 4})
    found, _ = advantages_of(trainer, name, {}, drawn)
    assert found[1] < 0 < found[0]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_verls_dapo_manager_and_its_penalty_decide_as_with_verls_grpo(trainer: str) -> None:
    """Four responses of 2, 4, 2 and 2 tokens are right; one token above 3 costs 1."""
    config = compose(
        "reward.reward_manager.name=dapo",
        "+reward.reward_kwargs.max_resp_len=4",
        "+reward.reward_kwargs.overlong_buffer_cfg={enable: true, len: 1, penalty_factor: 1.0, log: false}",
        f"reward.custom_reward_function.path={__file__}",
    )
    manager = load_reward_manager(config, SimpleNamespace(decode=lambda *_tokens, **_options: "right"))
    results = [manager.loop.run_until_complete(manager.run_single(response_of(length))) for length in (2, 4, 2, 2)]
    infos = [result["reward_extra_info"] for result in results]
    drawn = group([result["reward_score"] for result in results], {key: [i[key] for i in infos] for key in infos[0]})
    assert [info["score"] for info in infos] == [1.0] * 4
    found, metrics = advantages_of(trainer, "drgrpo", {}, drawn)
    assert found == CENTERED
    assert metrics["reward/score/min"] == 0.0


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
    """The reward function of the test above: every response is right."""
    return {"score": 1.0, "acc": 1.0}


def response_of(tokens: int) -> DataProto:
    """A response of so many tokens, as an agent loop gives it to a reward manager."""
    ids = torch.zeros((1, 4), dtype=torch.long)
    mask = torch.cat([torch.ones(1, 4).long(), (torch.arange(4) < tokens).long()[None]], dim=1)
    fields = {"data_source": "letters", "reward_model": {"ground_truth": ""}, "extra_info": {}}
    return DataProto(
        batch=TensorDict({"prompts": ids, "responses": ids, "attention_mask": mask}, [1]),
        non_tensor_batch={name: np.array([value, None], dtype=object)[:1] for name, value in fields.items()},
    )


@pytest.mark.parametrize("rewards", [{}, {"keys": ["score"]}])
def test_a_response_whose_scoring_timed_out_has_the_trainers_score(rewards: dict[str, Any]) -> None:
    """verl's manager `rate_limited` gives it a score of 0, `timeout`, an `acc` of 0, and no `score`."""
    found, _ = advantages_of("default", "drgrpo", rewards, group(FOUR, TIMED_OUT))
    assert found == CENTERED


def test_the_acc_of_a_response_whose_scoring_timed_out_is_not_taken_for_the_functions() -> None:
    """The function returns a `score` alone, which is the accuracy of the others; here it is 0."""
    _, metrics = advantages_of("default", "hadw", {}, group(FOUR, TIMED_OUT))
    assert metrics["hadw/capability_posterior"] == 0.75


def test_an_accuracy_that_is_not_named_stays_that_of_the_first_batch() -> None:
    from tests.integration.trainers import default_runs

    trainer = default_runs.made(config_for("dgpo", {}))
    default_runs.step(trainer, group(FOUR, {"score": FOUR, "acc": FOUR}), hooked=False)
    with pytest.raises(CheckpointError):
        default_runs.step(trainer, group(FOUR, {"score": FOUR}), hooked=False)


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("rewards", [{}, {"keys": ["score"]}])
def test_a_column_score_of_the_data_set_is_never_the_reward(trainer: str, rewards: dict[str, Any]) -> None:
    drawn = group(FOUR, {"acc": FOUR}, dataset={"score": [0.0, 5.0, 0.0, 0.0]})
    assert advantages_of(trainer, "drgrpo", rewards, drawn)[0] == CENTERED


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_key_score_is_what_the_reward_function_returned(trainer: str) -> None:
    drawn = group([1.0] * 4, {"score": FOUR, "acc": [1.0] * 4})
    found, metrics = advantages_of(trainer, "drgrpo", {"keys": ["score"]}, drawn)
    assert found == CENTERED
    assert metrics["reward/score/mean"] == 0.75


ACCURACIES: dict[str, tuple[dict[str, Any], list[str], float]] = {
    "the function's acc": ({}, ["acc", "score", "b"], 0.25),
    "the function's acc, before a single key": ({"keys": ["b"]}, ["acc", "score", "b"], 0.25),
    "a single key": ({"keys": ["b"]}, ["score", "b"], 0.5),
    "the function's score": ({}, ["score", "b"], 0.75),
    "the trainer's score": ({}, ["b"], 1.0),
    "the named one": ({"accuracy_key": "b"}, ["acc", "score", "b"], 0.5),
}
RETURNED = {"acc": [0.0, 1.0, 0.0, 0.0], "b": [1.0, 1.0, 0.0, 0.0], "score": [1.0, 1.0, 1.0, 0.0]}


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("log", ["all", "none"])
@pytest.mark.parametrize("case", ACCURACIES)
def test_which_accuracy_counts_where_none_is_named(trainer: str, log: str, case: str) -> None:
    """The first batch sets the anchor of hadw to the mean accuracy. A data set's column is none."""
    rewards, names, mean = ACCURACIES[case]
    dataset = {name: [0.0] * 4 for name in ("acc", "score") if name not in names}
    drawn = group([1.0] * 4, {name: RETURNED[name] for name in names}, dataset=dataset)
    _, metrics = advantages_of(trainer, "hadw", rewards | {"log": log}, drawn)
    assert metrics["hadw/capability_posterior"] == mean


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("name", ["gdpo", "grpo"])
def test_with_keys_the_curve_of_the_score_is_that_of_the_trainers(trainer: str, name: str) -> None:
    drawn = group(FOUR, {"score": [5.0] * 4, "a": FOUR, "b": FOUR})
    _, metrics = advantages_of(trainer, name, {"keys": ["a", "b"], "log": "all"}, drawn)
    assert metrics["reward/score/mean"] == 0.75
    assert metrics["reward/a/mean"] == 0.75


def test_a_trainer_that_does_not_say_what_the_function_returned_must_name_the_accuracy() -> None:
    """A `RayPPOTrainer` with a `fit` of its own may have lost verl's list of the reward function's keys."""
    from tests.integration.trainers import ray_runs

    drawn = group(FOUR, {"acc": FOUR})
    for rewards, error in (({}, ConfigurationError), ({"accuracy_key": "acc"}, None)):
        trainer = ray_runs.made(config_for("hadw", {"rewards": rewards}))
        data = ray_runs.batch_of(trainer, drawn)
        del data.meta_info["reward_extra_keys"]
        if error is None:
            trainer.advantages(data)
        else:
            with pytest.raises(error):
                trainer.advantages(data)


def test_an_accuracy_that_only_some_results_have_is_an_error() -> None:
    drawn = group(FOUR, {"acc": [1.0, ..., 0.0, 0.0], "score": FOUR})
    with pytest.raises(DataError):
        advantages_of("default", "hadw", {}, drawn)
