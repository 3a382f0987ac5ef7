"""What `Rollouts` computes from its table."""

from pathlib import Path

import numpy as np
import pandas as pd

from verl_ext import rubric
from verl_ext.tools.compare.rollouts import Rollouts


def rollouts_of_one_prompt(weights=None, **columns):
    """Return rollouts of one prompt in one update, with more columns."""
    table = pd.DataFrame({"step": 1, "update": 0, "uid": "a", **columns})
    return Rollouts(
        path=Path("dump"),
        table=table,
        rewards={},
        contributions={},
        total_key="total",
        counts={},
        length_unit="tokens",
        weights=weights or {},
    )


def test_each_response_counts_once_in_the_mean_of_its_prompt():
    rollouts = rollouts_of_one_prompt(turn=[1, 2, 1])
    accuracies = np.array([1.0, 1.0, 0.0])  # of a response with two turns, and of a response with one turn
    mean_of_first_turns, mean_of_second_turns = rollouts.prompt_means(accuracies)
    assert mean_of_first_turns == 0.5
    assert mean_of_second_turns == 0.5


def test_a_rubric_contributes_its_value_times_the_weight_of_the_run():
    texts = [rubric([1.0]), rubric([0.5])]
    rollouts = rollouts_of_one_prompt(weights={"style": 3.0}, **{"reward/style": texts})
    with_rubric = rollouts.with_rubrics(["style"])
    assert with_rubric.rewards["style"].tolist() == [1.0, 0.5]
    assert with_rubric.contributions["style"].tolist() == [3.0, 1.5]
