"""A faster update whose gradient would differ is rejected, with the line to change."""

import pytest

from tests.checks.fix_overrides import fix_alternatives
from tests.configs import compose as compose_with_hydra
from tests.configs import compose_quickly as compose
from verl_ext.checks.judge import judge
from verl_ext.update import rule
from verl_ext.update.rule import ACTOR, EXACT, MODEL, NOT_EXACT, REF, ROLLOUT, SHARE, SKIP

GRPO = ("algorithm.adv_estimator=grpo",)
GDPO = ("algorithm.adv_estimator=gdpo", "+algorithm.rewards.keys=[a,b]")
SKIP_ON = (f"+{SKIP}=True",)
SHARE_ON = (f"+{SHARE}=True", f"{ACTOR}.use_dynamic_bsz=True")
CORRECTION = "algorithm.rollout_correction"
CORRECTION_OF_LOSS = f"{ACTOR}.policy_loss.rollout_correction"
LOSS = f"{ACTOR}.policy_loss.loss_mode"
NORM = f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm"

NOT_WITH_SKIP = {
    f"{ACTOR}.strategy": (f"{ACTOR}.strategy=megatron",),
    f"{ACTOR}.loss_scale_factor": (NORM,),
    f"{ACTOR}.use_kl_loss": (f"{ACTOR}.use_kl_loss=True",),
    f"{ACTOR}.entropy_coeff": (f"{ACTOR}.entropy_coeff=0.001",),
    f"{ACTOR}.calculate_entropy": (f"{ACTOR}.calculate_entropy=True",),
    "distillation.enabled": ("distillation.enabled=True",),
    f"{CORRECTION_OF_LOSS}.rollout_is_batch_normalize": (
        f"+{CORRECTION_OF_LOSS}={{loss_type: reinforce, rollout_is_batch_normalize: True}}",
    ),
    f"{CORRECTION}.rollout_is_batch_normalize": (
        f"{CORRECTION}.bypass_mode=True",
        f"{CORRECTION}.loss_type=reinforce",
        f"{CORRECTION}.rollout_is_batch_normalize=True",
    ),
}
"""The setting that an error names, and the overrides that cause the error."""
NOT_WITH_SHARE = {
    f"{ACTOR}.strategy": (f"{ACTOR}.strategy=megatron",),
    f"{ACTOR}.loss_scale_factor": (NORM,),
    LOSS: (f"{LOSS}=geo_mean",),
    f"{ROLLOUT}.log_prob_use_dynamic_bsz": (f"{ROLLOUT}.log_prob_use_dynamic_bsz=False",),
    f"{REF}.log_prob_use_dynamic_bsz": (f"{REF}.log_prob_use_dynamic_bsz=False",),
    f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": (f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2",),
    f"{REF}.pad_to_length": (f"++{REF}.pad_to_length=True",),
    f"{MODEL}.use_fused_kernels": (f"{MODEL}.use_fused_kernels=True",),
    f"{ACTOR}.shuffle": (f"{ACTOR}.shuffle=True",),
    f"{ACTOR}.fsdp_config.full_determinism": (f"{ACTOR}.fsdp_config.full_determinism=True",),
    f"{REF}.fsdp_config.full_determinism": (f"{REF}.fsdp_config.full_determinism=True",),
    "distillation.enabled": ("distillation.enabled=True",),
}


def assert_both_fixes_work(error, line, setting, overrides):
    """Fail unless the error proposes to change `line` or to switch `setting` off, and both end the error."""
    change_of_verl, switch_off = (added for added, _ in fix_alternatives(error.fix))
    assert any(text.startswith(f"{line}=") for text in change_of_verl)
    assert switch_off == [f"{setting}=False"]
    for added in (change_of_verl, switch_off):
        assert error not in judge(compose(*overrides, *added)).errors


@pytest.mark.parametrize("estimator", [GRPO, GDPO], ids=["grpo", "gdpo"])
@pytest.mark.parametrize("line", NOT_WITH_SKIP)
def test_setting_that_needs_zero_advantage_rows_rejects_skip_zero_advantage(line, estimator):
    without_skip = (*estimator, *NOT_WITH_SKIP[line])
    assert judge(compose(*without_skip)).errors == []
    with_skip = (*without_skip, *SKIP_ON)
    [error] = judge(compose(*with_skip)).errors
    assert_both_fixes_work(error, line, SKIP, with_skip)


@pytest.mark.parametrize("line", NOT_WITH_SHARE)
def test_setting_that_cannot_be_packed_rejects_share_prompts(line):
    overrides = (*GRPO, *NOT_WITH_SHARE[line])
    assert judge(compose(*overrides, f"{ACTOR}.use_dynamic_bsz=True")).errors == []
    errors = judge(compose(*overrides, *SHARE_ON)).errors
    lines = []
    for error in errors:
        change_of_verl, _ = next(fix_alternatives(error.fix))
        named_line = change_of_verl[-1].partition("=")[0]
        assert_both_fixes_work(error, named_line, SHARE, (*overrides, *SHARE_ON))
        lines.append(named_line)
    assert line in lines


def test_fixed_number_of_rows_rejects_share_prompts():
    overrides = (*GRPO, f"+{SHARE}=True")  # verl's default is use_dynamic_bsz=False
    error, *_ = judge(compose(*overrides)).errors
    assert_both_fixes_work(error, f"{ACTOR}.use_dynamic_bsz", SHARE, overrides)


def test_every_loss_of_verl_is_listed():
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    assert set(POLICY_LOSS_REGISTRY) <= {*EXACT, *NOT_EXACT}


@pytest.mark.parametrize("loss", EXACT)
def test_loss_to_which_zero_advantage_rows_add_nothing_is_accepted(loss):
    assert judge(compose(*GRPO, *SKIP_ON, f"{LOSS}={loss}")).findings == ()


@pytest.mark.parametrize(("loss", "severity"), [*((name, "error") for name in NOT_EXACT), ("custom_loss", "warning")])
def test_other_loss_is_rejected_or_warned_about(loss, severity):
    [finding] = judge(compose(*GRPO, *SKIP_ON, f"{LOSS}={loss}")).findings
    assert finding.severity == severity
    assert_both_fixes_work(finding, LOSS, SKIP, (*GRPO, *SKIP_ON))


@pytest.mark.parametrize(
    "overrides",
    [
        GRPO,
        (*GDPO, f"{CORRECTION}.bypass_mode=True"),
        ("algorithm.adv_estimator=drgrpo", NORM, f"{ACTOR}.loss_scale_factor=512"),
        (*GDPO, f"{ACTOR}.strategy=fsdp2"),
    ],
    ids=["grpo", "bypass mode", "norm with a scale", "fsdp2"],
)
@pytest.mark.parametrize("settings", [SKIP_ON, SHARE_ON, (*SKIP_ON, *SHARE_ON)], ids=["skip", "share", "both"])
def test_supported_configuration_has_no_findings(overrides, settings):
    assert judge(compose(*overrides, *settings)).findings == ()


def test_share_prompts_supports_losses_with_a_gradient_in_every_row():
    losses = (f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.entropy_coeff=0.001", f"{LOSS}=dro")
    assert judge(compose(*GRPO, *losses, *SHARE_ON)).errors == []


@pytest.fixture
def gpu_with(monkeypatch):
    """Return a function that fakes a machine with a GPU, on which only these packages are installed."""

    def fake(*installed, gpu=True):
        monkeypatch.setattr(rule, "find_spec", lambda name: object() if name in installed else None)
        monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)

    return fake


def lines_without_flash_attn(*overrides, compose=compose):
    """Return, for each finding about flash-attn, the lines that it proposes."""
    findings = judge(compose(*GRPO, *overrides)).findings
    lines = []
    for finding in findings:
        if "flash-attn" in str(finding):
            proposed, _ = next(fix_alternatives(finding.fix))
            lines.append(proposed)
    return lines


SDPA = f"++{MODEL}.override_config.attn_implementation=sdpa"
FUSED = f"{MODEL}.use_fused_kernels=True"


@pytest.mark.parametrize("not_packed", [(), *NOT_WITH_SHARE.values()], ids=str)
def test_gpu_without_flash_attn_gets_lines_that_end_the_warning(gpu_with, not_packed):
    """The lines share prompts if the run supports it. Otherwise they pad rows."""
    assert lines_without_flash_attn(*not_packed) == []  # a machine without a GPU only checks the run
    gpu_with()
    [proposed] = lines_without_flash_attn(*not_packed)
    assert SDPA in proposed
    can_be_packed = not not_packed
    assert (f"++{SHARE}=True" in proposed) == can_be_packed
    assert (FUSED in proposed) != can_be_packed
    verdict = judge(compose(*GRPO, *not_packed, *proposed))
    assert verdict.errors == []
    assert not any("flash-attn" in str(finding) for finding in verdict.findings)


class TestLinesWithoutFlashAttn:
    """Which lines are proposed depends on what is installed and set."""

    def test_nothing_with_flash_attn(self, gpu_with):
        gpu_with("flash_attn")
        assert lines_without_flash_attn() == []
        assert lines_without_flash_attn(SDPA) == []

    def test_nothing_without_a_gpu(self, gpu_with):
        gpu_with(gpu=False)
        assert lines_without_flash_attn() == []

    def test_only_log_probs_with_the_package_kernels(self, gpu_with):
        gpu_with("kernels")  # downloads flash attention
        [with_kernels] = lines_without_flash_attn()
        assert FUSED in with_kernels
        gpu_with()
        assert lines_without_flash_attn(SDPA) == [with_kernels]

    @pytest.mark.parametrize("settings", [(FUSED,), SKIP_ON, SHARE_ON], ids=["fused", "skip", "share"])
    def test_nothing_if_log_probs_are_fast(self, gpu_with, settings):
        gpu_with()
        assert lines_without_flash_attn(SDPA, *settings) == []


@pytest.mark.parametrize("not_packed", [(), (f"{ACTOR}.shuffle=True",)], ids=["packed", "padded"])
def test_hydra_can_read_the_proposed_lines(gpu_with, not_packed):
    gpu_with()
    [proposed] = lines_without_flash_attn(*not_packed, compose=compose_with_hydra)
    assert lines_without_flash_attn(*not_packed, *proposed, compose=compose_with_hydra) == []
    preset = ("+verl_ext=gdpo", "algorithm.adv_estimator=gdpo", "algorithm.rewards.keys=[a,b]")
    assert judge(compose_with_hydra(*preset, *not_packed, *proposed)).errors == []
