"""Runs that use nothing of this package, in an environment that has it: their names, their settings, their trainers."""

import copy
import functools
import os
import textwrap
from collections.abc import Iterator
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
from verl_ext.names import owner
from verl_ext.registry import ADDED_ESTIMATORS, entries_read
from verl_ext.run_config import entries_in_use, sections_in_use, select, uses_verl_ext
from verl_ext.settings import RewardsSettings
from verl_ext.trainers.mixin import TrainerMixin, prepare_run

HOME = Path(verl.__file__).parent
REGISTRY = core_algos.ADV_ESTIMATOR_REGISTRY
MAXRL = "algorithm.adv_estimator=maxrl"
HIS = """
from verl.trainer.ppo.core_algos import register_adv_est

@register_adv_est("maxrl")
def his_maxrl(token_level_rewards, response_mask, **_):
    return 7 * response_mask, 7 * response_mask
"""
ASKED = """
import verl
{after}
from verl.trainer.ppo import core_algos
from verl_ext.cli import main
print("FOUND", core_algos.get_adv_estimator_fn("maxrl").__name__)
more = ["actor_rollout_ref.rollout.n=8", "actor_rollout_ref.actor.use_dynamic_bsz=True"]
print("CHECK", main(["check", "algorithm.adv_estimator=maxrl", *more]))
print("PRESET", main(["check", "+verl_ext=maxrl", *more]))
print("DOCTOR", main(["doctor"]))
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_name_that_somebody_registers_stays_his(tmp_path: Path, when: str) -> None:
    """Before: in a module of VERL_USE_EXTERNAL_MODULES. After: in the program, once verl has loaded the plugin."""
    (tmp_path / "colleague.py").write_text(HIS)
    code = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n"
    code += ASKED.format(after="import colleague" if when == "after" else "")
    more = {"VERL_USE_EXTERNAL_MODULES": "colleague"} if when == "before" else {}
    done = fresh.run(textwrap.dedent(code), environment={**os.environ, **more})
    assert "FOUND his_maxrl" in done.stdout, f"{done.stdout}\n{done.stderr}"
    assert a_line_says(done.stdout, "estimator", "maxrl", "colleague")
    assert not a_line_says(done.stdout, "steps", "divide_by_mean")
    for line in ("CHECK 0", "PRESET 1", "DOCTOR 0"):
        assert line in done.stdout, done.stdout
    assert a_line_says(done.stdout, "error", "maxrl", "colleague")
    assert a_line_says(done.stdout, "note", "maxrl", "colleague")
    assert a_line_says(done.stdout, "ok", "dgpo", "verl_ext")


def his(token_level_rewards: Any, response_mask: Any, **_: Any) -> Any:
    return 7.0 * response_mask, 7.0 * response_mask


def test_his_run_trains_his_numbers_and_counts_as_one_without_this_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTRY, "maxrl", his)
    trainer = OwnFit(compose(MAXRL, "algorithm.use_kl_in_reward=True"))  # our maxrl refuses it
    assert trainer._verl_ext is None
    [(data, metrics)] = trainer.fit(steps=1)
    assert advantages_per_row(data) == [7] * 8
    assert not [name for name in metrics if name.startswith(("maxrl", "reward/"))]


def test_the_section_of_his_estimator_is_his(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTRY, "dvao", his)
    config = compose("algorithm.adv_estimator=dvao", "+algorithm.dvao.beta=3", "+algorithm.rewards.log=all")
    assert judge(config).errors == []


def test_verls_registry_stays_as_it_is_and_only_its_gdpo_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {*ADDED_ESTIMATORS} & {*REGISTRY} == {"gdpo"}
    assert REGISTRY["gdpo"].__module__ == core_algos.__name__
    assert computed_by_verl_ext("gdpo")
    monkeypatch.setitem(REGISTRY, "gdpo", his)
    assert core_algos.get_adv_estimator_fn("gdpo") is his


def test_a_name_of_this_package_that_verl_registers_later_is_verls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTRY, "maxrl", REGISTRY["rloo"])
    assert not computed_by_verl_ext("maxrl")
    assert owner("maxrl") == core_algos.__name__


def test_a_function_that_names_no_module_is_somebodys_too(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}
    exec("def made(**_): ...", made)
    for name in ("maxrl", "gdpo"):
        monkeypatch.setitem(REGISTRY, name, made["made"])
        assert not computed_by_verl_ext(name)


class Callable:
    """A callable object, whose class says that it is verl's."""

    __module__ = core_algos.__name__

    def __call__(self, token_level_rewards: Any, response_mask: Any, **_: Any) -> Any:
        return his(token_level_rewards, response_mask)


def wrapping(verls: Any) -> dict[str, Any]:
    """What somebody may register in the place of a function of verl's, with verl's `__module__`."""
    partial = functools.update_wrapper(functools.partial(his), verls)
    return {"wrapped": functools.wraps(verls)(his_of_any_batch), "partial": partial, "object": Callable()}


def his_of_any_batch(**given: Any) -> Any:
    return his(given["token_level_rewards"], given["response_mask"])


WRAPPING = pytest.mark.parametrize("kind", ["wrapped", "partial", "object"])


@WRAPPING
def test_a_function_that_wraps_verls_is_somebodys_whatever_its_module_says(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    his_gdpo = wrapping(REGISTRY["gdpo"])[kind]
    assert his_gdpo.__module__ == core_algos.__name__
    monkeypatch.setitem(REGISTRY, "gdpo", his_gdpo)
    assert core_algos.get_adv_estimator_fn("gdpo") is his_gdpo
    assert not computed_by_verl_ext("gdpo")
    assert owner("gdpo") == (__name__ if kind == "wrapped" else "another package")
    his_section = ("algorithm.adv_estimator=gdpo", "+algorithm.gdpo.his=3")
    assert judge(compose(*his_section, "+algorithm.rewards.log=all")).errors == []
    trainer = OwnFit(compose(*his_section))
    assert trainer._verl_ext is None
    [(data, _)] = trainer.fit(steps=1)
    assert advantages_per_row(data) == [7] * 8


@WRAPPING
def test_verl_is_not_said_to_compute_what_a_function_that_wraps_verls_computes(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by the rule on groups of one response, by the message on a preset, or by the rule on losses."""
    alone = compose("algorithm.adv_estimator=rloo", "actor_rollout_ref.rollout.n=1")
    assert any("verl's rloo" in str(finding) for finding in judge(alone).findings)
    monkeypatch.setitem(REGISTRY, "rloo", wrapping(REGISTRY["rloo"])[kind])
    assert not any("verl's rloo" in str(finding) for finding in judge(alone).findings)
    monkeypatch.setitem(REGISTRY, "gdpo", wrapping(REGISTRY["gdpo"])[kind])
    [refused] = map(str, judge(compose("+verl_ext=gdpo")).errors)
    assert "another package" in refused or __name__ in refused
    assert core_algos.__name__ not in refused
    assert aggregates_itself("sapo")
    losses = core_algos.POLICY_LOSS_REGISTRY
    monkeypatch.setitem(losses, "sapo", wrapping(losses["sapo"])[kind])
    assert aggregates_itself("sapo") is False


@pytest.mark.parametrize("batches_before", [0, 1])
def test_one_that_is_registered_after_the_trainer_was_made_ends_the_step(
    batches_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the metrics of the batch before were not logged."""
    trainer = OwnFit(compose("+verl_ext=drgrpo", "algorithm.rewards.keys=[acc]"))
    for _ in range(batches_before):
        trainer.advantages()
    monkeypatch.setitem(REGISTRY, "drgrpo", his)
    with pytest.raises(IntegrationError, match="drgrpo"):
        trainer.advantages()


def start(config: Any) -> Any:
    """Call what verl's main programs call before Ray."""
    return starts.wrap_checked(lambda config: config, config)


def test_in_the_driver_a_name_may_be_anothers_who_registers_it_where_his_trainer_runs(
    main_program: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """In a main program of his own, or by modules that Ray's processes import; `rollout.n=1` is verl's default."""
    mine, verls = None, "verl.trainer.main_ppo"
    modules = "+ray_kwargs.ray_init.runtime_env.env_vars={VERL_USE_EXTERNAL_MODULES: colleague}"
    alone = (MAXRL, "actor_rollout_ref.rollout.n=1")
    for module, overrides in ((mine, alone), (verls, (*alone, modules))):
        config = compose(*overrides)
        main_program(module)
        caplog.clear()
        assert start(config) is config
        assert any("rollout.n=1" in text for text in caplog.messages)
        with pytest.raises(ConfigurationError):
            check_run(config)  # as the trainer, if nobody has registered the name there
    for module, overrides in ((verls, alone), (mine, (*alone, "+algorithm.rewards.keys=[a]"))):
        main_program(module)
        with pytest.raises(ConfigurationError):
            start(compose(*overrides))


def test_a_name_that_nobody_has_registered_is_warned_of_in_the_driver_of_verls_main(
    main_program: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another main program may register it in the trainer's process."""
    config = compose("algorithm.adv_estimator=gdop")
    for module, warned in (("verl.trainer.main_ppo", True), (None, False)):
        main_program(module)
        monkeypatch.setattr(starts, "_summarized", [])
        caplog.clear()
        assert start(config) is config
        assert any("'gdpo'" in text for text in caplog.messages) == warned


TRIED: dict[str, tuple[str, ...]] = {
    "a section at the top": ("algorithm.adv_estimator=grpo", "+rewards.foo=1"),
    "an estimator that another package registers elsewhere": ("algorithm.adv_estimator=gdpo2",),
    "a section with one of our names": ("algorithm.adv_estimator=grpo", "+algorithm.rewards={shaping: linear}"),
    "an entry with one of our names": ("algorithm.adv_estimator=rloo", "+algorithm.compose=docker"),
    "a name like the presets'": ("algorithm.adv_estimator=grpo", "+verl_exp=mine"),
    "what verl reads otherwise": ("algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.checkpoint.save_contents=3"),
    "no section of rewards": ("algorithm.adv_estimator=grpo", "~reward"),
    "a filter that is not enabled": ("algorithm.adv_estimator=grpo", "++algorithm.filter_groups.metric=any_reward"),
    "an experimental trainer": ("algorithm.adv_estimator=grpo", "+rollout.n=1", "+algorithm.rewards={}"),
}


@pytest.mark.parametrize("case", TRIED)
def test_a_run_without_this_package_is_not_refused(case: str) -> None:
    config = compose(*TRIED[case])
    run = check_run(config)
    assert run is not None
    assert not run.uses_verl_ext
    assert prepare_run(TrainerMixin.__new__(TrainerMixin), config) is None
    assert judge(config).errors == []


def test_a_section_belongs_to_the_package_that_registers_an_estimator_of_its_name() -> None:
    config = compose("algorithm.adv_estimator=dara", "+algorithm.dara={variant: positive}")
    assert list(sections_in_use(config.algorithm)) == ["dara"]
    with mock.patch.dict(REGISTRY, {"dara": his}):
        assert list(sections_in_use(config.algorithm)) == []
        assert not uses_verl_ext(config)


GRPO = "algorithm.adv_estimator=grpo"
FILTER = "algorithm.filter_groups"
FILTERED = (GRPO, f"++{FILTER}.enable=True")
FUNCTION = "reward.custom_reward_function.path"
# Overrides, and the entry with which the run uses the package: there is no other.
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
def test_one_entry_of_this_package_is_enough_for_a_run_to_use_it(case: str) -> None:
    overrides, path = USED[case]
    assert list(entries_in_use(compose(*overrides))) == [path]


def known_configurations() -> Iterator[tuple[str, str]]:
    """The configurations that verl has: their folders in verl, and their names."""
    for path in sorted([*HOME.glob("trainer/config/*.yaml"), *HOME.glob("experimental/*/config/*.yaml")]):
        if not path.name.startswith("_"):
            yield str(path.parent.relative_to(HOME)), path.stem


@functools.cache
def composed(folder: str, name: str) -> Any:
    with hydra.initialize_config_dir(str(HOME / folder), version_base=None):
        return hydra.compose(name, overrides=["hydra.searchpath=[pkg://verl.trainer.config]"])


@pytest.mark.parametrize(("folder", "name"), [*known_configurations()])
def test_every_configuration_of_verl_goes_on(folder: str, name: str) -> None:
    config = copy.deepcopy(composed(folder, name))
    if "algorithm" not in config:
        assert check_run(config) is None
        return
    run = check_run(config)
    assert run is not None
    assert not run.uses_verl_ext


NAMES = st.one_of(
    st.sampled_from(["grpo", "rloo", "gae", "gdpo2", "gd2po_hard", "my_dgpo", "hadw_v2", "maxrl-x", "composer", "gd"]),
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
PLACES = st.sampled_from(
    [
        *(f"algorithm.{word}" for word in WORDS),
        *WORDS,
        *("verl_exp", "verl_ex", "verlext", "reward", "rollout", "trainer.use_v1", "algorithm.filter_groups"),
        *("algorithm.filter_groups.metric", "algorithm.use_pf_ppo", "reward.custom_reward_function.path"),
        *("actor_rollout_ref.rollout.n", "actor_rollout_ref.actor.checkpoint.save_contents"),
        *("actor_rollout_ref.actor.loss_agg_mode", "reward_model.reward_manager", "data.train_files"),
    ]
)


@given(
    name=NAMES,
    registered=st.sets(st.sampled_from(ADDED_ESTIMATORS), max_size=3),
    entered=st.dictionaries(PLACES, VALUES, max_size=4),
)
def test_whatever_a_stranger_writes_and_registers_his_run_is_not_refused(
    name: str, registered: set[str], entered: dict[str, Any]
) -> None:
    config = copy.deepcopy(composed("trainer/config", "ppo_trainer"))
    OmegaConf.set_struct(config, False)
    config.algorithm.adv_estimator = name
    for place, value in entered.items():
        OmegaConf.update(config, place, value, merge=False, force_add=True)
    if not OmegaConf.is_dict(config.get("algorithm")):
        return
    with mock.patch.dict(REGISTRY, dict.fromkeys(registered, his)):
        known = {*REGISTRY, *ADDED_ESTIMATORS}
        moved = name not in known and any(sorted(name) == sorted(ours) for ours in ADDED_ESTIMATORS)
        of_ours = [*sections_in_use(config.algorithm), *filter(None, [select(config, "algorithm.verl_ext")])]
        if computed_by_verl_ext(name) or moved or of_ours:
            return
        run = check_run(config)
        assert run is not None
        assert not run.uses_verl_ext
        judge(config)
