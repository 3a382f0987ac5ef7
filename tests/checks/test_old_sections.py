"""The old sections of rewards: verl ignores their settings. Each is reported with the setting that replaces it."""

import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from verl.experimental.reward_loop import migrate_legacy_reward_impl

from tests.checks.config_files import write_config
from tests.configs import compose
from tests.facts import says
from verl_ext.checks import start as starts
from verl_ext.checks.judge import check_run, log_run
from verl_ext.checks.verl_settings import old_sections
from verl_ext.cli import main
from verl_ext.errors import ConfigurationError

GRPO = "algorithm.adv_estimator=grpo"
GDPO = ("algorithm.adv_estimator=gdpo", "+algorithm.rewards.keys=[acc,format]")
COMPLETE = ("actor_rollout_ref.rollout.n=8", "actor_rollout_ref.actor.use_dynamic_bsz=True")
MANAGER = "reward_model.reward_manager=dapo"
BUFFER = "+reward_model.reward_kwargs.overlong_buffer_cfg"
OLD_SETTINGS = (
    MANAGER,
    f"{BUFFER}.enable=True",
    f"{BUFFER}.len=4096",
    f"{BUFFER}.penalty_factor=1.0",
    "+reward_model.reward_kwargs.max_resp_len=${data.max_response_length}",
    "reward_model.num_workers=2",
    "custom_reward_function.path='a b.py'",
    "custom_reward_function.name=score",
    "sandbox_fusion.max_concurrent=3",
    "sandbox_fusion.url='http://host:8080/run?x=é,1'",
    "reward_model.enable=True",
    "reward_model.model.path=judge",
    "reward_model.rollout.name=vllm",
    "reward_model.reward_loop_source=importlib",
    "reward_model.reward_loop_module_path=mine.py",
    "reward_model.rollout.cudagraph_capture_sizes=[1,2]",
)


def override_of(finding):
    """Return the only word of a fix that sets a value."""
    words = shlex.split(finding.fix)
    return next(word for word in words if "=" in word)


def test_each_old_setting_is_reported_by_its_name():
    findings = sorted(old_sections(compose(GRPO, *OLD_SETTINGS)))
    settings = sorted(override.lstrip("+").partition("=")[0] for override in OLD_SETTINGS)
    assert len(findings) == len(settings)
    for finding, setting in zip(findings, settings, strict=True):
        assert says(finding, setting, "main_ppo")


def test_fixes_do_the_same_as_the_migration_of_verl():
    fixes = [override_of(finding) for finding in old_sections(compose(GRPO, *OLD_SETTINGS))]
    fixed = compose(GRPO, *OLD_SETTINGS, *fixes)
    assert list(old_sections(fixed)) == []

    reward = OmegaConf.to_container(fixed.reward, resolve=True)
    migrated_config = migrate_legacy_reward_impl(compose(GRPO, *OLD_SETTINGS))
    migrated = OmegaConf.to_container(migrated_config.reward, resolve=True)
    # verl's migration also copies settings that the user has not set: this name, and others of the sandbox.
    assert reward["reward_manager"]["module"].pop("name") == "custom_reward_manager"
    del migrated["reward_manager"]["module"]["name"]
    sandbox = reward.pop("sandbox_fusion")
    migrated_sandbox = migrated.pop("sandbox_fusion")
    assert reward == migrated
    assert sandbox["max_concurrent"] == 3
    assert migrated_sandbox["max_concurrent"] == 3


def test_setting_without_a_replacement_is_reported():
    (finding,) = old_sections(compose(GRPO, "reward_model.model.trust_remote_code=True"))
    assert says(finding.text, "reward_model.model.trust_remote_code=true")
    assert finding.fix == "Remove reward_model.model.trust_remote_code."


@pytest.mark.parametrize(
    "settings",
    [
        ("reward_model.enable=False", "reward_model.num_workers=8", "reward_model.reward_manager=naive"),
        (MANAGER, "reward.reward_manager.name=dapo"),
        (MANAGER, "+async_training.staleness_threshold=0.1"),
        (),
    ],
)
def test_setting_in_effect_or_migrated_by_verl_is_not_reported(settings):
    assert list(old_sections(compose(GRPO, *settings))) == []


@pytest.fixture
def new_driver(monkeypatch):
    """Reset what verl_ext remembers about the run of this process."""
    monkeypatch.setattr(starts, "_summarized", [])


def validated(config):
    """Call the wrapper of a function of verl that returns its configuration."""
    return starts.wrap_checked(lambda argument: argument, config)


@pytest.mark.usefixtures("new_driver")
def test_old_settings_are_an_error_of_the_main_program_of_verl(main_program):
    """This program does not read them."""
    main_program("verl.trainer.main_ppo")
    with pytest.raises(ConfigurationError, match=r"reward\.reward_manager\.name=dapo"):
        validated(compose(*GDPO, MANAGER))


@pytest.mark.usefixtures("new_driver")
@pytest.mark.parametrize("module", ["recipe.dapo.main_dapo", None])
def test_old_settings_are_a_warning_of_another_main_program(main_program, caplog, module):
    """Another program may migrate or read them, as those of verl's recipes do."""
    main_program(module)
    config = compose(*GDPO, MANAGER)
    assert validated(config) is config
    assert any("reward.reward_manager.name=dapo" in text for text in caplog.messages)


def test_nothing_is_logged_for_a_run_without_verl_ext(caplog):
    caplog.set_level("INFO", "verl_ext")
    config = compose(GRPO, MANAGER, "actor_rollout_ref.rollout.top_k=1")
    assert validated(config) is config
    log_run(check_run(config))
    assert caplog.messages == []


def test_worker_does_not_reject_old_settings(monkeypatch):
    """The driver has judged them: only the driver knows the main program."""
    import ray

    worker = Path(ray.__file__).parent / "_private/workers" / starts.WORKER
    assert worker.is_file()
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=str(worker)))
    assert validated(compose(*GDPO, MANAGER)) is not None
    assert check_run(compose(*GDPO, MANAGER)) is not None


@pytest.mark.parametrize("command", [["check"], ["rehearse", "--rows", "0"]], ids=" ".join)
def test_commands_report_old_settings_as_the_main_program_of_verl_does(tmp_path, capsys, command):
    file = write_config(tmp_path, "defaults: [ppo_trainer, _self_]\n")
    assert main([*command, GRPO, MANAGER, *COMPLETE, "--config", str(file)]) == 1
    output = capsys.readouterr().out
    assert says(output, MANAGER)
    assert not says(output, "verl's own checks")
