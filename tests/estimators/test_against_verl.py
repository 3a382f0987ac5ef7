"""Estimators against verl's own functions on the same tensors."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from tests import reference
from tests.batches import Rollout, rollouts
from tests.calls import call, object_array, tensors
from tests.estimators.estimator_variants import call_on_rollout

core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")

PROMPT_TOKENS = 2
# verl uses the raw reward of a group of one, where verl_ext has no advantage.
COMPARABLE = {"nan": False, "lengths": 1, "smallest": 2, "few": True}


def verl_gdpo(rollout: Rollout, weights: list[float] | None, *, norm_by_std: bool = True) -> torch.Tensor:
    """Return the advantages of verl's own gdpo."""
    _, response_mask = tensors([0.0] * len(rollout.uids), rollout.lengths)
    prompt_mask = torch.ones(len(response_mask), PROMPT_TOKENS, dtype=response_mask.dtype)
    columns = {key: np.array(column) for key, column in rollout.columns.items()}
    config = OmegaConf.create({"gdpo_reward_keys": list(columns), "gdpo_reward_weights": weights})
    batch = {
        "prompts": torch.zeros(len(response_mask), PROMPT_TOKENS),
        "attention_mask": torch.cat([prompt_mask, response_mask], dim=1),
    }
    advantages, _ = core_algos.compute_gdpo_outcome_advantage(
        token_level_rewards=torch.zeros(response_mask.shape),
        response_mask=response_mask,
        index=object_array(rollout.uids),
        norm_adv_by_std_in_grpo=norm_by_std,
        config=config,
        non_tensor_batch=columns,
        batch=batch,
    )
    return advantages


def has_canceling_group(rollout: Rollout, sums: list[float]) -> bool:
    """Return whether a reward varies in a group, but the sums of the group are 0."""
    for rows in reference.groups(rollout.uids).values():
        rewards_of_group = [[column[row] for row in rows] for column in rollout.columns.values()]
        some_reward_varies = any(map(reference.has_variance, rewards_of_group))
        if some_reward_varies and not any(sums[row] for row in rows):
            return True
    return False


@pytest.mark.parametrize("norm_by_std", [True, False])
@given(
    rollout=rollouts(keys=("a", "b", "c"), **COMPARABLE),
    weights=st.one_of(st.none(), st.lists(st.sampled_from([1.0, 0.5, 2.0, -1.0]), min_size=3, max_size=3)),
)
def test_gdpo_whitened_over_tokens_equals_gdpo_of_verl(rollout, weights, norm_by_std):
    """verl_ext sets a group whose rewards cancel to 0. verl keeps a residual of about 1e-6, and whitens it."""
    sums = reference.gdpo(
        rollout.columns,
        rollout.uids,
        rollout.lengths,
        weights=weights or [1.0, 1.0, 1.0],
        scale="std" if norm_by_std else "none",
        whiten="none",
    )
    assume(max(map(abs, sums)) > 0.1)
    assume(not has_canceling_group(rollout, sums))
    config = {"gdpo": {"whiten": "token"}, "norm_adv_by_std_in_grpo": norm_by_std}
    config["gdpo_reward_keys"] = list(rollout.columns)
    config["gdpo_reward_weights"] = weights

    advantages = call_on_rollout("gdpo", config, rollout, dtype=torch.float32).tensor

    expected = verl_gdpo(rollout, weights, norm_by_std=norm_by_std)
    torch.testing.assert_close(advantages, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("mean", "distance"), [(0, 1e-6), (10, 1e-5), (1000, 1e-3)])
def test_gdpo_is_as_close_to_gdpo_of_verl_as_documented(mean, distance):
    """Two rewards with standard deviation 1 in 20 random batches of 8 groups. The docstring of gdpo has the numbers."""
    random = np.random.default_rng(mean)
    uids = [f"group {row // 6}" for row in range(48)]
    config = {"rewards": {"keys": ["a", "b"]}, "gdpo": {"whiten": "token"}}
    for _ in range(20):
        columns = {key: random.normal(mean, 1, 48).tolist() for key in ("a", "b")}
        lengths = random.integers(1, 33, 48).tolist()
        rollout = Rollout(uids, columns, lengths, accuracy=[0.0] * 48)
        advantages = call_on_rollout("gdpo", config, rollout, dtype=torch.float32).tensor
        torch.testing.assert_close(advantages, verl_gdpo(rollout, None), atol=distance, rtol=0)


@given(rollout=rollouts(**COMPARABLE), norm_by_std=st.booleans())
def test_the_base_of_hadw_equals_grpo_of_verl(rollout, norm_by_std):
    """In the first batch, the soft anchor equals the accuracy of the batch. With lambda 1, all weights are 1."""
    scores = rollout.columns["a"]
    config = {"norm_adv_by_std_in_grpo": norm_by_std, "hadw": {"lambda_scale": 1.0}}
    accuracy = {"acc": np.array(rollout.accuracy)}

    result = call("hadw", scores, rollout.uids, rollout.lengths, config=config, components=accuracy)

    rewards, mask = tensors(scores, rollout.lengths, torch.float64)
    expected, _ = core_algos.compute_grpo_outcome_advantage(
        token_level_rewards=rewards,
        response_mask=mask,
        index=object_array(rollout.uids),
        norm_adv_by_std_in_grpo=norm_by_std,
    )
    torch.testing.assert_close(result.tensor, expected, atol=1e-9, rtol=1e-9, equal_nan=False)
