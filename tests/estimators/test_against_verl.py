"""Against verl's own functions on the same tensors."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from tests import reference
from tests.batches import Rollout, rollouts
from tests.calls import call, object_array, tensors
from tests.estimators.every import run

core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")


# verl lets the raw reward of a group of one through; here it has no advantage.
COMPARABLE = {"nan": False, "lengths": 1, "smallest": 2, "few": True}


def verl_gdpo(rollout: Rollout, weights, *, norm_by_std: bool = True) -> torch.Tensor:
    _, mask = tensors([0.0] * len(rollout.uids), rollout.lengths)
    advantages, _ = core_algos.compute_gdpo_outcome_advantage(
        token_level_rewards=torch.zeros(mask.shape),
        response_mask=mask,
        index=object_array(rollout.uids),
        norm_adv_by_std_in_grpo=norm_by_std,
        config=OmegaConf.create({"gdpo_reward_keys": list(rollout.columns), "gdpo_reward_weights": weights}),
        non_tensor_batch={key: np.array(column) for key, column in rollout.columns.items()},
        # prompts of two tokens, then the response
        batch={
            "prompts": torch.zeros(len(mask), 2),
            "attention_mask": torch.cat([torch.ones(len(mask), 2, dtype=mask.dtype), mask], dim=1),
        },
    )
    return advantages


@pytest.mark.parametrize("norm_by_std", [True, False])
@given(
    rollout=rollouts(keys=("a", "b", "c"), **COMPARABLE),
    weights=st.one_of(st.none(), st.lists(st.sampled_from([1.0, 0.5, 2.0, -1.0]), min_size=3, max_size=3)),
)
def test_gdpo_whitened_over_tokens_equals_that_of_verl(rollout, weights, norm_by_std):
    wanted = verl_gdpo(rollout, weights, norm_by_std=norm_by_std)
    # Where the rewards cancel, verl whitens what float32 leaves of them.
    summed = reference.gdpo(
        rollout.columns,
        rollout.uids,
        rollout.lengths,
        weights=weights or [1.0] * 3,
        scale="std" if norm_by_std else "none",
        whiten="none",
    )
    assume(max(map(abs, summed)) > 0.1)
    config = {
        "gdpo_reward_keys": list(rollout.columns),
        "gdpo_reward_weights": weights,
        "gdpo": {"whiten": "token"},
        "norm_adv_by_std_in_grpo": norm_by_std,
    }
    found = run("gdpo", config, rollout, dtype=torch.float32)
    torch.testing.assert_close(found.tensor, wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("mean", "distance"), [(0, 1e-6), (10, 1e-5), (1000, 1e-3)])
def test_gdpo_differs_from_that_of_verl_by_as_little_as_its_docstring_says(mean, distance):
    draw = np.random.default_rng(mean)
    for _ in range(20):
        columns = {key: draw.normal(mean, 1, 48).tolist() for key in "ab"}
        lengths = draw.integers(1, 33, 48).tolist()
        rollout = Rollout([f"group {row // 6}" for row in range(48)], columns, lengths, [0.0] * 48)
        config = {"rewards": {"keys": ["a", "b"]}, "gdpo": {"whiten": "token"}}
        found = run("gdpo", config, rollout, dtype=torch.float32)
        torch.testing.assert_close(found.tensor, verl_gdpo(rollout, None), atol=distance, rtol=0)


@given(rollout=rollouts(**COMPARABLE), norm_by_std=st.booleans())
def test_the_base_of_hadw_equals_grpo_of_verl(rollout, norm_by_std):
    """lambda 1, and an anchor that no weighing can differ from: the first batch of the soft one."""
    scores = rollout.columns["a"]
    rewards, mask = tensors(scores, rollout.lengths, torch.float64)
    wanted, _ = core_algos.compute_grpo_outcome_advantage(
        token_level_rewards=rewards,
        response_mask=mask,
        index=object_array(rollout.uids),
        norm_adv_by_std_in_grpo=norm_by_std,
    )
    config = {"norm_adv_by_std_in_grpo": norm_by_std, "hadw": {"lambda_scale": 1.0}}
    found = call(
        "hadw",
        scores,
        rollout.uids,
        rollout.lengths,
        config=config,
        components={"acc": np.array(rollout.accuracy)},
    )
    torch.testing.assert_close(found.tensor, wanted, atol=1e-9, rtol=1e-9, equal_nan=False)
