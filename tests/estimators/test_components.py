"""Components of the reward that are missing, misnamed or no numbers."""

import numpy as np
import pytest
import torch

from tests.calls import call, metrics_of, object_array
from tests.estimators.small import GDPO, UIDS, X, Y, fields, gdpo
from tests.facts import facts, says
from verl_ext import Settings, build
from verl_ext.advantages.log import log_rewards
from verl_ext.advantages.table import Table
from verl_ext.core.row_index import RowIndex
from verl_ext.errors import ConfigurationError, DataError
from verl_ext.run import Run

ODD = {
    3: [1.0] * 4,  # no text
    "long": [10**400, 1, 1, 1],
    "longer than Python prints": [10**5000, 1, 1, 1],
    "text of no dimension": [np.array("x")] * 4,
    "complex": [torch.tensor(1j)] * 4,
    "text": ["x"] * 4,
    "a list": np.ones((4, 2)),
}
FINE = {"count": [1, 2, 3, None], "true": [True] * 4, "scalar": [torch.tensor(1.0), np.array(2), 3, np.float32(4)]}


@pytest.mark.parametrize("name", ["drgrpo", "grpo"])
def test_an_invalid_component_that_is_only_logged_causes_one_warning_and_no_error(name, caplog):
    settings = Settings.parse({"rewards": {"log": "all"}})
    run = Run(name, settings, build(name, settings) if name != "grpo" else None)
    rows = RowIndex.of_padding(np.zeros(4, dtype=bool))
    rewards = Table(settings=run.settings.rewards, row_index=rows, labels=UIDS, results=ODD | FINE)
    for _ in range(2):
        log_rewards(run, rewards)
    assert {metric.split("/")[1] for metric in run.metrics} == set(FINE)
    assert run.metrics["reward/scalar/mean"] == 2.5
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == len(ODD)
    assert all(any(repr(key) in text for text in said) for key in ODD)
    # A key of a run with verl's own estimator is only logged, too.
    assert all(np.isnan(rewards.column(key, "keys", strict=False)[0]) for key in ODD if key != 3)


@pytest.mark.parametrize(
    ("wrong", "shown"),
    [
        ("0.5", ("'0.5'", "str")),
        (None, ("None", "NaN")),
        ([1.0, 2.0], ("[1.0, 2.0]", "list")),
        pytest.param(10**400, ("int",), id="long"),
        (np.array("x"), ("'x'", "ndarray")),
        ({"score": 1}, ("{'score': 1}", "dict")),
    ],
)
@pytest.mark.parametrize("container", [list, object_array])
def test_a_reward_that_is_not_a_number_is_rejected_with_its_uid(wrong, shown, container):
    with pytest.raises(DataError, match=facts("reward 'y'", "'b'", *shown)):
        gdpo(components=fields(y=container([0.0, 1.0, wrong, 2.0])))


@pytest.mark.parametrize(
    "column",
    [
        [0, 1, 5, 3],
        [np.float32(0), np.int8(1), np.float16(5), 3.0],
        [torch.tensor(0.0), torch.tensor(1.0), np.array(5.0), 3.0],
        torch.tensor([0.0, 1.0, 5.0, 3.0]),
        torch.tensor([[0.0], [1.0], [5.0], [3.0]], dtype=torch.bfloat16),
        np.array([[0], [1], [5], [3]], dtype=np.int64),
        object_array([0, 1.0, np.float32(5), 3]),
    ],
)
def test_a_component_may_have_any_type_of_number(column):
    np.testing.assert_allclose(gdpo(components=fields(y=column)).rows, gdpo().rows)


@pytest.mark.parametrize("size", [2, 8])
def test_a_component_must_have_one_entry_per_row(size):
    with pytest.raises(DataError, match=facts("reward 'y'", size, 4)):
        call("gdpo", [0.0] * 4, UIDS, config=GDPO, components=fields(y=np.zeros(size)))


def test_a_key_that_no_response_has_is_rejected_with_the_nearest_one():
    config = {"rewards": {"keys": ["x", "acuracy"]}}
    columns = {"x": np.array(X), "accuracy": np.array(Y)}
    with pytest.raises(ConfigurationError) as error:
        gdpo(config=config, components=columns)
    assert says(error.value, "algorithm.rewards.keys", "'acuracy'", "did you mean 'accuracy'")
    assert says(error.value, "'accuracy', 'score', 'x'")


def test_the_score_is_the_component_score_unless_the_reward_function_returns_one():
    by_name = {"rewards": {"keys": ["score", "y"]}}
    found = call("gdpo", X, UIDS, config=by_name, components=fields())
    np.testing.assert_allclose(found.rows, gdpo().rows)
    constant, components = [9.0, 9, 9, 9], fields(score=np.array(X))
    named = call("gdpo", constant, UIDS, config=by_name, components=components, returned=["score"])
    np.testing.assert_allclose(named.rows, gdpo().rows)


def test_token_scores_of_a_key_take_precedence_over_the_component():
    """Summed over the response, as a process reward model gives them."""
    token_scores = torch.tensor([[0.0, 0.0], [0.25, 0.75], [2.0, 3.0], [1.0, 2.0]])
    found = gdpo(
        lengths=[2] * 4,
        batch={"token_level_scores_y": token_scores},
        components=fields(y=np.array([9.0, -9, 9, 9])),
    )
    np.testing.assert_allclose(found.rows, gdpo().rows)
    alone = gdpo(lengths=[2] * 4, batch={"token_level_scores_y": token_scores}, components={"x": np.array(X)})
    np.testing.assert_allclose(alone.rows, gdpo().rows)


@pytest.mark.parametrize("name", ["dgpo", "hadw"])
def test_the_accuracy_is_the_named_component_or_acc_or_the_score(name):
    def of(**given):
        returned = [*given.get("components", ())]
        return metrics_of(name, [1.0, 0.0, 0.0, 0.0], UIDS, returned=returned, **given)

    watched = "dgpo/all_incorrect_groups" if name == "dgpo" else "hadw/batch_accuracy"
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
        metrics_of(
            *(name, [5.0, -3, 5, 5], UIDS),
            components=columns,
            config={"rewards": key["rewards"] | more},
            returned=[*columns],
        )
        for more in ({}, {"accuracy_key": "right"})
    )
    assert found == named
    columns |= {"acc": np.array([0.0, 0, 0, 0])}
    assert metrics_of(name, [5.0, -3, 5, 5], UIDS, components=columns, config=key, returned=[*columns]) != named


def test_components_with_a_kl_term_need_the_scores_without_it():
    with pytest.raises(DataError, match=facts("KL", "batch['token_level_scores']")):
        call("drgrpo", X, UIDS, config={"use_kl_in_reward": True} | GDPO, components=fields())
