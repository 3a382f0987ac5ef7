"""Rubrics: the weight of a criterion, metrics, and the lists of criteria that are rejected."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.batches import rollouts
from tests.facts import facts
from verl_ext import Batch, DataError, Settings, build, rubric
from verl_ext.core.cross_reward import SoftMin
from verl_ext.core.metrics import reward_metrics
from verl_ext.core.rubrics import Criteria, to_columns

NAN = math.nan
CORRECT_AND_RUBRIC = {"keys": ["correct", "rubric"], "weights": [1.0, 0.5]}
NORMALIZED_SUM = {"compose": {"steps": ["center", "scale_by_std", "weighted_sum"]}}
GDPO = ("gdpo", {})
WITHOUT_WHITENING = {
    "mad of the sum": ("compose", {"compose": {"steps": ["weighted_sum", "center", "scale_by_mad"]}}),
    "std of each reward": ("compose", NORMALIZED_SUM),
    "dvao": ("dvao", {}),
    "corrgrpo": ("corrgrpo", {}),
}
CHAINS = {"gdpo": GDPO, **WITHOUT_WHITENING}


def rubric_batch(uids, texts) -> Batch:
    """Return a batch with a rubric as the only reward."""
    return Batch.of(labels=uids, **to_columns(["rubric"], [Criteria.of("rubric", uids, texts)]))


def correct_and_rubric_batch(uids, correct, texts) -> Batch:
    """Return a batch with the reward `correct` and a rubric."""
    columns = [np.array(correct), Criteria.of("rubric", uids, texts)]
    return Batch.of(labels=uids, **to_columns(["correct", "rubric"], columns))


def advantages(name, config, batch, rewards=CORRECT_AND_RUBRIC) -> np.ndarray:
    """Return the advantages by an estimator with the keys and weights of the rewards."""
    chain = build(name, Settings.parse(config | {"rewards": rewards}))
    return chain(batch).advantages


@pytest.mark.parametrize(("name", "config"), CHAINS.values(), ids=CHAINS.keys())
@given(rollout=rollouts(keys=["correct", *"abcde"]), count=st.integers(1, 5), weight=st.sampled_from([None, 3.0]))
def test_criteria_of_equal_weight_share_the_weight_of_the_rubric(name, config, rollout, count, weight):
    keys = ["correct", *(f"criterion {index}" for index in range(count))]
    weights = [1.0] + [0.5 / count] * count
    rewards = [row[: count + 1] for row in rollout.rewards]
    separate_rewards = Batch.of(rewards, rollout.uids, keys=keys)
    weights_of_criteria = None if weight is None else [weight] * count
    texts = [rubric(row[1:], weights_of_criteria) for row in rewards]
    with_rubric = correct_and_rubric_batch(rollout.uids, rollout.columns["correct"], texts)

    expected = advantages(name, config, separate_rewards, {"keys": keys, "weights": weights})

    np.testing.assert_array_equal(advantages(name, config, with_rubric), expected)


@pytest.mark.parametrize(("name", "config"), WITHOUT_WHITENING.values(), ids=WITHOUT_WHITENING.keys())
@given(rollout=rollouts(keys=["correct", *"abcde"]), new_count=st.integers(1, 5), seed=st.integers(0, 2**32 - 1))
def test_the_number_of_criteria_of_another_prompt_changes_nothing(name, config, rollout, new_count, seed):
    random = np.random.default_rng(seed)
    uids = [str(uid) for uid in rollout.uids]
    count_of_uid = {uid: int(random.integers(1, 6)) for uid in uids}
    weights_of_uid = {uid: random.choice([-2.0, 1.0, 3.0], 5) for uid in uids}

    def advantages_with(count_of_uid: dict[str, int]) -> np.ndarray:
        texts = []
        for uid, (_, *criteria) in zip(uids, rollout.rewards, strict=True):
            count = count_of_uid[uid]
            texts.append(rubric(criteria[:count], weights_of_uid[uid][:count]))
        return advantages(name, config, correct_and_rubric_batch(uids, rollout.columns["correct"], texts))

    first_uid = uids[0]
    of_other_prompts = np.array(uids) != first_uid
    before = advantages_with(count_of_uid)[of_other_prompts]
    after = advantages_with(count_of_uid | {first_uid: new_count})[of_other_prompts]

    np.testing.assert_allclose(after, before, rtol=1e-9, atol=1e-12)
    assert (after[before == 0] == 0).all()


@pytest.mark.parametrize(("weight", "sign"), [(1.0, 1), (-3.0, -1)], ids=["positive weight", "negative weight"])
@given(rollout=rollouts(keys=[*"abcd"]), count=st.integers(1, 4))
def test_a_soft_minimum_negates_a_criterion_with_a_negative_weight(weight, sign, rollout, count):
    criteria = np.array(rollout.rewards)[:, :count]
    batch = rubric_batch(rollout.uids, [rubric(row, [weight] * count) for row in criteria])
    separate_rewards = Batch.of(sign * criteria, rollout.uids, keys=[*"abcd"[:count]])
    step = SoftMin(k=2.0)

    soft_minimum = step.apply(batch.returns, batch)

    expected = step.apply(separate_rewards.returns, separate_rewards)
    np.testing.assert_allclose(soft_minimum, expected, rtol=1e-12, atol=1e-12)


# The weights of p are 5, 3 and -8, and q has two criteria of equal weight. The third response to q has no score of its
# first criterion, and the second has no score at all.
UIDS = ["p", "p", "q", "q", "q"]
TEXTS = [
    rubric([1, 0, 1], weights=[5, 3, -8]),
    rubric([1, 1, 0], weights=[5, 3, -8]),
    rubric([1, 1]),
    rubric([NAN, NAN]),
    rubric([NAN, 0.5]),
]
SUMS = [(5 - 8) / 16, (5 + 3) / 16, 0.5 + 0.5, NAN, 0.5 * 0.5]


def test_criteria_are_columns_whose_weights_have_a_sign():
    batch = correct_and_rubric_batch(UIDS, [0.0] * 5, TEXTS)
    weighted = batch.with_weights([1.0, 2.0])
    assert batch.keys == ("correct", "rubric[0]", "rubric[1]", "rubric[2]")
    assert batch.reward_of_column == ("correct", "rubric", "rubric", "rubric")
    np.testing.assert_array_equal(weighted.weights[0], [1.0, 2 * 5 / 16, 2 * 3 / 16, 2 * -8 / 16])


def test_a_rubric_is_the_weighted_sum_of_its_scored_criteria():
    batch = correct_and_rubric_batch(UIDS, [0.0] * 5, TEXTS)
    np.testing.assert_array_equal(batch.by_reward().returns[:, 1], SUMS)


def test_the_advantages_of_a_rubric_are_centered_sums():
    """The sums of p have the mean (-3 + 8) / 32 = 5 / 32. Those of q have the mean (1 + 0.25) / 2 = 0.625."""
    batch = rubric_batch(UIDS, TEXTS)
    result = build("drgrpo", Settings())(batch)
    np.testing.assert_allclose(result.advantages, [-11 / 32, 11 / 32, 0.375, 0.0, -0.375])


def test_metrics_describe_a_rubric_and_not_its_columns():
    """The last two criteria of p vary, and the second criterion of q."""
    metrics = reward_metrics(correct_and_rubric_batch(UIDS, [0.0] * 5, TEXTS))
    assert {name.split("/")[1] for name in metrics} == {"correct", "rubric"}
    assert metrics["reward/rubric/mean"] == np.nanmean(SUMS)
    assert metrics["reward/rubric/unscored"] == 1
    assert metrics["reward/rubric/criteria"] == (3 + 2) / 2
    assert metrics["reward/rubric/varying_criteria_fraction"] == (2 + 1) / (3 + 2)
    assert "reward/correct/criteria" not in metrics


def test_criteria_that_cancel_are_exactly_0_if_prompts_have_different_criteria():
    """The two criteria of p cancel up to float32 rounding, with weights that no float holds exactly. q has one."""
    scores = np.float32([0.1, 0.7, 0.3]).astype(float)
    texts_of_p = [rubric([score, 0.8 - score], [0.1, 0.1]) for score in scores]
    texts_of_q = [rubric([score]) for score in scores]
    batch = rubric_batch(list("pppqqq"), [*texts_of_p, *texts_of_q])
    assert batch.weights.shape == (6, 2)

    result = build("compose", Settings.parse(NORMALIZED_SUM))(batch)

    assert (result.advantages[:3] == 0).all()
    assert (result.advantages[3:] != 0).all()


@pytest.mark.parametrize("wrong", [None, 1.0, "", "[1.0]", "{}", "[]", "[[null, 1]]", "[[1, 2, 3]]"], ids=repr)
def test_a_result_that_is_not_a_rubric_is_rejected_by_key_and_uid(wrong):
    with pytest.raises(DataError, match=facts("'rubric'", "'p7'")):
        Criteria.of("rubric", ["p1", "p7", "p7"], [rubric([1, 2, 3]), rubric([1]), wrong])


@pytest.mark.parametrize(
    "wrong",
    [
        '["10", "01"]',
        '[{"1": 0, "2": 0}]',
        '{"12": 3}',
        '[["1", 2]]',
        '[[1, "2"]]',
        pytest.param(rubric([1], [0]), id="weight 0"),
        pytest.param(rubric([1], [NAN]), id="weight NaN"),
        pytest.param(rubric([1, 1], [1e308, 1e308]), id="infinite sum of weights"),
    ],
)
def test_a_rubric_with_wrong_entries_is_rejected_by_key_and_uid(wrong):
    with pytest.raises(DataError, match=facts("'rubric'", "'p7'")):
        Criteria.of("rubric", ["p1", "p7", "p7"], [rubric([1, 2, 3]), wrong, wrong])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (rubric([1, 0]), rubric([1])),
        (rubric([1, 0], [1, 2]), rubric([1, 0], [2, 1])),
    ],
    ids=["numbers", "weights"],
)
def test_different_criteria_for_one_prompt_are_rejected_by_key_and_uid(one, other):
    with pytest.raises(DataError, match=facts("'rubric'", "'p7'")):
        Criteria.of("rubric", ["p1", "p7", "p7"], [rubric([1, 2, 3]), one, other])


NOT_A_LIST = pytest.mark.parametrize("wrong", [{1: 1, 2: 0}, {"1": 1, "2": 0}, "10", b"10"], ids=repr)
"""Each would be read as two numbers: the keys of a mapping, the digits of a text, the codes of bytes."""


@NOT_A_LIST
def test_criteria_that_are_not_a_list_are_rejected_where_they_are_returned(wrong):
    with pytest.raises(DataError, match=facts("rubric", "list", repr(wrong))):
        rubric(wrong)


@NOT_A_LIST
def test_weights_that_are_not_a_list_are_rejected_where_they_are_returned(wrong):
    with pytest.raises(DataError, match=facts("weights", "rubric", "list", repr(wrong))):
        rubric([1, 0], weights=wrong)


def test_a_rubric_has_one_weight_per_criterion():
    with pytest.raises(DataError, match=facts("1 criteria", "2 weights")):
        rubric([1], weights=[1, 2])


def test_a_prompt_without_criteria_is_rejected_with_the_remedy():
    with pytest.raises(DataError, match=facts("'rubric'", "'q'", "rubric([float('nan')])")):
        Criteria.of("rubric", ["p", "q"], [rubric([1, 0]), rubric([])])


RUBRICS_OF_P = [rubric([1, 0], [3, 1]), rubric([0, 0], [3, 1])]  # 0.75 and 0
UNSCORED = rubric([NAN])
P_WITH_RUBRIC_Q_WITHOUT = correct_and_rubric_batch([*"ppqq"], [0.0, 0.0, 1.0, 0.0], [*RUBRICS_OF_P, UNSCORED, UNSCORED])


def test_a_prompt_with_an_unscored_rubric_uses_its_other_rewards():
    rewards = {"keys": ["correct", "rubric"], "weights": [1.0, 1.0]}
    found = advantages("drgrpo", {}, P_WITH_RUBRIC_Q_WITHOUT, rewards)
    np.testing.assert_array_equal(found, [0.375, -0.375, 0.5, -0.5])


def test_a_prompt_with_an_unscored_rubric_does_not_change_other_prompts():
    p_alone = correct_and_rubric_batch([*"pp"], [0.0, 0.0], RUBRICS_OF_P)
    q_alone = Batch.of([[1.0], [0.0]], [*"qq"])
    found = advantages("compose", NORMALIZED_SUM, P_WITH_RUBRIC_Q_WITHOUT)
    of_p = advantages("compose", NORMALIZED_SUM, p_alone)
    of_q = advantages("compose", NORMALIZED_SUM, q_alone, {"keys": ["correct"], "weights": [1.0]})
    np.testing.assert_array_equal(found, [*of_p, *of_q])


def test_an_infinite_criterion_is_rejected_by_its_column_and_uid():
    texts = [rubric([1, 0]), rubric([1, math.inf])]
    with pytest.raises(DataError, match=facts("'rubric[1]'", "'q'")):
        rubric_batch(["p", "q"], texts)
