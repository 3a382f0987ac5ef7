"""The old reward sections: what verl drops is named with the line that has its effect."""

import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from verl.experimental.reward_loop import migrate_legacy_reward_impl

from tests.configs import compose
from tests.facts import says
from verl_ext.checks import start as starts
from verl_ext.checks.judge import check_run, log_run
from verl_ext.checks.verl_settings import old_sections
from verl_ext.cli import main
from verl_ext.errors import ConfigurationError

GRPO, N = "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8"
DYNAMIC = "actor_rollout_ref.actor.use_dynamic_bsz=True"
GDPO = ("algorithm.adv_estimator=gdpo", "+algorithm.rewards.keys=[acc,format]")
MANAGER = "reward_model.reward_manager=dapo"
BUFFER = "+reward_model.reward_kwargs.overlong_buffer_cfg"
SETTINGS = (
    *(MANAGER, f"{BUFFER}.enable=True", f"{BUFFER}.len=4096", f"{BUFFER}.penalty_factor=1.0"),
    *("+reward_model.reward_kwargs.max_resp_len=${data.max_response_length}", "reward_model.num_workers=2"),
    *("custom_reward_function.path='a b.py'", "custom_reward_function.name=score", "sandbox_fusion.max_concurrent=3"),
    "sandbox_fusion.url='http://host:8080/run?x=é,1'",
    *("reward_model.enable=True", "reward_model.model.path=judge", "reward_model.rollout.name=vllm"),
    *("reward_model.reward_loop_source=importlib", "reward_model.reward_loop_module_path=mine.py"),
    "reward_model.rollout.cudagraph_capture_sizes=[1,2]",
)


def lines(config):
    """The line of each fix: its one word with a value."""
    words = (shlex.split(finding.fix) for finding in old_sections(config))
    return [next(word for word in fix if "=" in word) for fix in words]


def test_every_setting_is_named_and_the_lines_to_write_do_what_verls_own_migration_does():
    config = compose(GRPO, *SETTINGS)
    texts = list(old_sections(config))
    assert len(texts) == len(SETTINGS)
    for text, setting in zip(sorted(texts), sorted(SETTINGS, key=lambda word: word.lstrip("+")), strict=True):
        assert says(text, setting.lstrip("+").partition("=")[0], "main_ppo")
    written = compose(GRPO, *SETTINGS, *lines(config))
    assert list(old_sections(written)) == []
    migrated = OmegaConf.to_container(migrate_legacy_reward_impl(compose(GRPO, *SETTINGS)).reward, resolve=True)
    # verl's own migration takes these two along although nobody has set them.
    del migrated["reward_manager"]["module"]["name"]
    expected = OmegaConf.to_container(written.reward, resolve=True)
    assert expected["reward_manager"]["module"].pop("name") == "custom_reward_manager"
    assert {**expected, "sandbox_fusion": 0} == {**migrated, "sandbox_fusion": 0}
    assert expected["sandbox_fusion"]["max_concurrent"] == migrated["sandbox_fusion"]["max_concurrent"] == 3


def test_a_setting_that_has_no_place_any_more_is_said():
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
def test_what_is_in_force_and_what_verl_migrates_itself_are_left_alone(settings):
    assert list(old_sections(compose(GRPO, *settings))) == []


@pytest.mark.parametrize("module", ["verl.trainer.main_ppo", "recipe.dapo.main_dapo", None])
def test_they_are_an_error_of_verls_own_main_which_does_not_read_them_and_a_warning_of_another(
    main_program, monkeypatch, caplog, module
):
    """Another main may migrate or read them, as those of verl's recipes do."""
    main_program(module)
    monkeypatch.setattr(starts, "_summarized", [])
    config = compose(*GDPO, MANAGER)
    if module == "verl.trainer.main_ppo":
        with pytest.raises(ConfigurationError, match=r"reward\.reward_manager\.name=dapo"):
            starts.wrap_checked(lambda config: config, config)
    else:
        assert starts.wrap_checked(lambda config: config, config) is config
        assert any("reward.reward_manager.name=dapo" in text for text in caplog.messages)


def test_a_run_without_this_package_goes_on_without_a_word(caplog):
    caplog.set_level("INFO", "verl_ext")
    config = compose(GRPO, MANAGER, "actor_rollout_ref.rollout.top_k=1")
    assert starts.wrap_checked(lambda given: given, config) is config
    log_run(check_run(config))
    assert caplog.messages == []


def test_a_worker_leaves_it_to_the_driver_which_knows_the_main(monkeypatch):
    import ray

    worker = Path(ray.__file__).parent / "_private/workers" / starts.WORKER
    assert worker.is_file()
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=str(worker)))
    assert starts.wrap_checked(lambda given: given, compose(*GDPO, MANAGER)) is not None
    assert check_run(compose(*GDPO, MANAGER)) is not None


@pytest.mark.parametrize("command", ["check", "rehearse"])
def test_the_commands_speak_of_verls_own_main(tmp_path, capsys, command):
    (tmp_path / "config").mkdir()
    text = "hydra: {searchpath: ['pkg://verl.trainer.config']}\ndefaults: [ppo_trainer, _self_]\n"
    (tmp_path / "config/mine.yaml").write_text(text)
    words = [GRPO, N, MANAGER, DYNAMIC, "--config", str(tmp_path / "config/mine.yaml")]
    assert main([command, *words, *(["--rows", "0"] if command == "rehearse" else [])]) == 1
    out = capsys.readouterr().out
    assert says(out, MANAGER)
    assert not says(out, "verl's own checks")
