"""What this package touches of verl is where it expects it, and whatever moves is on one list."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
import sys
import types
from pathlib import Path

import pytest

import verl_ext
from verl_ext.errors import IntegrationError
from verl_ext.integration.compat import contract
from verl_ext.integration.compat.pins import Pin, check

SOURCE = Path(verl_ext.__file__).parent


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
    told = contract.moved()
    expected = [
        "verl.trainer.ppo.core_algos.ADV_ESTIMATOR_REGISTRY is a list, expected a dict",
        "verl.trainer.ppo.core_algos.get_adv_estimator_fn does not exist any more",
        "verl.trainer.config.AlgoConfig has no gdpo_reward_keys any more",
        "verl.trainer.ppo.v1.trainer_base.PPOTrainer._compute_advantage takes (self, batch), expected (self, batch, ",
        "verl.trainer.ppo.v1.replay_buffer.ReplayBuffer._dapo_filtered_keys does not exist any more",
        "verl.trainer.ppo.ray_trainer.compute_data_metrics takes (batch, critic), expected (batch, use_critic)",
        "verl's configuration ppo_trainer has no trainer.renamed any more",
        "verl's configuration ppo_trainer has no gone.by any more",
    ]
    assert [line for line, start in zip(told, expected, strict=True) if not line.startswith(start)] == []


def test_a_hook_names_all_that_moved_in_its_module_too() -> None:
    module = types.SimpleNamespace(ADV_ESTIMATOR_REGISTRY={}, get_adv_estimator_fn=lambda name: None)
    with pytest.raises(IntegrationError, match=r"takes \(name\), expected .*POLICY_LOSS_REGISTRY does not exist"):
        contract.require("verl.trainer.ppo.core_algos", module)


class Buffer:
    def sample(self, step):
        return step


def test_a_sampler_of_the_users_is_held_against_verls() -> None:
    home = "verl.trainer.ppo.v1.replay_buffer"
    with pytest.raises(IntegrationError) as told:
        contract.require_members(home, "ReplayBuffer", Buffer, "sample", "_dapo_filtered_keys")
    assert f"{__name__}.Buffer.sample takes (self, step), expected (self, global_steps, " in str(told.value)
    assert f"{__name__}.Buffer._dapo_filtered_keys does not exist any more" in str(told.value)


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
    assert all("cannot be imported any more: " in line for line in told)


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


# -- what cannot be looked at is listed too ---------------------------------------------------------------------------


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
    assert told.startswith("verl's configuration ppo_trainer cannot be composed ")
    assert f"{number} settings" in told
    assert "MissingConfigException: Cannot find primary config 'ppo_trainer_renamed'" in told


def test_a_section_that_cannot_be_resolved_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    from omegaconf import OmegaConf

    config = OmegaConf.create({"trainer": "${gone.by}", "data": {"n": 1}})
    monkeypatch.setattr(contract, "_configuration", lambda: config)
    monkeypatch.setattr(contract, "VERL", {})
    monkeypatch.setattr(contract, "SETTINGS", ("trainer.save_freq", "data.n", "data.m"))
    told = contract.moved()
    assert len(told) == 2
    assert told[0].startswith("verl's configuration ppo_trainer has no section trainer")
    assert "trainer.save_freq" in told[0]
    assert "gone" in told[0]
    assert told[1] == "verl's configuration ppo_trainer has no data.m any more"


# -- single pins ------------------------------------------------------------------------------------------------------

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
    inherited = "_save_checkpoint is verl.trainer.ppo.ray_trainer.RayPPOTrainer._save_checkpoint, expected its own"
    told = contract.moved()
    assert any(line.endswith(inherited) for line in told)
    with pytest.raises(IntegrationError, match=inherited):
        contract.require(FULLY_ASYNC, module)


def test_the_version_of_verl_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    import verl

    monkeypatch.delattr(verl, "__version__")
    monkeypatch.setattr(contract, "SETTINGS", ())
    monkeypatch.setattr(contract, "VERL", {"verl": contract.VERL["verl"]})
    assert contract.moved() == ["verl.__version__ does not exist any more"]


# -- each kind of pin -------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Fields:
    kept: int = 0


async def waiting(keys, *, over=0):
    return keys, over


async def streaming(keys):
    yield keys


def plain(keys, over):
    return {"label": keys}, over


HERE = types.SimpleNamespace(
    Fields=Fields,
    waiting=waiting,
    streaming=streaming,
    plain=plain,
    number=3,
)
KINDS = {
    "there": (Pin("absent"), "m.absent does not exist any more"),
    "nested": (Pin("Fields.absent"), "m.Fields.absent does not exist any more"),
    "takes": (Pin("plain", takes=("keys",)), "m.plain takes (keys, over), expected (keys)"),
    "takes, of no function": (Pin("number", takes=("keys",)), "m.number is not a function any more"),
    "takes, in another order": (
        Pin("plain", takes=("over", "keys")),
        "m.plain takes (keys, over), expected (over, keys)",
    ),
    "accepts": (Pin("plain", accepts=("over", "axis")), "m.plain does not take axis any more; it takes (keys, over)"),
    "accepts, of no function": (Pin("number", accepts=("keys",)), "m.number is not a function any more"),
    "has": (Pin("Fields", has=("kept", "lost")), "m.Fields has no lost any more"),
    "kind": (Pin("number", kind=dict), "m.number is a int, expected a dict"),
    "coroutine": (Pin("plain", coroutine=True), "m.plain is not a coroutine function any more"),
    "no coroutine": (Pin("waiting", coroutine=False), "m.waiting became a coroutine function"),
    "own": (Pin("plain", own=True), f"m.plain is {__name__}.plain, expected its own"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_pin_says_what_is_not_so(kind: str) -> None:
    pin, told = KINDS[kind]
    assert list(check("m", HERE, pin)) == [told]


@pytest.mark.parametrize(
    "pin",
    [
        Pin("plain", takes=("keys", "over")),
        Pin("waiting", takes=("keys",), coroutine=True),
        Pin("waiting", accepts=("over",)),
        Pin("streaming", takes=("keys",), coroutine=True),
        Pin("Fields", has=("kept",), kind=type),
        Pin("plain", coroutine=False),
    ],
)
def test_what_is_as_pinned_is_not_mentioned(pin: Pin) -> None:
    assert list(check("m", HERE, pin)) == []


def test_what_is_defined_where_it_is_expected_is_its_own() -> None:
    assert list(check(__name__, sys.modules[__name__], Pin("Fields", own=True))) == []


# -- nothing of verl's is touched that is not pinned ------------------------------------------------------------------


def imported() -> set[tuple[str, str]]:
    """What the package imports of verl, as (module, name)."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and re.match(r"(verl|transfer_queue|vllm)(\.|$)", node.module or ""):
                found |= {(str(node.module), alias.name) for alias in node.names}
    return found


def test_whatever_is_imported_of_verl_is_pinned() -> None:
    modules = contract.VERL.keys() | contract.CPU.keys()
    pinned = {
        (module, pin.name.partition(".")[0])
        for table in (contract.VERL, contract.CPU)
        for module, pins in table.items()
        for pin in pins
    }
    loose = {
        (module, name)
        for module, name in imported()
        if (module, name) not in pinned and f"{module}.{name}" not in modules
    }
    assert len(imported()) > 10
    assert loose == set()


def test_every_module_with_a_hook_or_a_patch_is_pinned() -> None:
    import verl  # noqa: F401 - loads the plugin

    from verl_ext.cpu.patches import PATCHES
    from verl_ext.integration.compat.hooks import HOOKS

    mine = {"hydra.core.config_store"}
    assert set(HOOKS) - set(contract.VERL) == mine
    assert set(PATCHES) - set(contract.VERL) - set(contract.CPU) == set()


def test_what_a_guard_needs_is_no_failure_and_is_listed_by_the_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.trainer.ppo.v1 import replay_buffer

    assert contract.guards_off() == {}
    monkeypatch.delattr(replay_buffer.ReplayBuffer, "_evict_terminal_groups")
    assert contract.moved() == []
    (missing,) = contract.guards_off()["watch_rollouts"]
    assert "ReplayBuffer._evict_terminal_groups" in missing


def test_every_setting_that_is_selected_by_its_path_is_pinned() -> None:
    read = set()
    for path in (SOURCE / "integration").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        text = text.replace("{ACTOR}", "actor_rollout_ref.actor").replace("{FUNCTION}", "reward.custom_reward_function")
        read |= set(re.findall(r'select\([^"()]*"(\w[\w.]+)"', text))
    assert len(read) > 10
    # The user adds these, which verl's own file does not have.
    added = ("algorithm.filter_groups", "algorithm.verl_ext", "reward.custom_reward_function.reward_kwargs")
    assert {path for path in read if not path.startswith(added)} - set(contract.SETTINGS) == set()


def test_modules_of_the_table_exist_and_are_of_verl_or_what_it_uses() -> None:
    for name in (*contract.VERL, *contract.CPU):
        assert name.partition(".")[0] in ("verl", "transfer_queue", "vllm", "importlib")
        assert importlib.util.find_spec(name.partition(".")[0]) or name.startswith("vllm")
