"""Each step by hand, and the errors of a step that is given what it cannot use."""

from __future__ import annotations

import math
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given

from tests.batches import ACC, LENGTHS, UIDS, rollouts
from tests.facts import facts, says
from verl_ext.core.batch import Batch
from verl_ext.core.chain import Chain
from verl_ext.core.history import WeighByHistory
from verl_ext.core.observe import advantage_metrics
from verl_ext.core.steps import (
    Balance,
    Centre,
    Condition,
    Requirement,
    ScaleByMad,
    ScaleByStd,
    Step,
    WeighAndSum,
    WeighByDifficulty,
    Whiten,
)
from verl_ext.core.typed import make
from verl_ext.errors import ConfigurationError

NAN = math.nan


def column(values, uids=None, **given):
    batch = Batch.of([[value] for value in values], uids or ["g"] * len(values), **given)
    return batch.rewards, batch


def apply(step, values, uids=None, **given):
    return step.update(*column(values, uids, **given), step.init()).values[:, 0]


def test_centre_leaves_the_mean_out():
    # Mean of the scored [1, 4] is 2.5; the group "b" of one is 0.
    found = apply(Centre(), [1.0, NAN, 4.0, 7.0], ["a", "a", "a", "b"])
    np.testing.assert_array_equal(found, [-1.5, NAN, 1.5, 0])


@pytest.mark.parametrize("constant", [0.1, 0.2, 0.3, 1 / 3, 1e6 + 0.1, -7.7])
def test_centre_is_exactly_zero_without_variance(constant):
    values = np.float64(np.float32(constant)) * (1 + np.array([0, 1, -1, 0, 1]) * 1e-8)
    assert (apply(Centre(), values) == 0).all()


def test_scale_by_std_uses_n_minus_one_of_the_scored():
    # [1, -1]: variance 2/1, divisor sqrt(2) + 0.5; the group of one has std 0, so 3 / 0.5.
    found = apply(ScaleByStd(0.5), [1.0, NAN, -1.0, 3.0], ["a", "a", "a", "b"])
    np.testing.assert_allclose(found, [1 / (math.sqrt(2) + 0.5), NAN, -1 / (math.sqrt(2) + 0.5), 6])


def test_scale_by_mad_uses_the_number_of_the_scored():
    # [1, -1]: 2 * 1 / (2 + 0.5) = 0.8; [3]: 1 * 3 / (3 + 0.5).
    found = apply(ScaleByMad(0.5), [1.0, NAN, -1.0, 3.0], ["a", "a", "a", "b"])
    np.testing.assert_allclose(found, [0.8, NAN, -0.8, 3 / 3.5])


@pytest.mark.parametrize("epsilon", [0.0, 5e-324])
@pytest.mark.parametrize("kind", [ScaleByStd, ScaleByMad, Whiten])
@pytest.mark.filterwarnings("error")
def test_zeros_stay_zero_whatever_epsilon(kind, epsilon):
    assert (apply(kind(epsilon=epsilon), [0.0, 0.0, 0.0]) == 0).all()
    assert (apply(Whiten("token"), [0.0, 0.0, 0.0]) == 0).all()


def test_epsilons_are_those_of_the_specification():
    assert ScaleByStd().epsilon == 1e-6
    assert ScaleByMad().epsilon == 1e-4
    assert Whiten().epsilon == 1e-6
    assert Whiten().over == "sequence"
    assert WeighByDifficulty().dqw_temp == 2.0
    assert Balance().over == "token"


def test_weigh_and_sum_skips_what_is_not_scored():
    batch = Batch.of([[1, 10], [NAN, 10], [NAN, NAN]], ["g"] * 3, keys=("a", "b"))
    found = WeighAndSum((2.0, 0.5)).apply(batch.rewards, batch)
    np.testing.assert_array_equal(found, [[7], [5], [NAN]])  # 2 * 1 + 0.5 * 10; 0.5 * 10
    np.testing.assert_array_equal(WeighAndSum().apply(batch.rewards, batch), [[11], [10], [NAN]])


def test_a_single_reward_may_weigh_nothing():
    batch = Batch.of([[1], [3]], ["g"] * 2, keys=("a",))
    np.testing.assert_array_equal(WeighAndSum((0.0,)).apply(batch.rewards, batch), [[0], [0]])


def test_the_kl_part_is_added_to_the_sum():
    batch = Batch.of([[1, 10], [NAN, NAN]], ["g"] * 2, keys=("a", "b"), kl_reward=np.array([-0.25, -0.5]))
    np.testing.assert_array_equal(WeighAndSum((2.0, 1.0)).apply(batch.rewards, batch), [[11.75], [NAN]])


def test_a_wrong_number_of_weights_names_the_keys():
    batch = Batch.of([[1, 2]], ["g"], keys=("speed", "style"))
    with pytest.raises(ConfigurationError, match=facts("3 weights", "2 reward keys", "'speed', 'style'")):
        WeighAndSum((1.0, 2.0, 3.0)).apply(batch.rewards, batch)


def test_whitening_over_sequences():
    # [1, -1, 0]: mean 0, variance 2/2 = 1, divisor 1 + 0.5.
    found = apply(Whiten("sequence", 0.5), [1.0, -1.0, NAN, 0.0], lengths=[9, 1, 5, 1])
    np.testing.assert_allclose(found, [1 / 1.5, -1 / 1.5, NAN, 0])


def test_whitening_shifts_to_the_mean():
    # [3, 1]: mean 2, variance (1 + 1) / 1 = 2.
    step, (values, batch) = Whiten("sequence", 0.0), column([3.0, 1.0])
    update = step.update(values, batch, None)
    np.testing.assert_allclose(update.values[:, 0], [1 / math.sqrt(2), -1 / math.sqrt(2)])
    assert update.metrics == pytest.approx({"whiten_shift": 2.0, "whiten_std": math.sqrt(2)})


def test_whitening_shifts_up_as_well_as_down():
    # [-3, -1]: mean -2, variance 2.
    np.testing.assert_allclose(apply(Whiten("sequence", 0.0), [-3.0, -1.0]), [-1 / math.sqrt(2), 1 / math.sqrt(2)])


def test_whitening_over_tokens_counts_a_value_once_a_token():
    # [1 x3, -1 x1]: mean 0.5, variance (3 * 0.25 + 2.25) / 3 = 1.
    found = apply(Whiten("token"), [1.0, -1.0, NAN], lengths=[3, 1, 4])
    np.testing.assert_allclose(found, np.array([0.5, -1.5, NAN]) / math.sqrt(1 + 1e-8), rtol=1e-14)


def test_whitening_over_tokens_adds_to_the_variance():
    # [1e-4, -1e-4]: variance 2e-8, sqrt(2e-8 + 1e-8).
    found = apply(Whiten("token"), [1e-4, -1e-4])
    np.testing.assert_allclose(found, [1 / math.sqrt(3), -1 / math.sqrt(3)])


def test_whitening_keeps_exact_zeros_of_centred_groups():
    # 0.1 + 0.2 - 0.3 is 5.6e-17, not 0: the mean of such a column is rounding, no shift.
    found = apply(Whiten("sequence"), [0.1, 0.2, -0.3, 0.0])
    assert found[3] == 0


@pytest.mark.parametrize("offset", [0.0, 0.7, 10000.7, 1e9 + 0.3, -1e12])
@pytest.mark.parametrize("scale", [(), (ScaleByStd(),), (ScaleByMad(),)], ids=["centred", "std", "mad"])
def test_a_group_without_variance_is_exactly_zero_whatever_the_offset_of_the_others(offset, scale):
    """Of 100 random batches each; the rewards vary by a hundred thousandth of the offset."""
    draw = np.random.default_rng(0)
    for _ in range(100):
        rewards = offset + max(1.0, 1e-5 * abs(offset)) * draw.normal(size=(12, 2))
        rewards[8:] = 0.3
        rewards[11] += 1e-8  # one float32 step
        batch = Batch.of(rewards, list("aaaaabbbcccc"), keys=("x", "y"))
        result = Chain((Centre(), *scale, WeighAndSum(), Whiten()))(batch)
        assert result.advantages[8:].tolist() == [0, 0, 0, 0]
        assert not np.signbit(result.advantages[8:]).any()
        assert advantage_metrics(result.advantages)["advantage/zero_share"] == pytest.approx(4 / 12)
        assert result.metrics["whiten/shift"] == 0


@pytest.mark.parametrize("epsilon", [1e-6, 1e-300])
@pytest.mark.parametrize("over", ["sequence", "token"])
def test_rewards_that_cancel_are_exactly_zero(over, epsilon):
    """1 - a and a, in float32 and with an offset: what is left is rounding."""
    a = np.float64(np.float32([0.1, 0.7, 0.3, 0.9, 0.2, 0.6]))
    for other in (1 - a, np.float64(np.float32(1 - a)), 10000.7 - a):
        batch = Batch.of(np.stack([a, other], axis=1), list("aaabbb"), keys=("x", "y"), lengths=[1, 2, 3, 4, 5, 6])
        chain = Chain((Centre(), ScaleByStd(), WeighAndSum(), Whiten(over, epsilon)))
        found = chain(batch).advantages
        assert found.tolist() == [0] * 6
        assert not np.signbit(found).any()


def test_a_group_whose_rewards_cancel_is_zero_beside_one_whose_rewards_do_not():
    batch = Batch.of([[1, 0], [0, 1], [1, 1], [0, 0]], list("aabb"), keys=("x", "y"))
    found = Chain((Centre(), ScaleByStd(), WeighAndSum(), Whiten()))(batch).advantages
    assert found[:2].tolist() == [0, 0]
    assert found[2] == -found[3] > 1


@pytest.mark.parametrize("weight", [1.0, -1.0])
def test_no_advantage_is_a_negative_zero(weight):
    batch = Batch.of([[1.0], [1.0], [0.0], [2.0]], list("aabb"))
    for steps in ((Centre(), WeighAndSum((weight,))), (Centre(), WeighAndSum((weight,)), Whiten())):
        found = Chain(steps)(batch).advantages
        assert found[:2].tolist() == [0, 0]
        assert not np.signbit(found[:2]).any()


def test_values_that_are_not_centred_in_their_groups_keep_their_shift():
    """[0, 0 | 3, 3]: mean 1.5, variance 4 * 2.25 / 3 = 3. That no group varies does not matter here."""
    found = apply(Whiten("sequence", 0.0), [0.0, 0.0, 3.0, 3.0], list("aabb"))
    np.testing.assert_allclose(found, np.array([-1.5, -1.5, 1.5, 1.5]) / math.sqrt(3))


@pytest.mark.parametrize(("mean", "shifted"), [(0.9e-6, False), (1.1e-6, True), (-1.1e-6, True)])
def test_a_group_is_centred_to_within_a_millionth_of_the_largest_value(mean, shifted):
    """1e-6 where no value is larger than 1, 1e-4 where one is 100."""
    for largest, size in ((0.5, 1.0), (1.0, 1.0), (100.0, 100.0)):
        values = np.array([largest, -largest, NAN, 0.0, 0.0]) + mean * size
        values[3:] = 0.0
        assert bool(apply(Whiten("sequence"), values, list("aaabb"))[3]) == shifted


@pytest.mark.parametrize("over", ["sequence", "token"])
@pytest.mark.filterwarnings("error")
def test_whitening_of_one_value_is_zero(over):
    update = Whiten(over).update(*column([5.0, NAN]), None)
    np.testing.assert_array_equal(update.values[:, 0], [0, NAN])
    assert update.metrics == {"whiten_shift": 5, "whiten_std": 0}


@pytest.mark.filterwarnings("error")
def test_whitening_over_no_tokens_leaves_values_alone():
    update = Whiten("token").update(*column([1.0, -1.0], lengths=[0, 0]), None)
    assert update.values[:, 0].tolist() == [1, -1]
    assert update.metrics == {"whiten_shift": 0, "whiten_std": 0}


def test_balance_undoes_the_share_of_groups_without_variance():
    values = [1.0, -1.0, 0.0, 0.0, 0.0]
    uids = ["a", "a", "b", "b", "b"]
    # 10 tokens, 4 of them in "a"; 5 sequences, 2 of them in "a".
    assert apply(Balance("token"), values, uids, lengths=[1, 3, 2, 2, 2]).tolist() == [2.5, -2.5, 0, 0, 0]
    assert apply(Balance("sequence"), values, uids, lengths=[1, 1, 2, 2, 2]).tolist() == [2.5, -2.5, 0, 0, 0]
    assert apply(Balance("token"), values, uids, lengths=[1, 1, 2, 2, 2]).tolist() == [4, -4, 0, 0, 0]


def test_balance_is_one_where_no_group_is_valid():
    step, (values, batch) = Balance("token"), column([0.0, 0.0])
    wanted = {"balance_z": 1.0, "zero_mask_ratio": 1.0, "dead_share": 1.0}
    assert step.update(values, batch, None).metrics == wanted


def test_an_empty_batch_has_nothing_to_balance():
    batch = Batch.of([], [])
    wanted = {"balance_z": 1.0, "zero_mask_ratio": 1.0, "dead_share": 0.0}
    assert Balance().update(batch.rewards, batch, None).metrics == wanted


def test_balance_logs_the_factor_and_the_share_of_dead_rows():
    step, (values, batch) = Balance("token"), column([1.0, -1.0, 0.0, 0.0, 0.0], list("aabbb"))
    assert step.update(values, batch, None).metrics == pytest.approx(
        {"balance_z": 2.5, "zero_mask_ratio": 2.5, "dead_share": 0.6}  # the authors call z zero_mask_ratio
    )


def test_difficulty_weighs_hard_groups_more():
    accuracy = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0]
    step = WeighByDifficulty(0.5)
    values, batch = column([1.0, -1.0, 2.0, -2.0, 0.0, 0.0], list("aabbcc"), accuracy=accuracy)
    update = step.update(values, batch, None)
    # acc a = 0.5, b = 0, which counts as 1: odds e^-1, e^-2; 2 / (1 + e^-1) = 1.462117 and 0.537883; c has 1.
    np.testing.assert_allclose(update.values[:, 0], [1.462117, -1.462117, 1.075766, -1.075766, 0, 0], atol=1e-6)
    assert update.metrics == pytest.approx(
        {
            "valid_groups": 2,
            "all_right_groups": 1,
            "all_wrong_groups": 1,
            "difficulty_weight_mean": 1,
            "difficulty_weight_max": 1.462117,
            "difficulty_weight_min": 0.537883,
        },
        abs=1e-6,
    )


def test_difficulty_leaves_groups_without_variance_alone():
    values, batch = column([1.0, -1.0, 3.0], list("aab"), accuracy=[1.0, 0.0, 1.0])
    assert WeighByDifficulty().update(values, batch, None).values[:, 0].tolist() == [1, -1, 3]


@pytest.mark.filterwarnings("error")
def test_difficulty_at_a_low_temperature_leaves_the_hardest_alone():
    """exp(-0.25 / 1e-4) alone would be 0 already."""
    values, batch = column([1.0, -1.0, 1.0, -1.0], list("aabb"), accuracy=[0.5, 0.0, 1.0, 0.5])
    assert WeighByDifficulty(1e-4).update(values, batch, None).values[:, 0].tolist() == [2, -2, 0, 0]


def test_a_group_whose_accuracy_is_not_scored_counts_as_easy():
    values, batch = column([1.0, -1.0, 1.0, -1.0], list("aabb"), accuracy=[NAN, NAN, 1.0, 1.0])
    np.testing.assert_allclose(WeighByDifficulty().update(values, batch, None).values, values)  # both 1, weight 1


@given(rollouts())
def test_difficulty_weights_add_up_to_the_number_of_valid_groups(rollout):
    batch = Batch.of(rollout.rewards, rollout.uids, keys=("a", "b"), accuracy=rollout.accuracy)
    metrics = WeighByDifficulty(0.7).update(batch.rewards[:, :1], batch, None).metrics
    if metrics["valid_groups"]:
        assert metrics["difficulty_weight_mean"] == pytest.approx(1)


def test_condition_lets_an_easy_reward_count_where_the_hard_one_was_reached():
    batch = Batch.of([[1, 1.0], [2, 0.5], [3, 0.4], [4, NAN], [NAN, 0.4]], ["g"] * 5, keys=("easy", "hard"))
    step = Condition(MappingProxyType({"easy": Requirement("hard", 0.5)}))
    found = step.apply(batch.rewards, batch)
    np.testing.assert_array_equal(found[:, 0], [1, 2, 0, NAN, NAN])  # at_least: 0.5 is enough
    np.testing.assert_array_equal(found[:, 1], batch.rewards[:, 1])


def test_conditions_read_the_rewards_as_they_were_given():
    """a needs b, b needs c: that b was set to 0 for want of c does not touch a."""
    batch = Batch.of([[5, 1, 0]], ["g"], keys=("a", "b", "c"))
    step = Condition(MappingProxyType({"b": Requirement("c", 1), "a": Requirement("b", 1)}))
    assert step.apply(batch.rewards, batch).tolist() == [[5, 0, 0]]


@pytest.mark.parametrize("conditions", [{"x": Requirement("a", 1)}, {"a": Requirement("x", 1)}])
def test_a_condition_on_an_unknown_reward_lists_the_keys(conditions):
    batch = Batch.of([[1, 2]], ["g"], keys=("a", "b"))
    with pytest.raises(ConfigurationError, match=facts("conditions", "'x'", "'a', 'b'")):
        Condition(MappingProxyType(conditions)).apply(batch.rewards, batch)


@pytest.mark.parametrize("step", [Balance("token"), Balance("sequence"), WeighByDifficulty()])
def test_a_step_for_one_value_refuses_several(step):
    batch = Batch.of([[1, 2]], ["g"], keys=("a", "b"), accuracy=[1.0])
    with pytest.raises(ConfigurationError, match=facts("one value", "found 2", "weigh_and_sum")):
        step.update(batch.rewards, batch, None)


@pytest.mark.parametrize("step", [WeighByDifficulty(), WeighByHistory()])
def test_a_step_without_the_accuracy_it_needs_says_so(step):
    with pytest.raises(ConfigurationError, match=facts(f"step '{step.name}'", "accuracy", "[0, 1]")):
        step.update(*column([1.0]), step.init())


def test_a_step_must_say_what_it_does():
    with pytest.raises(NotImplementedError):
        Step().update(*column([1.0]), None)


def test_a_chain_must_end_with_one_value():
    batch = Batch.of([[1, 2]], ["g"], keys=("a", "b"))
    with pytest.raises(ConfigurationError, match=facts("['centre']", "shape (1, 2)", "weigh_and_sum")):
        Chain((Centre(),))(batch)


def test_a_chain_holds_a_step_with_a_state_once():
    with pytest.raises(ConfigurationError, match=facts("once", "['weigh_by_history', 'weigh_by_history']")):
        Chain((WeighAndSum(), WeighByHistory(), WeighByHistory("window")))


def test_a_chain_applies_its_steps_in_order():
    # Centre first: (1 - 2) * 2 = -2. Sum first gives the same here, so use the KL part: sum, then centre removes it.
    batch = Batch.of([[1], [3]], ["g"] * 2, kl_reward=np.array([5.0, 5.0]))
    assert Chain((Centre(), WeighAndSum((2.0,))))(batch).advantages.tolist() == [3, 7]  # -2 + 5, 2 + 5
    assert Chain((WeighAndSum((2.0,)), Centre()))(batch).advantages.tolist() == [-2, 2]


def test_a_chain_gathers_metrics_and_returns_new_state():
    chain = Chain((WeighAndSum(), Centre(), Balance(), WeighByHistory()))
    assert chain.stateful
    batch = Batch.of([[r] for r in ACC], UIDS, lengths=LENGTHS, accuracy=ACC)
    before = chain.init()
    result = chain(batch, before)
    assert before == chain.init()
    assert set(result.state) == {"weigh_by_history"}
    assert result.state["weigh_by_history"].ticks == 1
    assert {"balance/z", "weigh_by_history/batch_accuracy"} <= set(result.metrics)
    assert not Chain((WeighAndSum(), Centre())).stateful


def test_what_is_not_scored_gets_no_advantage():
    batch = Batch.of([[1], [0], [NAN]], ["g"] * 3)
    assert Chain((WeighAndSum(), Centre()))(batch).advantages.tolist() == [0.5, -0.5, 0]


@pytest.mark.parametrize(
    ("kind", "name", "lowest"),
    [
        (ScaleByStd, "epsilon", 1e-9),
        (ScaleByMad, "epsilon", 1e-9),
        (Whiten, "epsilon", 1e-9),
        (WeighByDifficulty, "dqw_temp", 1e-9),
    ],
)
def test_a_setting_may_reach_its_limit_and_not_pass_it(kind, name, lowest):
    assert getattr(make(kind, {name: lowest}, "here"), name) == lowest
    with pytest.raises(ConfigurationError, match=facts(f"here.{name}", "above 0", "found 0")):
        make(kind, {name: lowest - 1e-9}, "here")


@pytest.mark.parametrize("weight", [2.0, 0.0, -1.0])
def test_the_weight_of_a_single_reward_counts(weight):
    batch = Batch.of([[1], [3], [NAN]], ["g"] * 3)
    np.testing.assert_array_equal(WeighAndSum((weight,)).apply(batch.rewards, batch)[:, 0], [weight, 3 * weight, NAN])


def test_equal_values_are_whitened_to_nothing_without_an_epsilon():
    batch = Batch.of([[2], [2], [NAN]], ["g"] * 3)
    np.testing.assert_array_equal(Whiten(epsilon=0.0).update(batch.rewards, batch, None).values[:, 0], [0, 0, NAN])


def test_a_dead_group_leaves_no_negative_zero():
    batch = Batch.of([[1.0], [1.0 + 1e-9], [0.3], [0.3]], list("aabb"))
    found = Centre().apply(batch.rewards, batch)
    assert not found.any()
    assert not np.signbit(found).any()


def test_an_epsilon_that_whitening_over_tokens_does_not_add_is_said():
    assert "over=token" in Whiten.check({"over": "token", "epsilon": 1e-4})
    for given_settings in ({}, {"over": "token"}, {"over": "sequence", "epsilon": 1e-4}, {"epsilon": 1e-4}):
        assert Whiten.check(given_settings) is None


def test_a_condition_on_nothing_is_said():
    assert Condition.check({}) == Condition.check({"conditions": {}})
    assert says(Condition.check({}), "conditions={reward: {on: other reward, at_least: number}}")
    assert Condition.check({"conditions": {"easy": {"on": "hard", "at_least": 1}}}) is None


@pytest.mark.parametrize("values", [[-1.0, -3.0], [1.0, 3.0], [3e-5, 1e-5]])
def test_values_off_their_centre_are_moved_to_it(values):
    batch = Batch.of([[value] for value in values], ["g"] * 2)
    update = Whiten(epsilon=0.0).update(batch.rewards, batch, None)
    assert update.metrics["whiten_shift"] == pytest.approx(sum(values) / 2)
    sign = math.copysign(1, values[0] - values[1])
    assert update.values[:, 0] == pytest.approx([sign * math.sqrt(0.5), -sign * math.sqrt(0.5)])


def test_rounding_is_judged_by_the_largest_size_of_either_sign():
    # A mean of 1,500 is rounding beside -2e9, and would not be beside 1e9.
    values = np.array([[-2e9], [1e9 + 2250.0], [1e9 + 2250.0]])
    update = Whiten().update(values, Batch.of(values, ["a", "a", "a"]), None)
    assert update.metrics["whiten_shift"] == 0.0
