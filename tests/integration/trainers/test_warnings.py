"""Warnings and errors in a training that say which reward or which row of the data they are about."""

import logging
from typing import Any

import numpy as np
import pytest

from tests.configs import compose
from tests.facts import says
from tests.integration.trainers.ray_runs import KEYS, LENGTHS, UIDS, OwnFit, data_proto
from verl_ext.errors import DataError

GDPO = ("algorithm.adv_estimator=gdpo", KEYS)


def of_rewards(acc: Any, format_reward: Any, **fields: Any) -> Any:
    """A batch of two prompts with four responses each."""
    size = len(UIDS)
    columns = {"acc": np.array(acc, dtype=object), "format": np.array(format_reward, dtype=object), **fields}
    data = data_proto(UIDS, LENGTHS, [0.0] * size, columns)
    data.meta_info["reward_extra_keys"] = ["acc", "format"]
    return data


VARYING = [1.0, 0.0, 0.0, 0.0] * 2
CONSTANT = [1.0] * 8


def warnings_of(caplog: pytest.LogCaptureFixture, batches: list[Any]) -> list[str]:
    """The warnings of a run that computes these batches."""
    caplog.clear()
    trainer = OwnFit(compose(*GDPO))
    caplog.clear()
    with caplog.at_level(logging.WARNING, "verl_ext"):
        for data in batches:
            trainer.fit(data=data)
    return [record.getMessage() for record in caplog.records]


def test_a_run_without_advantages_is_warned_once_with_the_rewards_that_do_not_vary(
    caplog: pytest.LogCaptureFixture,
) -> None:
    zero, nonzero = of_rewards(CONSTANT, CONSTANT), of_rewards(VARYING, CONSTANT)
    assert warnings_of(caplog, [zero] * 4 + [nonzero] + [zero] * 4) == []
    (text,) = warnings_of(caplog, [zero] * 12)
    assert says(text, "'acc', 'format'", "5")
    # The two rewards vary, but their sum does not.
    opposite = of_rewards(VARYING, [1 - value for value in VARYING])
    (text,) = warnings_of(caplog, [opposite] * 5)
    assert not says(text, "'acc'")


def messages(*texts: str) -> np.ndarray:
    """The prompts of the rows, as verl's data set gives them."""
    prompts = np.empty(len(texts), dtype=object)
    prompts[:] = [[{"role": "user", "content": text}] for text in texts]
    return prompts


def test_an_error_about_a_reward_names_the_row_of_the_data() -> None:
    fields = {
        "data_source": np.array(["sums"] * 4 + ["products"] * 4, dtype=object),
        "extra_info": np.array([{"index": 3}] * 4 + [{"index": 17}] * 4, dtype=object),
        "raw_prompt": messages(*["2+3"] * 4, *["What is\n2 * 3? " + "x" * 100] * 4),
    }
    trainer = OwnFit(compose(*GDPO))
    missing = [*VARYING[:5], None, *VARYING[6:]]
    with pytest.raises(DataError) as raised:
        trainer.fit(data=of_rewards(missing, CONSTANT, **fields))
    assert says(raised.value, "'acc'", "data_source='products'", "index=17", "What is 2 * 3?")
    assert not says(raised.value, "per_turn")
    # Only a list is proposed to be a reward per turn.
    lists = np.empty(8, dtype=object)
    lists[:] = [[1.0, 0.0]] * 8
    with pytest.raises(DataError) as raised:
        trainer.fit(data=of_rewards(lists, CONSTANT))
    assert says(raised.value, "'acc'", "algorithm.rewards.per_turn=[acc]", "algorithm.rewards.rubrics=[acc]")
