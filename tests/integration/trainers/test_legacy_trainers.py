"""The legacy trainer and the experimental ones: verl's own methods on instances without workers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from verl import DataProto
from verl.experimental.separation.ray_trainer import SeparateRayPPOTrainer
from verl.trainer.ppo import core_algos, ray_trainer
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

from tests import fresh
from tests.integration.configs import compose
from verl_ext.errors import CheckpointError, ConfigurationError, IntegrationError
from verl_ext.integration.guards import run_lock
from verl_ext.integration.trainers.attach import run_of

ACCURACY = [1, 0, 0, 0, 1, 1, 1, 0]
FORMAT = [1, 1, 0, 0, 1, 0, 1, 1]
LENGTHS = [4, 2, 3, 1, 2, 2, 5, 3]
UIDS = ["A"] * 4 + ["B"] * 4
KEYS = "+algorithm.rewards.keys=[acc,format]"
HADW = ("algorithm.adv_estimator=hadw", "+algorithm.rewards.keys=[acc]")
# Groups A and B of the specification's worked example.
DRGRPO_ON_ACC = [0.75, -0.25, -0.25, -0.25, 0.25, 0.25, 0.25, -0.75]
GDPO = [1.705880, 0.263915, -0.984898, -0.984898, 0.720983, -0.720983, 0.720983, -0.720983]


def batch() -> DataProto:
    """Two groups of four responses of up to five tokens; the score is accuracy + format."""
    fields = {"acc": np.array(ACCURACY, dtype=float), "format": np.array(FORMAT, dtype=object)}
    return data_of(UIDS, LENGTHS, np.add(ACCURACY, FORMAT), fields)


def data_of(uids: Any, lengths: Any, scores: Any, fields: dict[str, Any]) -> DataProto:
    """A batch of responses of up to five tokens, the score on the last one, as verl's trainers pass it."""
    size = len(lengths)
    mask = (torch.arange(5) < torch.as_tensor(lengths)[:, None]).long()
    token_level = torch.zeros(size, 5)
    token_level[torch.arange(size), torch.as_tensor(lengths) - 1] = torch.as_tensor(scores).float()
    return DataProto.from_dict(
        tensors={
            "response_mask": mask,
            "token_level_scores": token_level,
            "token_level_rewards": token_level.clone(),
            "prompts": torch.ones(size, 2, dtype=torch.long),
            "responses": torch.ones(size, 5, dtype=torch.long),
            "attention_mask": torch.cat([torch.ones(size, 2, dtype=torch.long), mask], dim=1),
        },
        non_tensors={"uid": np.array(uids, dtype=object), **fields},
    )


def per_row(data: DataProto) -> list[float]:
    """The advantage of each response, asserting that it is one number on its tokens and 0 behind them."""
    advantages, mask = data.batch["advantages"], data.batch["response_mask"]
    torch.testing.assert_close(advantages, advantages[:, :1] * mask, atol=0, rtol=0)
    return advantages[:, 0].tolist()


class OwnFit(RayPPOTrainer):
    """A recipe's trainer: its own `__init__` and `fit`, neither of which calls verl's."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def fit(self, steps: int) -> list[tuple[DataProto, dict[str, Any]]]:
        done = []
        for _ in range(steps):
            data = ray_trainer.compute_advantage(
                batch(), adv_estimator=self.config.algorithm.adv_estimator, config=self.config.algorithm
            )
            done.append((data, ray_trainer.compute_data_metrics(data, use_critic=False)))
        return done


def own_fit(*overrides: str, steps: int = 1) -> tuple[OwnFit, list[tuple[DataProto, dict[str, Any]]]]:
    trainer = OwnFit(compose(*overrides))
    return trainer, trainer.fit(steps)


def test_components_reach_gdpo_and_numbers_the_step_s_metrics() -> None:
    _, [(data, metrics)] = own_fit("algorithm.adv_estimator=gdpo", KEYS, "+algorithm.gdpo.epsilon=1e-4")
    assert per_row(data) == pytest.approx(GDPO, abs=1e-5)
    assert metrics["reward/acc/mean"] == 4 / 8
    assert metrics["reward/format/mean"] == 5 / 8
    assert "advantage/std" in metrics
    assert metrics["critic/score/mean"] == pytest.approx(9 / 8)  # verl's own


def test_estimators_that_verl_passes_no_components_have_them_too() -> None:
    _, [(data, metrics)] = own_fit(
        "algorithm.adv_estimator=drgrpo", "+algorithm.drgrpo.check_loss=False", "+algorithm.rewards.keys=[acc]"
    )
    assert per_row(data) == pytest.approx(DRGRPO_ON_ACC)
    assert metrics["reward/acc/max"] == 1.0


def test_each_trainer_has_a_history_of_its_own() -> None:
    first, steps = own_fit(*HADW, steps=3)
    assert [metrics["hadw/tick"] for _, metrics in steps] == [1, 2, 3]
    second, steps = own_fit(*HADW)
    assert [metrics["hadw/tick"] for _, metrics in steps] == [1]
    assert run_of(first).state is not run_of(second).state


def test_metrics_of_one_step_do_not_stay_for_the_next() -> None:
    class EverySecond(OwnFit):
        def fit(self) -> list[dict[str, Any]]:
            data = ray_trainer.compute_advantage(batch(), adv_estimator="gdpo", config=self.config.algorithm)
            return [ray_trainer.compute_data_metrics(data, use_critic=False) for _ in range(2)]

    first, second = EverySecond(compose("algorithm.adv_estimator=gdpo", KEYS)).fit()
    assert "reward/acc/mean" in first
    assert set(first) - set(second) == {name for name in first if name.startswith(("reward/", "advantage/", "gdpo/"))}


def test_a_trainer_without_a_checked_configuration_does_not_run_ours() -> None:
    trainer = OwnFit(compose("algorithm.adv_estimator=grpo"))
    delattr(trainer, "_verl_ext")
    trainer.fit(steps=1)  # verl's own is verl's business
    trainer.config = SimpleNamespace(algorithm=compose("algorithm.adv_estimator=hadw").algorithm)
    with pytest.raises(IntegrationError, match="OwnFit runs hadw unchecked.*is a SimpleNamespace, expected the DictC"):
        trainer.fit(steps=1)


def test_a_trainer_whose_own_init_calls_no_super_is_checked() -> None:
    with pytest.raises(ConfigurationError, match="did you mean 'gdpo'"):
        OwnFit(compose("algorithm.adv_estimator=gdop"))


def test_an_init_of_another_shape_is_left_to_the_base_class() -> None:
    class Odd(OwnFit):
        def __init__(self, name: str, *, options: Any) -> None:
            self.name = name
            super().__init__(config=options)

    trainer = Odd("odd", options=compose(*HADW))
    assert run_of(trainer).name == "hadw"


def test_verl_s_own_grpo_logs_named_rewards_and_keeps_its_advantages() -> None:
    _, [(plain, without)] = own_fit("algorithm.adv_estimator=grpo")
    _, [(watched, metrics)] = own_fit("algorithm.adv_estimator=grpo", KEYS)
    assert per_row(watched) == per_row(plain)
    assert metrics["reward/format/mean"] == 5 / 8
    assert not [name for name in without if name.startswith("reward/")]


def test_token_scores_stand_on_the_last_token() -> None:
    _, [(data, _)] = own_fit("algorithm.adv_estimator=gdpo", KEYS, "+algorithm.rewards.token_scores=True")
    for key, values in (("acc", ACCURACY), ("format", FORMAT)):
        expected = torch.zeros(8, 5)
        expected[torch.arange(8), torch.tensor(LENGTHS) - 1] = torch.tensor(values).float()
        torch.testing.assert_close(data.batch[f"token_level_scores_{key}"], expected, atol=0, rtol=0)


def test_token_scores_stand_on_the_last_token_of_the_response_even_if_it_is_not_trained_on() -> None:
    """As verl's own scores do: the answer of a tool may be the last; a row without any response has no place."""

    class WithTool(OwnFit):
        def fit(self) -> DataProto:
            data = batch()
            data.batch["response_mask"][0, 2:] = 0  # a response of 4 tokens, of which the tool wrote 2
            data.batch["response_mask"][1] = data.batch["attention_mask"][1, 2:] = 0
            return ray_trainer.compute_advantage(data, adv_estimator="gdpo", config=self.config.algorithm)

    config = compose("algorithm.adv_estimator=gdpo", KEYS, "+algorithm.rewards.token_scores=True")
    field = WithTool(config).fit().batch["token_level_scores_format"]
    assert field[0].tolist() == [0, 0, 0, 1, 0]
    assert field[1].tolist() == [0, 0, 0, 0, 0]
    assert field[6].tolist() == [0, 0, 0, 0, 1]


@pytest.mark.parametrize("written", [False, True], ids=["read", "read and written"])
def test_a_process_reward_model_s_field_wins_and_stays(written: bool) -> None:
    config = compose(
        "algorithm.adv_estimator=drgrpo",
        "+algorithm.drgrpo.check_loss=False",
        "+algorithm.rewards.keys=[acc]",
        f"+algorithm.rewards.token_scores={written}",
    )
    field = torch.zeros(8, 5)
    field[:, 0] = 1.0 - torch.tensor(ACCURACY).float()

    class WithField(OwnFit):
        def fit(self) -> DataProto:
            data = batch()
            data.batch["token_level_scores_acc"] = field.clone()
            return ray_trainer.compute_advantage(data, adv_estimator="drgrpo", config=self.config.algorithm)

    data = WithField(config).fit()
    assert per_row(data) == pytest.approx([-value for value in DRGRPO_ON_ACC])
    torch.testing.assert_close(data.batch["token_level_scores_acc"], field, atol=0, rtol=0)


@pytest.mark.parametrize("estimator", ["drgrpo", "grpo"])
def test_the_score_may_be_one_of_the_keys(estimator: str) -> None:
    _, [(_, metrics)] = own_fit(
        f"algorithm.adv_estimator={estimator}",
        "+algorithm.rewards={keys: [score, acc], token_scores: true}",
        "+algorithm.drgrpo.check_loss=False",
    )
    assert metrics["reward/score/mean"] == pytest.approx(9 / 8)


def test_token_scores_are_there_when_advantages_are_computed_and_do_not_become_the_components() -> None:
    """Code written against the fork reads the fields there; NaN, "not scored", would read as 0 from them."""
    seen: list[set[str]] = []

    class Looks(OwnFit):
        def fit(self) -> DataProto:
            data = batch()
            data.non_tensor_batch["format"] = np.array([np.nan, *FORMAT[1:]], dtype=object)

            def look(*args: Any, **kwargs: Any) -> Any:
                seen.append({name for name, _ in data.batch.items() if name.startswith("token_level_scores_")})
                return original(*args, **kwargs)

            registry = core_algos.ADV_ESTIMATOR_REGISTRY
            original = registry["gdpo"]
            with mock.patch.dict(registry, {"gdpo": look}):
                return ray_trainer.compute_advantage(data, adv_estimator="gdpo", config=self.config.algorithm)

    with_fields = Looks(compose("algorithm.adv_estimator=gdpo", KEYS, "+algorithm.rewards.token_scores=True")).fit()
    without = Looks(compose("algorithm.adv_estimator=gdpo", KEYS)).fit()
    assert seen == [{"token_level_scores_acc", "token_level_scores_format"}, set()]
    torch.testing.assert_close(with_fields.batch["advantages"], without.batch["advantages"], atol=0, rtol=0)


def separate(cls: type[Any], *overrides: str) -> Any:
    """An instance of one of verl's experimental trainers, as its `_fit_compute_advantage` needs it."""

    class Stub(cls):
        def __init__(self, config: Any) -> None:  # no super, as those trainers
            self.config = config

    trainer = Stub(compose(*overrides))
    trainer.metrics, trainer.timing_raw, trainer.global_steps = {}, {}, 3
    trainer.reward_tensor = batch().batch["token_level_scores"]
    trainer.reward_extra_infos_dict = {"acc": ACCURACY, "format": FORMAT}
    return trainer


def without_rewards() -> DataProto:
    data = batch()
    for key in ("acc", "format"):
        del data.non_tensor_batch[key]
    data.batch.pop("token_level_rewards")
    return data


def trainer_classes() -> list[type[Any]]:
    from verl.experimental.fully_async_policy.fully_async_trainer import FullyAsyncTrainer
    from verl.experimental.one_step_off_policy.ray_trainer import OneStepOffRayTrainer

    return [SeparateRayPPOTrainer, OneStepOffRayTrainer, FullyAsyncTrainer.__ray_metadata__.modified_class]


@pytest.mark.parametrize("which", [0, 1, 2], ids=["separation", "one_step_off", "fully_async"])
def test_the_experimental_trainers_compute_and_log(which: int) -> None:
    trainer = separate(trainer_classes()[which], "algorithm.adv_estimator=gdpo", KEYS, "+algorithm.gdpo.epsilon=1e-4")
    data = trainer._fit_compute_advantage(without_rewards())
    assert per_row(data) == pytest.approx(GDPO, abs=1e-5)
    assert trainer.metrics["reward/acc/mean"] == 4 / 8
    assert trainer.metrics["advantage/zero_share"] == 0.0


METHODS = {"__init__", "fit", "_save_checkpoint", "_load_checkpoint", "_fit_compute_advantage"}


def test_the_experimental_trainers_own_classes_are_wrapped_where_they_override() -> None:
    for cls in trainer_classes():
        for base in cls.__mro__[:-1]:
            for method in {"__init__", "_save_checkpoint", "_load_checkpoint", "_fit_compute_advantage"} & set(
                vars(base)
            ):
                assert getattr(vars(base)[method], "__verl_ext__", False), f"{base}.{method}"


def test_the_fully_asynchronous_trainer_stays_wrapped_on_its_way_into_an_actor(tmp_path: Path) -> None:
    """Ray sends the class by value, to a process which has not imported its module."""
    from ray import cloudpickle

    (tmp_path / "class").write_bytes(cloudpickle.dumps(trainer_classes()[2]))
    code = """
import pathlib, sys, verl
from ray import cloudpickle
cls = cloudpickle.loads(pathlib.Path(sys.argv[1]).read_bytes())
for name in ("__init__", "fit", "_save_checkpoint", "load_checkpoint", "_fit_compute_advantage"):
    assert getattr(cls, name).__verl_ext__, name
from verl_ext.integration.compat import hooks
assert hooks.HOOKS["verl.trainer.ppo.ray_trainer"].state == "holds"
"""
    done = fresh.run(code, str(tmp_path / "class"))
    assert done.returncode == 0, done.stderr


def test_the_fully_asynchronous_trainer_saves_and_reads_its_state_by_its_own_count(tmp_path: Path) -> None:
    from verl.experimental.fully_async_policy import fully_async_trainer

    def make() -> Any:
        trainer = separate(trainer_classes()[2], *HADW, f"trainer.default_local_dir={tmp_path}", "trainer.nnodes=1")
        trainer.current_param_version, trainer.trigger_parameter_sync_step = 5, 4
        trainer.actor_rollout_wg = mock.MagicMock()
        trainer.rollouter = mock.MagicMock()
        trainer.use_critic = False
        return trainer

    saved = make()
    saved._fit_compute_advantage(without_rewards())
    (tmp_path / "global_step_5").mkdir()
    with mock.patch.object(fully_async_trainer.ray, "get"):
        saved._save_checkpoint()
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "5"
    assert json.loads((tmp_path / "global_step_5" / "verl_ext.json").read_text())["global_step"] == 5
    resumed = make()
    resumed.current_param_version = 0
    assert asyncio.run(resumed.load_checkpoint()) == 5
    assert run_of(resumed).state.states == run_of(saved).state.states
    assert run_of(resumed).state.states["hadw"]["weigh_by_history"].ticks == 1


def test_the_fully_asynchronous_trainer_claims_its_folder_and_mends_the_tracker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = separate(
        trainer_classes()[2],
        *HADW,
        f"trainer.default_local_dir={tmp_path}",
        "trainer.nnodes=1",
        "trainer.save_freq=1",
    )
    held: list[tuple[str, run_lock.Use]] = []
    monkeypatch.setattr(run_lock, "hold", lambda folder, use: held.append((folder, use)))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("five")
    with pytest.raises(CheckpointError, match="found b'five'"):
        asyncio.run(trainer.load_checkpoint())
    assert held == [(str(tmp_path), run_lock.CHECKPOINTS)]


def test_a_call_outside_any_trainer_takes_its_components_from_the_batch() -> None:
    config = compose("algorithm.adv_estimator=gdpo", KEYS, "+algorithm.gdpo.epsilon=1e-4")
    data = ray_trainer.compute_advantage(batch(), adv_estimator="gdpo", config=config.algorithm)
    assert per_row(data) == pytest.approx(GDPO, abs=1e-5)
