"""A verl that has moved what the hooks touch: it is named, and nothing is installed by halves."""

from __future__ import annotations

import importlib
import inspect
import re
from types import SimpleNamespace

import pytest

from tests.facts import a_line_says
from tests.integration.compat.test_installation import OTHERS_WORK, REFUSING, breaking, story
from verl_ext.errors import IntegrationError
from verl_ext.integration.compat import contract
from verl_ext.registry import BUILT_IN

BROKEN = {
    "the V1 trainer": (
        "verl.trainer.ppo.v1.trainer_base",
        "module.PPOTrainer._compute_advantage = lambda self, batch, timing: batch",
        "takes (self, batch, timing), expected (self, batch, metrics)",
    ),
    "the legacy trainer": (
        "verl.trainer.ppo.ray_trainer",
        "module.compute_advantage = lambda data, adv_estimator, world: data",
        "takes (data, adv_estimator, world), expected (data, adv_estimator)",
    ),
    "the driver": (
        "verl.utils.config",
        "module.validate_config = lambda config, roles: None",
        "takes (config, roles), expected (config, use_reference_policy, use_critic)",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_verl_that_moved_is_loud_and_only_our_estimators_refuse(case: str) -> None:
    module, statement, part = BROKEN[case]
    told = story(breaking(module, statement), f"import verl\nimport {module}", OTHERS_WORK, REFUSING)
    assert f"ERROR verl_ext hook into {module}" in told.err
    assert f"RuntimeWarning: verl_ext: hook into {module}" in told.err
    assert part in told.err
    refused = [line for line in told.out.splitlines() if line.startswith("REFUSED")]
    assert len(refused) == len(BUILT_IN)
    assert all(part in line and module in line and "python -m verl_ext doctor" in line for line in refused)


INSTALLERS = {
    "v1": ("verl_ext.integration.trainers.v1:install", "verl.trainer.ppo.v1.trainer_base"),
    "legacy": ("verl_ext.integration.trainers.legacy:install", "verl.trainer.ppo.ray_trainer"),
    "separation": (
        "verl_ext.integration.trainers.legacy:install_separation",
        "verl.experimental.separation.ray_trainer",
    ),
    "core": ("verl_ext.integration.advantage.registry:install", "verl.trainer.ppo.core_algos"),
}
TOUCHED = [
    ("v1", "PPOTrainer.__init__"),
    ("v1", "PPOTrainer.fit"),
    ("v1", "PPOTrainer._compute_advantage"),
    ("v1", "PPOTrainer._build_replay_buffer"),
    ("v1", "PPOTrainer._save_checkpoint"),
    ("v1", "PPOTrainer._load_checkpoint"),
    ("v1", "tq.kv_batch_get"),
    ("legacy", "RayPPOTrainer.__init__"),
    ("legacy", "RayPPOTrainer.fit"),
    ("legacy", "RayPPOTrainer._save_checkpoint"),
    ("legacy", "RayPPOTrainer._load_checkpoint"),
    ("legacy", "compute_advantage"),
    ("legacy", "compute_data_metrics"),
    ("separation", "SeparateRayPPOTrainer._fit_compute_advantage"),
    ("core", "get_adv_estimator_fn"),
]


def stand_in(which: str) -> SimpleNamespace:
    """What is pinned of a module of verl, without our wrappers."""
    name = INSTALLERS[which][1]
    real, made = importlib.import_module(name), SimpleNamespace()
    for pin in contract.VERL[name]:
        first, _, member = pin.name.partition(".")
        value = getattr(real, first)
        if not member:
            setattr(made, first, {"gdpo": min} if isinstance(value, dict) else inspect.unwrap(value))
            continue
        if not hasattr(made, first):
            setattr(made, first, type(first, (), {}))
        setattr(getattr(made, first), member, inspect.unwrap(getattr(value, member)))
    return made


def install(which: str, module: SimpleNamespace) -> None:
    home, name = INSTALLERS[which][0].split(":")
    getattr(importlib.import_module(home), name)(module)


def members(module: SimpleNamespace) -> dict[str, object]:
    found = {}
    for name, value in vars(module).items():
        found[name] = dict(value) if isinstance(value, dict) else value
        if isinstance(value, type):
            found |= {f"{name}.{key}": member for key, member in vars(value).items() if callable(member)}
    return found


@pytest.mark.parametrize(
    ("which", "path", "change"),
    [(*touched, "moved") for touched in TOUCHED]
    # A class without an `__init__` of its own has that of `object`.
    + [(*touched, "gone") for touched in TOUCHED if not touched[1].endswith("__init__")],
)
def test_whatever_moves_is_named_and_nothing_is_installed_by_halves(which: str, path: str, change: str) -> None:
    module = owner = stand_in(which)
    *owners, name = path.split(".")
    for step in owners:
        owner = getattr(owner, step)
    if change == "moved":
        setattr(owner, name, lambda something, quite, different: None)
    else:
        delattr(owner, name)
    before = members(module)
    with pytest.raises((IntegrationError, AttributeError), match=re.escape(name if change == "gone" else "quite")):
        install(which, module)
    assert members(module) == before


@pytest.mark.parametrize("which", ["v1", "legacy", "core"])
def test_what_has_not_moved_is_installed_and_once_only(which: str) -> None:
    module = stand_in(which)
    before = members(module)
    install(which, module)
    after = members(module)
    assert after != before
    install(which, module)
    assert members(module) == after


def test_further_optional_parameters_of_verl_are_welcome() -> None:
    module = stand_in("v1")
    module.PPOTrainer._compute_advantage = lambda self, batch, metrics, timing=None, **more: None
    install("v1", module)


def test_a_registry_that_is_none_leaves_nothing_half_registered() -> None:
    told = story(
        breaking("verl.trainer.ppo.core_algos", "module.get_adv_estimator_fn = lambda name, device: None"),
        """
        import verl
        from verl.trainer.ppo import core_algos
        from verl_ext.registry import BUILT_IN
        registry = core_algos.ADV_ESTIMATOR_REGISTRY
        assert registry["gdpo"].__module__ == "verl.trainer.ppo.core_algos"
        print(sorted(set(registry) & set(BUILT_IN) - {"gdpo"}))
        """,
    )
    assert "ERROR verl_ext hook into verl.trainer.ppo.core_algos" in told.err
    assert told.out.splitlines()[-1] == "[]"


def test_a_run_with_our_estimator_does_not_start_on_a_verl_that_moved() -> None:
    told = story(
        breaking(*BROKEN["the V1 trainer"][:2]),
        """
        import verl
        import verl.trainer.ppo.v1.trainer_base
        from tests.integration.configs import compose
        from verl.utils.config import validate_config
        from verl_ext.errors import IntegrationError
        config = compose("algorithm.adv_estimator=drgrpo", "+algorithm.drgrpo.check_loss=False")
        try:
            validate_config(config, use_reference_policy=False, use_critic=False)
        except IntegrationError as error:
            print("REFUSED", error)
        """,
    )
    assert a_line_says(told.out, "REFUSED", "verl_ext", "not fully installed")
