"""Rubrics: what a criterion counts, and what a list of criteria must be."""

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
CHAINS = (
    ("gdpo", {}),
    ("compose", {"compose": {"steps": ["weighted_sum", "center", "scale_by_mad"]}}),
    ("compose", {"compose": {"steps": ["center", "scale_by_std", "weighted_sum"]}}),
    ("dvao", {}),
    ("corrgrpo", {}),
)


def batch(uids, right, texts):
    return Batch.of(
        labels=uids, **to_columns(["right", "rubric"], [np.array(right), Criteria.of("rubric", uids, texts)])
    )


def advantages(name, sections, of, keys=("right", "rubric"), weights=(1.0, 0.5)):
    settings = Settings.parse(sections | {"rewards": {"keys": list(keys), "weights": list(weights)}})
    return build(name, settings)(of).advantages


@pytest.mark.parametrize(("name", "sections"), CHAINS)
@given(rollout=rollouts(keys=["right", *"abcde"]), count=st.integers(1, 5), weight=st.sampled_from([None, 3.0]))
def test_items_of_equal_weight_are_as_many_rewards_of_that_share(name, sections, rollout, count, weight):
    rows = [row[: count + 1] for row in rollout.rewards]
    keys = ["right", *(f"item{place}" for place in range(count))]
    wanted = advantages(name, sections, Batch.of(rows, rollout.uids, keys=keys), keys, [1.0, *[0.5 / count] * count])
    texts = [rubric(row[1:], None if weight is None else [weight] * count) for row in rows]
    found = advantages(name, sections, batch(rollout.uids, rollout.columns["right"], texts))
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(("name", "sections"), CHAINS[1:])  # without whitening
@given(rollout=rollouts(keys=["right", *"abcde"]), more=st.integers(1, 5), seed=st.integers(0, 2**32 - 1))
def test_more_criteria_of_another_prompt_change_nothing(name, sections, rollout, more, seed):
    rng, uids = np.random.default_rng(seed), [str(uid) for uid in rollout.uids]
    counts = {uid: int(rng.integers(1, 6)) for uid in uids}
    weights = {uid: rng.choice([-2.0, 1.0, 3.0], 5) for uid in uids}

    def found(counts):
        rows = zip(uids, rollout.rewards, strict=True)
        texts = [rubric(row[1 : counts[uid] + 1], weights[uid][: counts[uid]]) for uid, row in rows]
        return advantages(name, sections, batch(uids, rollout.columns["right"], texts))

    others = np.array(uids) != uids[0]
    before, after = found(counts), found(counts | {uids[0]: more})
    np.testing.assert_allclose(after[others], before[others], rtol=1e-9, atol=1e-12)
    assert (after[others & (before == 0)] == 0).all()


@given(rollout=rollouts(keys=[*"abcd"]), count=st.integers(1, 4))
def test_a_soft_minimum_takes_each_criterion_once_and_turns_a_negative_weight_round(rollout, count):
    rows, names = np.array(rollout.rewards)[:, :count], [*"abcd"[:count]]
    step = SoftMin(k=2.0)
    wanted = [step.apply(values, Batch.of(values, rollout.uids, keys=names)) for values in (rows, -rows)]
    for weight, plain in zip((1.0, -3.0), wanted, strict=True):
        texts = [rubric(row, [weight] * count) for row in rows]
        of = Batch.of(labels=rollout.uids, **to_columns(["rubric"], [Criteria.of("rubric", rollout.uids, texts)]))
        np.testing.assert_allclose(step.apply(of.returns, of), plain, rtol=1e-12, atol=1e-12)


UIDS = ["p", "p", "q", "q", "q"]
# p: (5, 3, -8) / 16; q: halves. The third answer to q has no score of its first criterion, the second none at all.
TEXTS = [
    *(rubric(values, weights=[5, 3, -8]) for values in ([1, 0, 1], [1, 1, 0])),
    *map(rubric, ([1, 1], [NAN, NAN], [NAN, 0.5])),
]
SUMS = [-3 / 16, 8 / 16, 1.0, NAN, 0.25]


def test_signs_count_and_what_is_not_scored_does_not():
    of = batch(UIDS, [0.0] * 5, TEXTS)
    assert of.keys == ("right", "rubric[0]", "rubric[1]", "rubric[2]")
    assert of.reward_of_column == ("right", "rubric", "rubric", "rubric")
    np.testing.assert_array_equal(of.by_reward().returns[:, 1], SUMS)
    np.testing.assert_array_equal(of.with_weights([1.0, 2.0]).weights[0], [1.0, 10 / 16, 6 / 16, -1.0])
    alone = Batch.of(labels=UIDS, **to_columns(["rubric"], [Criteria.of("rubric", UIDS, TEXTS)]))
    found = build("drgrpo", Settings())(alone).advantages
    np.testing.assert_allclose(found, [-11 / 32, 11 / 32, 0.375, 0.0, -0.375])


def test_a_column_has_no_curve_and_the_rubric_has():
    found = reward_metrics(batch(UIDS, [0.0] * 5, TEXTS))
    assert {name.split("/")[1] for name in found} == {"right", "rubric"}
    assert found["reward/rubric/mean"] == np.nanmean(SUMS)
    assert found["reward/rubric/unscored"] == 1
    assert found["reward/rubric/criteria"] == (3 + 2) / 2
    assert found["reward/rubric/varying_criteria_fraction"] == (2 + 1) / 5  # of p the last two, of q the second
    assert "reward/right/criteria" not in found


def test_criteria_that_cancel_are_exactly_zero_where_prompts_differ():
    """Rounded to float32, with weights that no float has."""
    rewards = np.float32([0.1, 0.7, 0.3]).astype(float)
    texts = [rubric([x, 0.8 - x], [0.1, 0.1]) for x in rewards] + [rubric([x]) for x in rewards]
    uids = list("pppqqq")
    of = Batch.of(labels=uids, **to_columns(["rubric"], [Criteria.of("rubric", uids, texts)]))
    assert of.weights.shape == (6, 2)
    found = build("compose", Settings.parse({"compose": {"steps": ["center", "scale_by_std", "weighted_sum"]}}))(of)
    assert (found.advantages[:3] == 0).all()
    assert (found.advantages[3:] != 0).all()


@pytest.mark.parametrize(
    "texts",
    [
        (rubric([1, 0]), rubric([1])),
        (rubric([1, 0], [1, 2]), rubric([1, 0], [2, 1])),
        *((rubric([1]), wrong) for wrong in (None, 1.0, "", "[1.0]", "{}", "[]", "[[null, 1]]", "[[1, 2, 3]]")),
        *((text, text) for text in ('["10", "01"]', '[{"1": 0, "2": 0}]', '{"12": 3}', '[["1", 2]]', '[[1, "2"]]')),
        *((text, text) for text in (rubric([1], [0]), rubric([1], [NAN]), rubric([1, 1], [1e308, 1e308]))),
    ],
    ids=repr,
)
def test_a_wrong_list_is_refused_by_key_and_uid(texts):
    with pytest.raises(DataError, match=facts("'rubric'", "'p7'")):
        Criteria.of("rubric", ["p1", "p7", "p7"], [rubric([1, 2, 3]), *texts])


@pytest.mark.parametrize("wrong", [{1: 1, 2: 0}, {"1": 1, "2": 0}, "10", b"10"], ids=repr)
def test_what_is_no_list_is_refused_where_it_is_returned(wrong):
    """Each would be read as two numbers: the keys of a mapping, the digits of a text, the codes of bytes."""
    with pytest.raises(DataError, match=facts("rubric", "list", repr(wrong))):
        rubric(wrong)
    with pytest.raises(DataError, match=facts("weights", "rubric", "list", repr(wrong))):
        rubric([1, 0], weights=wrong)


NONE = rubric([NAN])


def test_a_prompt_without_criteria_returns_one_that_is_not_scored():
    """Its other rewards count, and those of other prompts do not change."""
    with pytest.raises(DataError, match=facts("'rubric'", "'q'", "rubric([float('nan')])")):
        Criteria.of("rubric", ["p", "q"], [rubric([1, 0]), rubric([])])
    rubrics, rights = [rubric([1, 0], [3, 1]), rubric([0, 0], [3, 1])], [0.0, 0.0, 1.0, 0.0]
    mixed = batch([*"ppqq"], rights, [*rubrics, NONE, NONE])
    found = advantages("drgrpo", {}, mixed, weights=(1.0, 1.0))
    np.testing.assert_array_equal(found, [0.375, -0.375, 0.5, -0.5])
    steps = {"compose": {"steps": ["center", "scale_by_std", "weighted_sum"]}}
    found = advantages("compose", steps, mixed)
    np.testing.assert_array_equal(found[:2], advantages("compose", steps, batch([*"pp"], rights[:2], rubrics)))
    right_alone = Batch.of([[1.0], [0.0]], [*"qq"])
    np.testing.assert_array_equal(found[2:], advantages("compose", steps, right_alone, ["right"], [1.0]))


def test_an_infinite_criterion_is_refused_by_its_place_and_uid():
    with pytest.raises(DataError, match=facts("'rubric[1]'", "'q'")):
        batch(["p", "q"], [0.0, 0.0], [rubric([1, 0]), rubric([1, math.inf])])


def test_a_rubric_has_one_weight_per_criterion():
    with pytest.raises(DataError, match=facts("1 criteria", "2 weights")):
        rubric([1], weights=[1, 2])
