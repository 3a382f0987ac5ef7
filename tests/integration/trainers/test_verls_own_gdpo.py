"""A configuration written for verl's own gdpo, on `RayPPOTrainer`: the same numbers with this package installed."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from verl.trainer.ppo import core_algos

from tests.integration.trainers.ray_runs import own_fit, per_row

NAMED = ("algorithm.adv_estimator=gdpo", "++algorithm.gdpo_reward_keys=[acc,format]")
WEIGHED = "++algorithm.gdpo_reward_weights=[1.0,0.25]"


@pytest.mark.parametrize("more", [(), (WEIGHED,), ("+verl_ext=gdpo",)], ids=["plain", "weights", "preset"])
def test_verls_names_keep_verls_numbers(more: tuple[str, ...]) -> None:
    _, [(ours, _)] = own_fit(*more, *NAMED)
    theirs = core_algos.ADV_ESTIMATOR_REGISTRY["gdpo"].replaced
    assert theirs is core_algos.compute_gdpo_outcome_advantage
    with (
        mock.patch.dict(core_algos.ADV_ESTIMATOR_REGISTRY, {"gdpo": theirs}),
        mock.patch("verl_ext.integration.run.Run.require_called"),  # it requires ours
    ):
        _, [(verls, metrics)] = own_fit(*more, *NAMED)
    assert "advantage/std" not in metrics  # verl's own function ran
    torch.testing.assert_close(ours.batch["advantages"], verls.batch["advantages"], atol=1e-6, rtol=0)
    assert ours.batch["advantages"].abs().max() > 1


def test_our_names_whiten_over_sequences() -> None:
    """Lengths differ, so that the two means do."""
    _, [(verls, _)] = own_fit(*NAMED)
    _, [(ours, _)] = own_fit("algorithm.adv_estimator=gdpo", "+algorithm.rewards.keys=[acc,format]")
    assert sum(per_row(ours)) == pytest.approx(0.0, abs=1e-6)
    assert abs(sum(per_row(verls))) > 0.5
