"""Losses of verl that take their mean in their own way, which depends on the version of verl."""

from __future__ import annotations

import pytest
import torch
import verl
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig

from tests.integration.config.judged import DRGRPO_LOSS, ONE_UPDATE, refusal, warnings_of
from tests.integration.configs import compose
from verl_ext.integration.compat.versions import SELF_AGGREGATING, TESTED
from verl_ext.integration.config.checks import check_run


def under_drgrpo(loss: str) -> tuple[str, ...]:
    return ("algorithm.adv_estimator=drgrpo", *DRGRPO_LOSS, f"actor_rollout_ref.actor.policy_loss.loss_mode={loss}")


@pytest.mark.parametrize(("version", "refused"), [("0.9.0", True), ("0.9.1", False)])
def test_gspo_takes_its_mean_in_its_own_way_in_verl_0_9_0_alone(
    version: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl.__version__", version)
    if refused:
        assert "policy_loss.loss_mode=gspo" in refusal(*under_drgrpo("gspo"))
    else:
        check_run(compose(*under_drgrpo("gspo")))


def test_a_loss_of_an_unknown_version_of_verl_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("verl.__version__", "99.0")
    for loss in ("sapo", "gspo"):
        (warning,) = warnings_of(caplog, *under_drgrpo(loss))
        assert f"policy_loss.loss_mode={loss}" in warning
        assert "99.0" in warning
    token = ("actor_rollout_ref.actor.policy_loss.loss_mode=sapo", *ONE_UPDATE)
    (warning,) = warnings_of(caplog, "algorithm.adv_estimator=dgpo", *token)
    assert "policy_loss.loss_mode=sapo" in warning
    assert warnings_of(caplog, "algorithm.adv_estimator=hadw", *token) == []
    assert warnings_of(caplog, *under_drgrpo("vanilla")) == []


def test_the_table_of_losses_is_what_verl_s_losses_do() -> None:
    """Each loss of the installed verl by two ways of taking the mean: equal if it goes its own way."""
    if verl.__version__ not in TESTED:
        pytest.skip(f"the table does not know verl {verl.__version__}")
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]])
    old = torch.linspace(-1.2, -0.1, 12).reshape(3, 4)
    new = old + torch.linspace(-0.1, 0.15, 12).reshape(3, 4)
    advantages = torch.tensor([[1.0], [-2.0], [3.0]]) * mask

    def value(name: str, mode: str) -> float:
        policy = PolicyLossConfig(loss_mode=name)
        if name == "dro":
            object.__setattr__(policy, "dro_beta", 1.0)
        config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=policy)
        loss, _ = core_algos.POLICY_LOSS_REGISTRY[name](
            old_log_prob=old,
            log_prob=new,
            advantages=advantages,
            response_mask=mask,
            loss_agg_mode=mode,
            config=config,
        )
        return float(loss)

    modes = ("token-mean", "seq-mean-token-sum")
    own_way = {
        name
        for name, function in core_algos.POLICY_LOSS_REGISTRY.items()
        if function.__module__ == core_algos.__name__ and value(name, modes[0]) == value(name, modes[1])
    }
    assert own_way == SELF_AGGREGATING[verl.__version__]
