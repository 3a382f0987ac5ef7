"""Components of the reward that are missing, misnamed or not numbers, and the component that is the accuracy."""

import numpy as np
import pytest
import torch

from tests.calls import call, metrics_of, object_array
from tests.estimators.two_prompts import GDPO, UIDS, X, Y, fields, gdpo
from tests.facts import facts, says
from verl_ext import Settings, build
from verl_ext.advantages.log import log_rewards
from verl_ext.advantages.table import Table
from verl_ext.core.row_index import RowIndex
from verl_ext.errors import ConfigurationError, DataError
from verl_ext.run import Run

VALID_COMPONENTS = {
    "count": [1, 2, 3, None],
    "true": [True] * 4,
    "scalar": [torch.tensor(1.0), np.array(2), 3, np.float32(4)],
}
INVALID_COMPONENTS = {
    3: [1.0] * 4,  # the name is not a text
    "long": [10**400, 1, 1, 1],
    "longer than Python prints": [10**5000, 1, 1, 1],
    "text of no dimension": [np.array("x")] * 4,
    "complex": [torch.tensor(1j)] * 4,
    "text": ["x"] * 4,
    "a list": np.ones((4, 2)),
}


def table_of_components(run: Run) -> Table:
    """Return the rewards of four responses with all valid and invalid components."""
    rows = RowIndex.of_padding(np.zeros(4, dtype=bool))
    results = INVALID_COMPONENTS | VALID_COMPONENTS
    return Table(settings=run.settings.rewards, row_index=rows, labels=UIDS, results=results)


@pytest.mark.parametrize("name", ["drgrpo", "grpo"])
def test_an_invalid_component_that_is_only_logged_causes_one_warning(name, caplog):
    settings = Settings.parse({"rewards": {"log": "all"}})
    is_verls_own = name == "grpo"
    run = Run(name, settings, None if is_verls_own else build(name, settings))
    table = table_of_components(run)

    log_rewards(run, table)
    log_rewards(run, table)

    logged_components = {metric.split("/")[1] for metric in run.metrics}
    assert logged_components == set(VALID_COMPONENTS)
    assert run.metrics["reward/scalar/mean"] == 2.5
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == len(INVALID_COMPONENTS)
    for key in INVALID_COMPONENTS:
        assert any(repr(key) in message for message in messages)


@pytest.mark.parametrize("key", [key for key in INVALID_COMPONENTS if key != 3])
def test_an_invalid_component_is_not_scored_with_verls_own_estimator(key):
    settings = Settings.parse({"rewards": {"log": "all"}})
    table = table_of_components(Run("grpo", settings, None))
    column = table.column(key, "keys", strict=False)
    assert np.isnan(column[0])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        pytest.param("0.5", ("'0.5'", "str"), id="text"),
        pytest.param(None, ("None", "NaN"), id="None"),
        pytest.param([1.0, 2.0], ("[1.0, 2.0]", "list"), id="list"),
        pytest.param(10**400, ("int",), id="long integer"),
        pytest.param(np.array("x"), ("'x'", "ndarray"), id="array of text"),
        pytest.param({"score": 1}, ("{'score': 1}", "dict"), id="dict"),
    ],
)
@pytest.mark.parametrize("container", [list, object_array])
def test_a_reward_that_is_not_a_number_is_rejected_with_its_uid(wrong, words, container):
    column = container([0.0, 1.0, wrong, 2.0])
    with pytest.raises(DataError, match=facts("reward 'y'", "'b'", *words)):
        gdpo(components=fields(y=column))


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
    ids=["int", "numpy scalars", "torch scalars", "tensor", "tensor column", "array column", "object array"],
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


SCORE_AND_Y = {"rewards": {"keys": ["score", "y"]}}


def test_the_key_score_is_the_sum_of_the_token_level_rewards():
    from_score = call("gdpo", X, UIDS, config=SCORE_AND_Y, components=fields())
    np.testing.assert_allclose(from_score.rows, gdpo().rows)


def test_a_returned_component_score_takes_precedence_over_token_level_rewards():
    constant = [9.0, 9.0, 9.0, 9.0]
    components = fields(score=np.array(X))
    from_component = call("gdpo", constant, UIDS, config=SCORE_AND_Y, components=components, returned=["score"])
    np.testing.assert_allclose(from_component.rows, gdpo().rows)


@pytest.mark.parametrize(
    "components", [fields(y=np.array([9.0, -9, 9, 9])), {"x": np.array(X)}], ids=["with component", "alone"]
)
def test_token_scores_of_a_key_take_precedence_over_the_component(components):
    """The token scores, as a process reward model gives them, are summed over the response."""
    token_scores = torch.tensor([[0.0, 0.0], [0.25, 0.75], [2.0, 3.0], [1.0, 2.0]])  # the sums are 0, 1, 5 and 3, as Y
    result = gdpo(lengths=[2] * 4, batch={"token_level_scores_y": token_scores}, components=components)
    np.testing.assert_allclose(result.rows, gdpo().rows)


SCORE = [1.0, 0.0, 0.0, 0.0]
ACC_AND_MINE = {"acc": np.array([1.0, 0, 1, 0]), "mine": np.array([1.0, 0, 1, 1])}


@pytest.mark.parametrize(
    ("components", "accuracy_key", "accuracy_of_a", "accuracy_of_b"),
    [
        pytest.param({}, None, 0.5, 0.0, id="score"),
        pytest.param(ACC_AND_MINE, None, 0.5, 0.5, id="acc"),
        pytest.param(ACC_AND_MINE, "mine", 0.5, 1.0, id="named component"),
        pytest.param(ACC_AND_MINE, "score", 0.5, 0.0, id="score, named"),
    ],
)
@pytest.mark.parametrize("name", ["dgpo", "hadw"])
def test_the_accuracy_is_the_named_component_or_acc_or_the_score(
    name, components, accuracy_key, accuracy_of_a, accuracy_of_b
):
    rewards = {} if accuracy_key is None else {"rewards": {"accuracy_key": accuracy_key}}
    metrics = metrics_of(name, SCORE, UIDS, components=components, config=rewards, returned=[*components])
    if name == "dgpo":
        assert metrics["dgpo/all_incorrect_groups"] == (accuracy_of_b == 0)
    else:
        assert metrics["hadw/batch_accuracy"] == (accuracy_of_a + accuracy_of_b) / 2


@pytest.mark.parametrize("name", ["dgpo", "hadw"])
def test_a_single_key_is_the_accuracy_unless_there_is_acc(name):
    score = [5.0, -3, 5, 5]
    columns = {"correct": np.array([1.0, 0, 1, 1]), "score": np.array(score)}
    with_acc = columns | {"acc": np.zeros(4)}

    def metrics(components, **rewards):
        config = {"rewards": {"keys": ["correct"], **rewards}}
        return metrics_of(name, score, UIDS, components=components, config=config, returned=[*components])

    named = metrics(columns, accuracy_key="correct")
    assert metrics(columns) == named
    assert metrics(with_acc) != named


def test_components_with_a_kl_term_need_the_scores_without_it():
    config = {"use_kl_in_reward": True} | GDPO
    with pytest.raises(DataError, match=facts("KL", "batch['token_level_scores']")):
        call("drgrpo", X, UIDS, config=config, components=fields())
