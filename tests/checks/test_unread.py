"""Settings that verl does not read cause a warning if the user has set them. Defaults do not."""

from dataclasses import dataclass

import pytest
from omegaconf import OmegaConf

from tests.checks.config_files import judge_config, write_config
from tests.checks.fix_overrides import fix_alternatives
from tests.facts import says
from verl_ext.cli import main

ACTOR = "actor_rollout_ref.actor"
FUNCTION = "reward.custom_reward_function"
KWARGS = "reward.reward_kwargs"
MANAGER = "reward.reward_manager"
UNREAD = {
    f"{ACTOR}.kl_loss_coef=0.01": f"{ACTOR}.use_kl_loss=True",
    "algorithm.kl_ctrl.kl_coef=0.01": "algorithm.use_kl_in_reward=True",
    "algorithm.filter_groups.metric=acc": "algorithm.filter_groups.enable=True",
    "algorithm.rollout_correction.rollout_is_threshold=3": "algorithm.rollout_correction.rollout_is=token",
    f"{FUNCTION}.name=score": f"{FUNCTION}.path=FILE",
    "reward.reward_model.model_path=judge": "reward.reward_model.enable=True",
    f"{ACTOR}.clip_ratio=0.3": f"{ACTOR}.clip_ratio_low=0.3",
}
"""Settings that verl does not read by default, each with the switch with which verl reads it."""
SWITCHES = tuple(UNREAD.values())
SWITCHED_OFF = tuple(switch.replace("True", "False") for switch in SWITCHES)
GRPO = "algorithm.adv_estimator=grpo"
KEYS = "+algorithm.rewards.keys=[acc,format]"


@pytest.fixture
def warnings_about(tmp_path):
    """Return a function that returns the warnings about a command line and a file with these settings and presets."""

    def judge(*overrides, file=("trainer.project_name=mine",), preset=None):
        defaults = ["ppo_trainer", *([{"verl_ext": preset}] if preset else []), "_self_"]
        settings = OmegaConf.to_yaml(OmegaConf.from_dotlist(list(file)))
        write_config(tmp_path, OmegaConf.to_yaml({"defaults": defaults}) + settings)
        findings = judge_config(tmp_path, *overrides).findings
        return [finding for finding in findings if finding.severity == "warning"]

    return judge


@pytest.mark.parametrize("place", ["command line", "file"])
def test_each_unread_setting_has_a_warning_with_its_switch(place, warnings_about):
    warnings = warnings_about(GRPO, *UNREAD) if place == "command line" else warnings_about(GRPO, file=UNREAD)
    assert len(warnings) == len(UNREAD)
    for override, switch in UNREAD.items():
        setting = override.partition("=")[0]
        (warning,) = [warning for warning in warnings if says(warning, setting, switch)]
        switched_on, removed = fix_alternatives(warning.fix)
        assert switch in switched_on[0]
        assert removed[1] == [setting]


NOT_SET = {
    "deleted": f"~{ACTOR}.kl_loss_coef",
    "a default": f"{ACTOR}.clip_ratio=0.2",
    "0 or null": "algorithm.kl_ctrl={kl_coef: 0.0, horizon: null}",
}


def test_deleted_and_default_settings_have_no_warning(warnings_about):
    assert warnings_about(GRPO, *NOT_SET.values(), file=[f"{ACTOR}.kl_loss_coef=1"]) == []


def test_settings_of_a_file_of_verl_have_no_warning(capsys):
    main(["check", "--config-path=config", GRPO, "actor_rollout_ref.rollout.n=8"])
    assert says(capsys.readouterr().out, "0 warnings")


@dataclass(frozen=True)
class Case:
    """A command line, the preset of the file, and facts of the only warning. Without facts, there is no warning."""

    overrides: tuple[str, ...]
    preset: str | None = None
    warning: tuple[str, ...] = ()


PENALTY = (f"+{KWARGS}.overlong_buffer_cfg={{enable: true, len: 9}}", f"+{KWARGS}.max_resp_len=99")
DAPO = f"{MANAGER}.name=dapo"
SWITCH_CASES = {
    "switched on": Case((GRPO, *UNREAD, *SWITCHES)),
    "switched off by the user": Case((GRPO, *UNREAD, *SWITCHED_OFF)),
}
MANAGER_CASES = {
    "arguments that naive does not read": Case(
        (GRPO, *PENALTY), warning=("naive", f"{KWARGS}.max_resp_len", "name=dapo")
    ),
    "an argument that dapo does not read": Case(
        (GRPO, DAPO, f"+{KWARGS}.max_len=9"), warning=("dapo", f"{KWARGS}.max_len", "max_resp_len")
    ),
    "arguments that dapo reads": Case((GRPO, DAPO, *PENALTY)),
    "a manager by another name": Case((GRPO, f"{MANAGER}.name=mine", *PENALTY)),
    "a manager in a file": Case((GRPO, f"{MANAGER}.source=importlib", *PENALTY)),
}
CPU_PRESET_CASES = {
    "a preset that cpu replaces": Case(("verl_ext=cpu",), preset="gdpo", warning=("'verl_ext=[cpu,gdpo]'",)),
    "keys without a preset": Case(("+verl_ext=cpu", KEYS), warning=("'+verl_ext=[cpu,gdpo]'",)),
    "both presets": Case(("verl_ext=[cpu,gdpo]", KEYS[1:]), preset="gdpo"),
    "keys of grpo": Case(("verl_ext=cpu", KEYS, GRPO), preset="gdpo"),
    "keys of a selected gae": Case(("verl_ext=cpu", KEYS, "algorithm.adv_estimator=gae"), preset="gdpo"),
    "verl's gae": Case(("+verl_ext=cpu",)),
}
CASES = {**SWITCH_CASES, **MANAGER_CASES, **CPU_PRESET_CASES}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_only_settings_that_verl_does_not_read_have_a_warning(case, warnings_about):
    warnings = warnings_about(*case.overrides, preset=case.preset)
    if case.warning:
        (warning,) = warnings
        assert says(warning, *case.warning)
    else:
        assert warnings == []
