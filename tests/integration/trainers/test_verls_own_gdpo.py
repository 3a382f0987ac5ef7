"""A configuration written for verl's own gdpo, on `RayPPOTrainer`: the same numbers with this package installed."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from verl.trainer.ppo import core_algos

from tests.integration.trainers.ray_runs import own_fit

NAMED = ("algorithm.adv_estimator=gdpo", "++algorithm.gdpo_reward_keys=[acc,format]", "++algorithm.gdpo.whiten=token")
WEIGHED = "++algorithm.gdpo_reward_weights=[1.0,0.25]"


@pytest.mark.parametrize("more", [(), (WEIGHED, "+verl_ext=gdpo")], ids=["plain", "weights"])
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
