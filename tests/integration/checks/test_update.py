"""Where a row without advantage changes the update, `skip_zero_advantage` is refused with the line to change."""

from __future__ import annotations

import pytest

from tests.integration.checks.test_rules import compose
from verl_ext.integration.checks import judge
from verl_ext.integration.checks.update import EXACT, NOT_EXACT, SETTING

ACTOR = "actor_rollout_ref.actor"
ON = f"+{SETTING}=True"
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


@pytest.mark.parametrize("estimator", ["grpo", "gdpo"])
@pytest.mark.parametrize("line", REFUSED)
def test_it_is_refused_for_every_estimator(line, estimator):
    run = GDPO if estimator == "gdpo" else ("algorithm.adv_estimator=grpo",)
    errors = judge(compose(*run, ON, *REFUSED[line])).errors
    assert len(errors) == 1
    assert f"set {line}=" in errors[0]
    assert judge(compose(*run, *REFUSED[line])).errors == ()  # without the setting


def test_verl_s_losses_are_known():
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    assert set(POLICY_LOSS_REGISTRY) <= {*EXACT, *NOT_EXACT}


@pytest.mark.parametrize("loss", [*EXACT, *NOT_EXACT, "of_my_own"])
def test_losses(loss):
    verdict = judge(compose("algorithm.adv_estimator=grpo", ON, f"{ACTOR}.policy_loss.loss_mode={loss}"))
    assert bool(verdict.errors) == (loss in NOT_EXACT)
    assert bool(verdict.warnings) == (loss == "of_my_own")


@pytest.mark.parametrize(
    "overrides",
    [
        ("algorithm.adv_estimator=grpo",),
        (*GDPO, "algorithm.rollout_correction.bypass_mode=True"),
        ("algorithm.adv_estimator=drgrpo", NORM, f"{ACTOR}.loss_scale_factor=512"),
        (*GDPO, f"{ACTOR}.strategy=fsdp2"),
    ],
)
def test_it_is_accepted_without_a_word(overrides):
    verdict = judge(compose(*overrides, ON))
    assert (verdict.errors, verdict.warnings) == ((), ())


def test_whitening_over_tokens_is_warned_of():
    (warning,) = judge(compose(*GDPO, ON, "+algorithm.gdpo.whiten=token")).warnings
    assert "whiten=sequence" in warning
