"""Warnings and errors of a training state which reward or which row of the data they are about."""

import logging
from typing import Any

import pytest

from tests.calls import object_array
from tests.configs import compose
from tests.facts import says
from tests.integration.trainers.ray_runs import KEYS, LENGTHS, UIDS, OwnFit, data_proto
from verl_ext.errors import DataError

GDPO = ("algorithm.adv_estimator=gdpo", KEYS)
VARYING = [1.0, 0.0, 0.0, 0.0] * 2
CONSTANT = [1.0] * 8
STEPS_BEFORE_WARNING = 5


def batch_of(acc: Any, format_reward: Any, **fields: Any) -> Any:
    """Return a batch of two prompts with four responses each."""
    columns = {"acc": object_array(acc), "format": object_array(format_reward), **fields}
    data = data_proto(UIDS, LENGTHS, [0.0] * len(UIDS), columns)
    data.meta_info["reward_extra_keys"] = ["acc", "format"]
    return data


def warnings_of_run(caplog: pytest.LogCaptureFixture, batches: list[Any]) -> list[str]:
    """Return the warnings of a run that computes these batches."""
    trainer = OwnFit(compose(*GDPO))
    caplog.clear()
    with caplog.at_level(logging.WARNING, "verl_ext"):
        for data in batches:
            trainer.fit(data=data)
    return [record.getMessage() for record in caplog.records]


def test_a_run_with_zero_advantages_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    zero_variance = batch_of(CONSTANT, CONSTANT)
    (text,) = warnings_of_run(caplog, [zero_variance] * 12)
    assert says(text, "'acc', 'format'", STEPS_BEFORE_WARNING)


def test_a_nonzero_advantage_restarts_the_count_of_zero_steps(caplog: pytest.LogCaptureFixture) -> None:
    zero_variance = batch_of(CONSTANT, CONSTANT)
    nonzero_variance = batch_of(VARYING, CONSTANT)
    too_few = [zero_variance] * (STEPS_BEFORE_WARNING - 1)
    assert warnings_of_run(caplog, [*too_few, nonzero_variance, *too_few]) == []


def test_the_warning_names_no_reward_if_the_rewards_cancel(caplog: pytest.LogCaptureFixture) -> None:
    """Each reward varies, but their sum does not."""
    canceling = batch_of(VARYING, [1 - value for value in VARYING])
    (text,) = warnings_of_run(caplog, [canceling] * STEPS_BEFORE_WARNING)
    assert not says(text, "'acc'")


def messages(text: str) -> list[dict[str, str]]:
    """Return a prompt as verl's data set gives it."""
    return [{"role": "user", "content": text}]


def error_of(data: Any) -> DataError:
    """Return the error of computing the advantages of a batch."""
    trainer = OwnFit(compose(*GDPO))
    with pytest.raises(DataError) as raised:
        trainer.fit(data=data)
    return raised.value


def test_an_error_about_a_reward_names_the_row_of_the_data() -> None:
    fields = {
        "data_source": object_array(["sums"] * 4 + ["products"] * 4),
        "extra_info": object_array([{"index": 3}] * 4 + [{"index": 17}] * 4),
        "raw_prompt": object_array([messages("2+3")] * 4 + [messages("What is\n2 * 3? " + "x" * 100)] * 4),
    }
    one_missing: list[Any] = list(VARYING)
    one_missing[5] = None
    error = error_of(batch_of(one_missing, CONSTANT, **fields))
    assert says(error, "'acc'", "data_source='products'", "index=17", "What is 2 * 3?")
    assert not says(error, "per_turn")


def test_an_error_about_a_list_proposes_per_turn_and_rubrics() -> None:
    lists = [[1.0, 0.0]] * 8
    error = error_of(batch_of(lists, CONSTANT))
    assert says(error, "'acc'", "algorithm.rewards.per_turn=[acc]", "algorithm.rewards.rubrics=[acc]")
