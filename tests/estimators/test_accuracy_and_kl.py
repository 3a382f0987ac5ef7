"""Where the accuracy comes from, and what becomes of a KL term in the reward."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.calls import call, metrics_of
from tests.estimators.small import GDPO, UIDS, X, fields
from tests.facts import facts
from verl_ext.errors import DataError

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("name", ["dgpo", "hadw"])
def test_the_accuracy_is_acc_else_the_score_else_what_is_named(name):
    def of(**given):
        return metrics_of(name, [1.0, 0.0, 0.0, 0.0], UIDS, **given)

    watched = "dgpo/all_wrong_groups" if name == "dgpo" else "hadw/batch_accuracy"
    # score: a 1/2, b 0; acc: a 1/2, b 1/2; x scaled: a 1/2 and b 1.
    columns = {"acc": np.array([1.0, 0, 1, 0]), "mine": np.array([1.0, 0, 1, 1])}
    found = [
        of()[watched],
        of(components=columns)[watched],
        of(components=columns, config={"rewards": {"accuracy_key": "mine"}})[watched],
        of(components=columns, config={"rewards": {"accuracy_key": "score"}})[watched],
    ]
    assert found == ([1, 0, 0, 1] if name == "dgpo" else [0.25, 0.5, 0.75, 0.25])


@pytest.mark.parametrize("name", ["dgpo", "hadw"])
def test_a_single_key_is_the_accuracy(name):
    columns = {"right": np.array([1.0, 0, 1, 1]), "score": np.array([5.0, -3, 5, 5])}
    key = {"rewards": {"keys": ["right"]}}
    found, named = (
        metrics_of(name, [5.0, -3, 5, 5], UIDS, components=columns, config={"rewards": key["rewards"] | more})
        for more in ({}, {"accuracy_key": "right"})
    )
    assert found == named
    columns |= {"acc": np.array([0.0, 0, 0, 0])}
    assert metrics_of(name, [5.0, -3, 5, 5], UIDS, components=columns, config=key) != named


def test_components_with_kl_need_the_scores_before_it():
    with pytest.raises(DataError, match=facts("KL", "batch['token_level_scores']")):
        call("drgrpo", X, UIDS, config={"use_kl_in_reward": True} | GDPO, components=fields())
