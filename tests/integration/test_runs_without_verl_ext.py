"""Runs that do not use verl_ext, in an environment that has it: their names, their settings and their trainers."""

import copy
import functools
import os
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

import hydra
import pytest
import verl
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from verl.trainer.ppo import core_algos

from tests import fresh
from tests.configs import compose
from tests.facts import a_line_says
from tests.integration.trainers.ray_runs import OwnFit, advantages_per_row
from verl_ext.advantages.estimator import computed_by_verl_ext
from verl_ext.checks import start as starts
from verl_ext.checks.judge import check_run, judge
from verl_ext.checks.losses import aggregates_itself
from verl_ext.errors import ConfigurationError, IntegrationError
from verl_ext.registry import ADDED_ESTIMATORS, entries_read
from verl_ext.run_config import entries_in_use, owner, sections_in_use, select, uses_verl_ext
from verl_ext.settings import RewardsSettings
from verl_ext.trainers.mixin import TrainerMixin, prepare_run

HOME = Path(verl.__file__).parent
REGISTRY = core_algos.ADV_ESTIMATOR_REGISTRY
MAXRL = "algorithm.adv_estimator=maxrl"
COLLEAGUES_MODULE = """
from verl.trainer.ppo.core_algos import register_adv_est

@register_adv_est("maxrl")
def colleagues_maxrl(token_level_rewards, response_mask, **_):
    return 7 * response_mask, 7 * response_mask
"""
PROGRAM = """
import sys
sys.path.insert(0, {folder!r})
import verl
{statement}
from verl.trainer.ppo import core_algos
from verl_ext.cli import main
print("FOUND", core_algos.get_adv_estimator_fn("maxrl").__name__)
overrides = ["actor_rollout_ref.rollout.n=8", "actor_rollout_ref.actor.use_dynamic_bsz=True"]
print("CHECK", main(["check", "algorithm.adv_estimator=maxrl", *overrides]))
print("PRESET", main(["check", "+verl_ext=maxrl", *overrides]))
print("DOCTOR", main(["doctor"]))
"""


@pytest.mark.parametrize(
    ("statement", "environment"),
    [("", {"VERL_USE_EXTERNAL_MODULES": "colleague"}), ("import colleague", {})],
    ids=["before the plugin is loaded", "after the plugin is loaded"],
)
def test_an_estimator_that_another_package_registers_takes_precedence(
    tmp_path: Path, statement: str, environment: dict[str, str]
) -> None:
    (tmp_path / "colleague.py").write_text(COLLEAGUES_MODULE)
    program = PROGRAM.format(folder=str(tmp_path), statement=statement)
    done = fresh.run(program, environment={**os.environ, **environment})
    assert "FOUND colleagues_maxrl" in done.stdout, f"{done.stdout}\n{done.stderr}"
    # `check` accepts the estimator of the other package.
    assert "CHECK 0" in done.stdout, done.stdout
    assert a_line_says(done.stdout, "estimator", "maxrl", "colleague")
    assert not a_line_says(done.stdout, "steps", "divide_by_mean")
    # The preset is for the estimator of verl_ext.
    assert "PRESET 1" in done.stdout, done.stdout
    assert a_line_says(done.stdout, "error", "maxrl", "colleague")
    assert "DOCTOR 0" in done.stdout, done.stdout
    assert a_line_says(done.stdout, "note", "maxrl", "colleague")
    assert a_line_says(done.stdout, "ok", "dgpo", "verl_ext")


def sevens(token_level_rewards: Any, response_mask: Any, **_: Any) -> Any:
    """Compute an advantage of 7 for each token, as an estimator of another package."""
    return 7.0 * response_mask, 7.0 * response_mask


def test_a_run_of_another_packages_estimator_trains_with_its_advantages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTRY, "maxrl", sevens)
    # verl_ext's own maxrl rejects a KL term.
    trainer = OwnFit(compose(MAXRL, "algorithm.use_kl_in_reward=True"))
    assert trainer._verl_ext is None
    [(data, metrics)] = trainer.fit(steps=1)
    assert advantages_per_row(data) == [7] * 8
    assert not [name for name in metrics if name.startswith(("maxrl", "reward/"))]


def test_the_section_of_another_packages_estimator_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTRY, "dvao", sevens)
    config = compose("algorithm.adv_estimator=dvao", "+algorithm.dvao.beta=3", "+algorithm.rewards.log=all")
    assert judge(config).errors == []


def test_verls_registry_is_unchanged_and_only_verls_gdpo_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {*ADDED_ESTIMATORS} & {*REGISTRY} == {"gdpo"}
    assert REGISTRY["gdpo"].__module__ == core_algos.__name__
    assert computed_by_verl_ext("gdpo")
    monkeypatch.setitem(REGISTRY, "gdpo", sevens)
    assert core_algos.get_adv_estimator_fn("gdpo") is sevens


def test_an_estimator_that_a_later_verl_registers_is_verls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTRY, "maxrl", REGISTRY["rloo"])
    assert not computed_by_verl_ext("maxrl")
    assert owner("maxrl") == core_algos.__name__


@pytest.mark.parametrize("name", ["maxrl", "gdpo"])
def test_a_function_without_a_module_belongs_to_another_package(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    namespace: dict[str, Any] = {}
    exec("def estimator(**_): ...", namespace)
    monkeypatch.setitem(REGISTRY, name, namespace["estimator"])
    assert not computed_by_verl_ext(name)


class CallableObject:
    """A callable object whose class states that it is verl's."""

    __module__ = core_algos.__name__

    def __call__(self, token_level_rewards: Any, response_mask: Any, **_: Any) -> Any:
        return sevens(token_level_rewards, response_mask)


def sevens_of_any_arguments(**arguments: Any) -> Any:
    return sevens(arguments["token_level_rewards"], arguments["response_mask"])


def replacement_of(original: Any, kind: str) -> Any:
    """Return a function of another package that has the `__module__` of verl's original function."""
    if kind == "wrapped":
        return functools.wraps(original)(sevens_of_any_arguments)
    if kind == "partial":
        return functools.update_wrapper(functools.partial(sevens), original)
    return CallableObject()


each_kind_of_replacement = pytest.mark.parametrize("kind", ["wrapped", "partial", "object"])


@each_kind_of_replacement
def test_a_function_that_wraps_verls_belongs_to_another_package(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its `__module__` is verl's."""
    replacement = replacement_of(REGISTRY["gdpo"], kind)
    assert replacement.__module__ == core_algos.__name__
    monkeypatch.setitem(REGISTRY, "gdpo", replacement)
    assert core_algos.get_adv_estimator_fn("gdpo") is replacement
    assert not computed_by_verl_ext("gdpo")
    assert owner("gdpo") == (__name__ if kind == "wrapped" else "another package")


@each_kind_of_replacement
def test_a_run_of_a_function_that_wraps_verls_is_without_verl_ext(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTRY, "gdpo", replacement_of(REGISTRY["gdpo"], kind))
    overrides = ("algorithm.adv_estimator=gdpo", "+algorithm.gdpo.unknown=3")
    assert judge(compose(*overrides, "+algorithm.rewards.log=all")).errors == []
    trainer = OwnFit(compose(*overrides))
    assert trainer._verl_ext is None
    [(data, _)] = trainer.fit(steps=1)
    assert advantages_per_row(data) == [7] * 8


@each_kind_of_replacement
def test_a_finding_does_not_name_verl_for_a_replaced_estimator(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose("algorithm.adv_estimator=rloo", "actor_rollout_ref.rollout.n=1")
    assert any("verl's rloo" in str(finding) for finding in judge(config).findings)
    monkeypatch.setitem(REGISTRY, "rloo", replacement_of(REGISTRY["rloo"], kind))
    assert not any("verl's rloo" in str(finding) for finding in judge(config).findings)


@each_kind_of_replacement
def test_the_error_about_a_preset_names_the_owner_of_a_replacement(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTRY, "gdpo", replacement_of(REGISTRY["gdpo"], kind))
    [error] = judge(compose("+verl_ext=gdpo")).errors
    assert (__name__ if kind == "wrapped" else "another package") in str(error)
    assert core_algos.__name__ not in str(error)


@each_kind_of_replacement
def test_the_rule_on_losses_does_not_know_a_replacement(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert aggregates_itself("sapo")
    losses = core_algos.POLICY_LOSS_REGISTRY
    monkeypatch.setitem(losses, "sapo", replacement_of(losses["sapo"], kind))
    assert aggregates_itself("sapo") is False


@pytest.mark.parametrize("batches_before", [0, 1])
def test_an_estimator_registered_after_the_start_of_a_run_is_an_error(
    batches_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The metrics of the batch before are not logged."""
    trainer = OwnFit(compose("+verl_ext=drgrpo", "algorithm.rewards.keys=[acc]"))
    for _ in range(batches_before):
        trainer.advantages()
    monkeypatch.setitem(REGISTRY, "drgrpo", sevens)
    with pytest.raises(IntegrationError, match="drgrpo"):
        trainer.advantages()


VERLS_MAIN = "verl.trainer.main_ppo"
OWN_MAIN = None
"""A main program that is not in a package."""
EXTERNAL_MODULES = "+ray_kwargs.ray_init.runtime_env.env_vars={VERL_USE_EXTERNAL_MODULES: colleague}"
GROUPS_OF_ONE = "actor_rollout_ref.rollout.n=1"
"""verl's default."""


def start(config: Any) -> Any:
    """Call the function that verl's main programs call before Ray starts."""
    return starts.wrap_checked(lambda config: config, config)


@pytest.mark.parametrize(
    ("main", "overrides"),
    [(OWN_MAIN, (MAXRL, GROUPS_OF_ONE)), (VERLS_MAIN, (MAXRL, GROUPS_OF_ONE, EXTERNAL_MODULES))],
    ids=["own main program", "external modules"],
)
def test_the_driver_only_warns_if_the_trainers_process_may_register_the_name(
    main: str | None, overrides: tuple[str, ...], main_program: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config = compose(*overrides)
    main_program(main)
    caplog.clear()
    assert start(config) is config
    assert any("rollout.n=1" in text for text in caplog.messages)
    # The check in the trainer's process: nobody has registered the name there.
    with pytest.raises(ConfigurationError):
        check_run(config)


@pytest.mark.parametrize(
    ("main", "overrides"),
    [(VERLS_MAIN, (MAXRL, GROUPS_OF_ONE)), (OWN_MAIN, (MAXRL, GROUPS_OF_ONE, "+algorithm.rewards.keys=[a]"))],
    ids=["verl's main program", "a section of verl_ext"],
)
def test_the_driver_rejects_a_run_that_certainly_uses_verl_ext(
    main: str | None, overrides: tuple[str, ...], main_program: Any
) -> None:
    main_program(main)
    with pytest.raises(ConfigurationError):
        start(compose(*overrides))


@pytest.mark.parametrize(("main", "warned"), [(VERLS_MAIN, True), (OWN_MAIN, False)], ids=["verl's main", "own main"])
def test_a_misspelt_name_is_warned_about_in_the_driver_of_verls_main(
    main: str | None,
    warned: bool,
    main_program: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Another main program may register the name in the trainer's process."""
    config = compose("algorithm.adv_estimator=gdop")
    main_program(main)
    monkeypatch.setattr(starts, "_summarized", [])
    caplog.clear()
    assert start(config) is config
    assert any("'gdpo'" in text for text in caplog.messages) == warned


WITHOUT_VERL_EXT: dict[str, tuple[str, ...]] = {
    "a section at the top": ("algorithm.adv_estimator=grpo", "+rewards.foo=1"),
    "an estimator that another package registers elsewhere": ("algorithm.adv_estimator=gdpo2",),
    "a section with one of our names": ("algorithm.adv_estimator=grpo", "+algorithm.rewards={shaping: linear}"),
    "an entry with one of our names": ("algorithm.adv_estimator=rloo", "+algorithm.compose=docker"),
    "a name like the presets'": ("algorithm.adv_estimator=grpo", "+verl_exp=mine"),
    "a value of another type than verl expects": (
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.actor.checkpoint.save_contents=3",
    ),
    "no section of the reward": ("algorithm.adv_estimator=grpo", "~reward"),
    "a filter that is not enabled": ("algorithm.adv_estimator=grpo", "++algorithm.filter_groups.metric=any_reward"),
    "an experimental trainer": ("algorithm.adv_estimator=grpo", "+rollout.n=1", "+algorithm.rewards={}"),
}


@pytest.mark.parametrize("case", WITHOUT_VERL_EXT)
def test_a_run_without_verl_ext_is_not_refused(case: str) -> None:
    config = compose(*WITHOUT_VERL_EXT[case])
    run = check_run(config)
    assert run is not None
    assert not run.uses_verl_ext
    assert prepare_run(TrainerMixin.__new__(TrainerMixin), config) is None
    assert judge(config).errors == []


def test_a_section_belongs_to_the_owner_of_its_estimator() -> None:
    config = compose("algorithm.adv_estimator=dara", "+algorithm.dara={variant: positive}")
    assert list(sections_in_use(config.algorithm)) == ["dara"]
    with mock.patch.dict(REGISTRY, {"dara": sevens}):
        assert list(sections_in_use(config.algorithm)) == []
        assert not uses_verl_ext(config)


GRPO = "algorithm.adv_estimator=grpo"
FILTER = "algorithm.filter_groups"
FILTERED = (GRPO, f"++{FILTER}.enable=True")
FUNCTION = "reward.custom_reward_function.path"
# The overrides of a run, and the only entry with which the run uses verl_ext.
USED: dict[str, tuple[tuple[str, ...], str]] = {
    "an estimator": ((MAXRL,), "algorithm.adv_estimator"),
    "a preset": (("+verl_ext=gdpo", GRPO, "~algorithm.verl_ext"), "verl_ext_presets"),
    "the section verl_ext": ((GRPO, "+algorithm.verl_ext.share_prompts=False"), "algorithm.verl_ext"),
    "a filter of any reward": ((*FILTERED, f"++{FILTER}.metric=any_reward"), f"{FILTER}.metric"),
    "a filter by accuracy": ((*FILTERED, f"++{FILTER}.metric=accuracy_between"), f"{FILTER}.metric"),
    "a reward function": ((GRPO, f"{FUNCTION}=pkg://verl_ext.rewards.gsm8k"), FUNCTION),
    "a section": ((GRPO, "+algorithm.rewards.keys=[acc]"), "algorithm.rewards"),
}


@pytest.mark.parametrize("case", USED)
def test_a_run_with_one_entry_of_verl_ext_uses_it(case: str) -> None:
    overrides, path = USED[case]
    assert list(entries_in_use(compose(*overrides))) == [path]


def known_configurations() -> list[tuple[str, str]]:
    """Return the folder in verl and the name of each configuration of verl."""
    paths = [*HOME.glob("trainer/config/*.yaml"), *HOME.glob("experimental/*/config/*.yaml")]
    configurations = []
    for path in sorted(paths):
        if not path.name.startswith("_"):
            folder = path.parent.relative_to(HOME)
            configurations.append((str(folder), path.stem))
    return configurations


@functools.cache
def composed(folder: str, name: str) -> Any:
    """Return a configuration of verl."""
    with hydra.initialize_config_dir(str(HOME / folder), version_base=None):
        return hydra.compose(name, overrides=["hydra.searchpath=[pkg://verl.trainer.config]"])


@pytest.mark.parametrize(("folder", "name"), known_configurations())
def test_every_configuration_of_verl_is_accepted(folder: str, name: str) -> None:
    config = copy.deepcopy(composed(folder, name))
    if "algorithm" not in config:
        assert check_run(config) is None
        return
    run = check_run(config)
    assert run is not None
    assert not run.uses_verl_ext


OTHER_NAMES = ["grpo", "rloo", "gae", "gdpo2", "gd2po_hard", "my_dgpo", "hadw_v2", "maxrl-x", "composer", "gd"]
NAMES = st.one_of(
    st.sampled_from(OTHER_NAMES),
    st.sampled_from(ADDED_ESTIMATORS),
    st.text("abcdghmoprwx2_", min_size=1, max_size=8),
)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 5), st.floats(-2, 2), st.sampled_from(["", "linear", "${nothing}", "???"])
)
WORDS = [*entries_read(), *(field.name for field in fields(RewardsSettings)), "rewrds", "gdop", "keyz", "steps"]
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=3),
    max_leaves=6,
)
PATHS = [
    *(f"algorithm.{word}" for word in WORDS),
    *WORDS,
    "verl_exp",
    "verl_ex",
    "verlext",
    "reward",
    "rollout",
    "trainer.use_v1",
    "algorithm.filter_groups",
    "algorithm.filter_groups.metric",
    "algorithm.use_pf_ppo",
    "reward.custom_reward_function.path",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.actor.checkpoint.save_contents",
    "actor_rollout_ref.actor.loss_agg_mode",
    "reward_model.reward_manager",
    "data.train_files",
]


def config_with(name: str, entries: dict[str, Any]) -> Any:
    """Return verl's configuration with an estimator and other entries."""
    config = copy.deepcopy(composed("trainer/config", "ppo_trainer"))
    OmegaConf.set_struct(config, False)
    config.algorithm.adv_estimator = name
    for path, value in entries.items():
        OmegaConf.update(config, path, value, merge=False, force_add=True)
    return config


def is_anagram_of_ours(name: str) -> bool:
    """Return whether an unknown name has the letters of a name of verl_ext in another order, which is an error."""
    if name in REGISTRY or name in ADDED_ESTIMATORS:
        return False
    return any(sorted(name) == sorted(estimator) for estimator in ADDED_ESTIMATORS)


@given(
    name=NAMES,
    registered=st.sets(st.sampled_from(ADDED_ESTIMATORS), max_size=3),
    entries=st.dictionaries(st.sampled_from(PATHS), VALUES, max_size=4),
)
def test_a_run_without_verl_ext_is_not_refused_whatever_it_sets(
    name: str, registered: set[str], entries: dict[str, Any]
) -> None:
    config = config_with(name, entries)
    if not OmegaConf.is_dict(config.get("algorithm")):
        return
    with mock.patch.dict(REGISTRY, dict.fromkeys(registered, sevens)):
        uses_section = bool(list(sections_in_use(config.algorithm)) or select(config, "algorithm.verl_ext"))
        if computed_by_verl_ext(name) or is_anagram_of_ours(name) or uses_section:
            return
        run = check_run(config)
        assert run is not None
        assert not run.uses_verl_ext
        judge(config)
