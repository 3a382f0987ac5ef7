"""Where a faster update would have another gradient, it is rejected with the line to change."""

import pytest

from tests.checks.fix_overrides import fix_alternatives
from tests.configs import compose as hydra
from tests.configs import compose_quickly as compose
from verl_ext.checks.judge import judge
from verl_ext.update import rule as update
from verl_ext.update.rule import EXACT, NOT_EXACT, SHARE, SKIP

ACTOR = "actor_rollout_ref.actor"
ON = f"+{SKIP}=True"
PACKED = (f"+{SHARE}=True", f"{ACTOR}.use_dynamic_bsz=True")
CORRECTION = "algorithm.rollout_correction"
GDPO = ("algorithm.adv_estimator=gdpo", "+algorithm.rewards.keys=[a,b]")
BYPASS = (f"{CORRECTION}.bypass_mode=True", f"{CORRECTION}.loss_type=reinforce")
OF_THE_LOSS = "rollout_correction.rollout_is_batch_normalize"
NORM = f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm"

REFUSED = {
    f"{ACTOR}.strategy": (f"{ACTOR}.strategy=megatron",),
    f"{ACTOR}.loss_scale_factor": (NORM,),
    f"{ACTOR}.use_kl_loss": (f"{ACTOR}.use_kl_loss=True",),
    f"{ACTOR}.entropy_coeff": (f"{ACTOR}.entropy_coeff=0.001",),
    f"{ACTOR}.calculate_entropy": (f"{ACTOR}.calculate_entropy=True",),
    "distillation.enabled": ("distillation.enabled=True",),
    f"{ACTOR}.policy_loss.{OF_THE_LOSS}": (
        f"+{ACTOR}.policy_loss.rollout_correction={{loss_type: reinforce, rollout_is_batch_normalize: True}}",
    ),
    f"{CORRECTION}.rollout_is_batch_normalize": (*BYPASS, f"{CORRECTION}.rollout_is_batch_normalize=True"),
}


ROLLOUT, REF, MODEL = (f"actor_rollout_ref.{part}" for part in ("rollout", "ref", "model"))
NOT_PACKED = {
    f"{ACTOR}.strategy": REFUSED[f"{ACTOR}.strategy"],
    f"{ACTOR}.loss_scale_factor": (NORM,),
    f"{ACTOR}.policy_loss.loss_mode": (f"{ACTOR}.policy_loss.loss_mode=geo_mean",),
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


def assert_fixes(error, line, setting, overrides):
    """An error names the line and the setting, with values with which it does not come again."""
    other, off = (added for added, _ in fix_alternatives(error.fix))
    assert any(text.startswith(f"{line}=") for text in other)
    assert off == [f"{setting}=False"]
    for added in (other, off):
        assert error not in judge(compose(*overrides, *added)).errors


@pytest.mark.parametrize("estimator", ["grpo", "gdpo"])
@pytest.mark.parametrize("line", REFUSED)
def test_leaving_rows_out_is_refused_for_every_estimator(line, estimator):
    run = GDPO if estimator == "gdpo" else ("algorithm.adv_estimator=grpo",)
    (error,) = judge(compose(*run, ON, *REFUSED[line])).errors
    assert_fixes(error, line, SKIP, (*run, ON, *REFUSED[line]))
    assert judge(compose(*run, *REFUSED[line])).errors == []  # without the setting


@pytest.mark.parametrize("line", NOT_PACKED)
def test_computing_a_prompt_once_is_refused(line):
    run = ("algorithm.adv_estimator=grpo", *NOT_PACKED[line])
    errors = judge(compose(*run, *PACKED)).errors
    lines = [next(fix_alternatives(error.fix))[0][-1].partition("=")[0] for error in errors]
    assert line in lines
    for named, error in zip(lines, errors, strict=True):
        assert_fixes(error, named, SHARE, (*run, *PACKED))
    assert judge(compose(*run, *PACKED[1:])).errors == []


def test_micro_batches_with_a_fixed_number_of_rows_are_refused():
    run = ("algorithm.adv_estimator=grpo", PACKED[0])  # verl's default
    error, *_ = judge(compose(*run)).errors
    assert_fixes(error, f"{ACTOR}.use_dynamic_bsz", SHARE, run)


def test_verl_s_losses_are_known():
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    assert set(POLICY_LOSS_REGISTRY) <= {*EXACT, *NOT_EXACT}


@pytest.mark.parametrize("loss", [*EXACT, *NOT_EXACT, "of_my_own"])
def test_losses(loss):
    verdict = judge(compose("algorithm.adv_estimator=grpo", ON, f"{ACTOR}.policy_loss.loss_mode={loss}"))
    severity = "error" if loss in NOT_EXACT else "warning"
    found = loss in NOT_EXACT or loss == "of_my_own"
    assert [finding.severity for finding in verdict.findings] == [severity] * found
    for finding in verdict.findings:
        assert_fixes(finding, f"{ACTOR}.policy_loss.loss_mode", SKIP, ("algorithm.adv_estimator=grpo", ON))


@pytest.mark.parametrize(
    "overrides",
    [
        ("algorithm.adv_estimator=grpo",),
        (*GDPO, "algorithm.rollout_correction.bypass_mode=True"),
        ("algorithm.adv_estimator=drgrpo", NORM, f"{ACTOR}.loss_scale_factor=512"),
        (*GDPO, f"{ACTOR}.strategy=fsdp2"),
    ],
)
@pytest.mark.parametrize("settings", [(ON,), PACKED, (ON, *PACKED)], ids=["skip", "share", "both"])
def test_it_is_accepted_without_a_word(overrides, settings):
    assert judge(compose(*overrides, *settings)).findings == ()


def test_a_prompt_is_computed_once_with_a_loss_in_every_row():
    rows = (f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.entropy_coeff=0.001", f"{ACTOR}.policy_loss.loss_mode=dro")
    assert judge(compose("algorithm.adv_estimator=grpo", *rows, *PACKED)).errors == []


@pytest.fixture
def without(monkeypatch):
    """Fakes a machine with a GPU, on which these packages alone are installed."""

    def fake(*installed, gpu=True):
        monkeypatch.setattr(update, "find_spec", lambda name: object() if name in installed else None)
        monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)

    return fake


def lines(*overrides, compose=compose):
    """The lines to set where flash-attn is missing."""
    findings = judge(compose("algorithm.adv_estimator=grpo", *overrides)).findings
    return [next(fix_alternatives(finding.fix))[0] for finding in findings if "flash-attn" in str(finding)]


SDPA = f"++{MODEL}.override_config.attn_implementation=sdpa"
KERNELS = f"{MODEL}.use_fused_kernels=True"


@pytest.mark.parametrize("refused", [(), *NOT_PACKED.values()], ids=str)
def test_a_gpu_without_flash_attn_is_named_with_lines_that_end_the_warning(without, refused):
    """Packed where prompts can be shared, else padded, with verl's own log-probabilities."""
    assert lines(*refused) == []  # without a GPU the run is for another machine
    without()
    [proposed] = lines(*refused)
    assert SDPA in proposed
    # The engine of another strategy, and a loss without a divisor, are refused without flash-attn, too.
    assert (f"++{SHARE}=True" in proposed) == (not refused)
    assert (KERNELS in proposed) == bool(refused)
    verdict = judge(compose("algorithm.adv_estimator=grpo", *refused, *proposed))
    assert verdict.errors == []
    assert not any("flash-attn" in str(finding) for finding in verdict.findings)


def test_lines_for_a_gpu_without_flash_attn_depend_on_what_is_installed_and_set(without):
    without("flash_attn")
    assert lines() == lines(SDPA) == []
    without("kernels")  # attention from a hub
    [fused] = lines()
    assert KERNELS in fused
    without()
    assert lines(SDPA) == [fused]
    assert lines(SDPA, KERNELS) == lines(SDPA, ON) == lines(SDPA, *PACKED) == []
    without(gpu=False)
    assert lines() == []


@pytest.mark.parametrize("refused", [(), (f"{ACTOR}.shuffle=True",)], ids=str)
def test_the_lines_are_read_by_hydra(without, refused):
    without()
    [proposed] = lines(*refused, compose=hydra)
    assert lines(*refused, *proposed, compose=hydra) == []
    with_preset = ("+verl_ext=gdpo", "algorithm.adv_estimator=gdpo", "algorithm.rewards.keys=[a,b]")
    assert judge(hydra(*with_preset, *refused, *proposed)).errors == []
