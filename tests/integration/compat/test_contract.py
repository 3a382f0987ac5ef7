"""Whatever moves in verl is on one list, and so is what cannot be looked at."""

from __future__ import annotations

import types
from pathlib import Path

import pytest

from tests.facts import facts, says
from verl_ext.errors import IntegrationError
from verl_ext.integration.compat import contract
from verl_ext.integration.compat.pins import Pin


def test_nothing_has_moved_in_this_verl() -> None:
    assert contract.moved() == []
    assert contract.moved(cpu=True) == []


def test_all_that_moved_is_listed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo import core_algos, ray_trainer
    from verl.trainer.ppo.v1 import replay_buffer, trainer_base

    monkeypatch.delattr(core_algos, "get_adv_estimator_fn")
    monkeypatch.setattr(core_algos, "ADV_ESTIMATOR_REGISTRY", [])
    monkeypatch.setattr(ray_trainer, "compute_data_metrics", lambda batch, critic: None)
    monkeypatch.setattr(trainer_base.PPOTrainer, "_compute_advantage", lambda self, batch: batch)
    monkeypatch.delattr(replay_buffer.ReplayBuffer, "_dapo_filtered_keys")
    fields = {name: item for name, item in AlgoConfig.__dataclass_fields__.items() if name != "gdpo_reward_keys"}
    monkeypatch.setattr(AlgoConfig, "__dataclass_fields__", fields)
    monkeypatch.delattr(AlgoConfig, "gdpo_reward_keys")
    monkeypatch.setattr(contract, "SETTINGS", (*contract.SETTINGS, "trainer.renamed", "gone.by"))
    monkeypatch.delattr("verl.__version__")
    told = contract.moved()
    expected = [
        ("verl.trainer.ppo.core_algos.ADV_ESTIMATOR_REGISTRY", "list", "dict"),
        ("verl.trainer.ppo.core_algos.get_adv_estimator_fn", "not exist"),
        ("verl.trainer.config.AlgoConfig", "no gdpo_reward_keys"),
        ("verl.trainer.ppo.v1.trainer_base.PPOTrainer._compute_advantage", "(self, batch)", "(self, batch, metrics)"),
        ("verl.trainer.ppo.v1.replay_buffer.ReplayBuffer._dapo_filtered_keys", "not exist"),
        ("verl.__version__", "not exist"),
        ("verl.trainer.ppo.ray_trainer.compute_data_metrics", "(batch, critic)", "(batch, use_critic)"),
        ("ppo_trainer", "no trainer.renamed"),
        ("ppo_trainer", "no gone.by"),
    ]
    assert [line for line, found in zip(told, expected, strict=True) if not says(line, *found)] == []


def test_a_hook_names_all_that_moved_in_its_module_too() -> None:
    module = types.SimpleNamespace(ADV_ESTIMATOR_REGISTRY={}, get_adv_estimator_fn=lambda name: None)
    with pytest.raises(IntegrationError, match=facts("get_adv_estimator_fn", "(name)", "POLICY_LOSS_REGISTRY")):
        contract.require("verl.trainer.ppo.core_algos", module)


class Buffer:
    def sample(self, step):
        return step


def test_a_sampler_of_the_users_is_held_against_verls() -> None:
    home = "verl.trainer.ppo.v1.replay_buffer"
    with pytest.raises(IntegrationError) as told:
        contract.require_members(home, "ReplayBuffer", Buffer, "sample", "_dapo_filtered_keys")
    assert says(told.value, f"{__name__}.Buffer.sample", "(self, step)", "(self, global_steps,")
    assert says(told.value, f"{__name__}.Buffer._dapo_filtered_keys", "not exist")


def test_a_module_that_is_gone_is_listed_and_a_package_that_is_not_installed_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "needs_other.py").write_text("import surely_not_installed_here\n")
    (tmp_path / "broken_in_itself.py").write_text("import broken_in_itself.part\n")
    (tmp_path / "raises.py").write_text("raise RuntimeError('no')\n")
    monkeypatch.syspath_prepend(tmp_path)
    names = ("needs_other", "broken_in_itself", "raises", "verl.trainer.ppo.moved_away")
    monkeypatch.setattr(contract, "VERL", dict.fromkeys(names, (Pin("x"),)))
    monkeypatch.setattr(contract, "SETTINGS", ())
    told = contract.moved()
    assert [line.split(" ")[0] for line in told] == ["broken_in_itself", "raises", "verl.trainer.ppo.moved_away"]
    assert all(says(line, "imported") for line in told)


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("verl_ext.cpu.gone", False),  # of ours, and not another's
        ("verl.gone", False),
        ("other.part", True),
        ("verl_ext_of_another", True),
        (None, False),
    ],
)
def test_a_package_that_is_not_installed_is_another_one(name: str | None, missing: bool) -> None:
    assert contract.lacks_package("verl.trainer", ModuleNotFoundError("No module", name=name)) is missing
    assert not contract.lacks_package("verl.trainer", ImportError("cannot import name", name=name))


@pytest.mark.parametrize("cpu", [False, True])
def test_a_configuration_of_another_name_is_listed(monkeypatch: pytest.MonkeyPatch, cpu: bool) -> None:
    import hydra

    compose = hydra.compose
    monkeypatch.setattr(hydra, "compose", lambda name: compose(f"{name}_renamed"))
    monkeypatch.setattr(contract, "VERL", {})
    monkeypatch.setattr(contract, "CPU", {})
    contract._configuration.cache_clear()
    (told,) = contract.moved(cpu=cpu)
    number = len(contract.CPU_SETTINGS if cpu else contract.SETTINGS)
    assert says(told, "ppo_trainer", f"{number} settings", "MissingConfigException", "'ppo_trainer_renamed'")


FULLY_ASYNC = "verl.experimental.fully_async_policy.fully_async_trainer"


def test_a_fully_asynchronous_trainer_that_saves_by_another_name_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it inherits would be wrapped, and never called."""
    module = pytest.importorskip(FULLY_ASYNC)
    cls = module.FullyAsyncTrainer.__ray_metadata__.modified_class
    for owner in cls.__mro__:
        if owner.__module__ == FULLY_ASYNC and "_save_checkpoint" in vars(owner):
            monkeypatch.delattr(owner, "_save_checkpoint")
    monkeypatch.setattr(contract, "SETTINGS", ())
    monkeypatch.setattr(contract, "VERL", {FULLY_ASYNC: contract.VERL[FULLY_ASYNC]})
    inherited = ("_save_checkpoint", "verl.trainer.ppo.ray_trainer.RayPPOTrainer._save_checkpoint", "its own")
    assert any(says(line, *inherited) for line in contract.moved())
    with pytest.raises(IntegrationError, match=facts(*inherited)):
        contract.require(FULLY_ASYNC, module)


def test_what_a_guard_needs_is_no_failure_and_is_listed_by_the_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.trainer.ppo.v1 import replay_buffer

    assert contract.guards_off() == {}
    monkeypatch.delattr(replay_buffer.ReplayBuffer, "_evict_terminal_groups")
    assert contract.moved() == []
    (missing,) = contract.guards_off()["watch_rollouts"]
    assert "ReplayBuffer._evict_terminal_groups" in missing
