"""What verl does not read is warned of where somebody has typed it or written it in a file; a default is not."""

import pytest
from omegaconf import OmegaConf

from tests.checks.fixes import ways
from tests.checks.test_presets import judged
from tests.facts import says
from verl_ext.cli import main

ACTOR, FUNCTION, KWARGS = "actor_rollout_ref.actor", "reward.custom_reward_function", "reward.reward_kwargs"
# What is written, and the setting with which verl reads it.
UNREAD = {
    f"{ACTOR}.kl_loss_coef=0.01": f"{ACTOR}.use_kl_loss=True",
    "algorithm.kl_ctrl.kl_coef=0.01": "algorithm.use_kl_in_reward=True",
    "algorithm.filter_groups.metric=acc": "algorithm.filter_groups.enable=True",
    "algorithm.rollout_correction.rollout_is_threshold=3": "algorithm.rollout_correction.rollout_is=token",
    f"{FUNCTION}.name=score": f"{FUNCTION}.path=FILE",
    "reward.reward_model.model_path=judge": "reward.reward_model.enable=True",
    f"{ACTOR}.clip_ratio=0.3": f"{ACTOR}.clip_ratio_low=0.3",
}
READ = [*UNREAD.values()]
PENALTY = (f"+{KWARGS}.overlong_buffer_cfg={{enable: true, len: 9}}", f"+{KWARGS}.max_resp_len=99")
GDPO, GRPO, MANAGER = "verl_ext: gdpo, ", "algorithm.adv_estimator=grpo", "reward.reward_manager"
DAPO = f"{MANAGER}.name=dapo"
KEYS = "+algorithm.rewards.keys=[acc,format]"


@pytest.fixture
def warned(tmp_path):
    """The warnings about a command line, with these settings and presets in the user's file."""

    def judge(*overrides, file=("trainer.project_name=mine",), presets=""):
        head = f"hydra: {{searchpath: ['pkg://verl.trainer.config']}}\ndefaults: [ppo_trainer, {presets}_self_]\n"
        (tmp_path / "mine.yaml").write_text(head + OmegaConf.to_yaml(OmegaConf.from_dotlist([*file])))
        return [finding for finding in judged(tmp_path, *overrides).findings if finding.severity == "warning"]

    return judge


@pytest.mark.parametrize("place", ["typed", "in the file"])
def test_each_is_warned_of_with_the_setting_that_it_needs(place, warned):
    warnings = warned(GRPO, *UNREAD) if place == "typed" else warned(GRPO, file=UNREAD)
    assert len(warnings) == len(UNREAD)
    for given, switch in UNREAD.items():
        (warning,) = (warning for warning in warnings if says(warning, given.split("=")[0], switch))
        read, removed = ways(warning.fix)
        assert switch in read[0]
        assert removed[1] == [given.split("=")[0]]


def test_what_is_a_default_or_0_or_deleted_or_in_a_file_of_verls_is_not(warned, capsys):
    typed = (f"~{ACTOR}.kl_loss_coef", f"{ACTOR}.clip_ratio=0.2", "algorithm.kl_ctrl={kl_coef: 0.0, horizon: null}")
    assert warned(GRPO, *typed, file=[f"{ACTOR}.kl_loss_coef=1"]) == []
    main(["check", "--config-path=config", GRPO, "actor_rollout_ref.rollout.n=8"])
    assert says(capsys.readouterr().out, "0 warnings")


# Presets of the file, the command line, and facts of the one warning, or none.
WARNED = {
    "switched on": ("", (GRPO, *UNREAD, *READ), ()),
    "switched off in so many words": ("", (GRPO, *UNREAD, *(switch.replace("True", "False") for switch in READ)), ()),
    "arguments of naive": ("", (GRPO, *PENALTY), ("naive", f"{KWARGS}.max_resp_len", "name=dapo")),
    "one that dapo lacks": ("", (GRPO, DAPO, f"+{KWARGS}.max_len=9"), ("dapo", f"{KWARGS}.max_len", "max_resp_len")),
    "those that dapo has": ("", (GRPO, DAPO, *PENALTY), ()),
    "a manager by another name": ("", (GRPO, f"{MANAGER}.name=mine", *PENALTY), ()),
    "a manager in a file": ("", (GRPO, f"{MANAGER}.source=importlib", *PENALTY), ()),
    "a preset that cpu replaces": (GDPO, ("verl_ext=cpu",), ("'verl_ext=[cpu,gdpo]'",)),
    "keys without a preset": ("", ("+verl_ext=cpu", KEYS), ("'+verl_ext=[cpu,gdpo]'",)),
    "both presets": (GDPO, ("verl_ext=[cpu,gdpo]", KEYS[1:]), ()),
    "keys of grpo": (GDPO, ("verl_ext=cpu", KEYS, GRPO), ()),
    "keys of a gae that is chosen": (GDPO, ("verl_ext=cpu", KEYS, "algorithm.adv_estimator=gae"), ()),
    "verl's gae": ("", ("+verl_ext=cpu",), ()),
}  # fmt: skip


@pytest.mark.parametrize("case", WARNED)
def test_only_what_is_not_read_is_warned_of(case, warned):
    presets, overrides, wanted = WARNED[case]
    warnings = warned(*overrides, presets=presets)
    assert [says(text, *wanted) for text in warnings] == [True] * bool(wanted), warnings
