"""Per-turn rewards in verl's convention: turns in a mask, lists of a reward function, and advantages on tokens."""

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given

from tests.batches import rollouts
from tests.calls import call_on_tensors, object_array, table_of
from tests.estimators.estimator_variants import EVERY_VARIANT as EVERY
from tests.estimators.estimator_variants import call_on_rollout as run_estimator
from tests.estimators.estimator_variants import components
from tests.facts import says
from verl_ext import DataError, Settings, build, per_turn
from verl_ext.advantages import queue
from verl_ext.advantages.estimator import compute, computing
from verl_ext.advantages.table import Request
from verl_ext.errors import ConfigurationError
from verl_ext.run import Run

CONFIG = {"rewards": {"keys": ["tool", "right"], "per_turn": ["tool"], "turn_discount": 0.5}}
# Two prompts with two responses each. The responses have two turns, one turn, three turns, and one turn.
UIDS = ["p", "p", "q", "q"]
MASKS = [[1, 1, 0, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0], [0, 1, 0, 1, 1, 0, 1], [1, 0, 0, 0, 0, 0, 0]]
TOOL = [[1.0, 0.0], [1.0], [0.0, 1.0, 1.0], [0.0]]
RIGHT = [1.0, 0.0, 0.0, 1.0]
TURNS = 7


def run_of(name: str, config: dict[str, Any]) -> Run:
    """Return a run without a trainer."""
    settings = Settings.parse(config)
    return Run(name, settings, build(name, settings))


def advantages_of(
    name: str,
    fields: dict[str, Any],
    *,
    config: dict[str, Any] = CONFIG,
    attention: torch.Tensor | None = None,
    run: Run | None = None,
) -> torch.Tensor:
    """Return the advantage of each token for the responses in `MASKS`."""
    mask = torch.tensor(MASKS)
    call = call_on_tensors(
        name,
        torch.zeros(mask.shape, dtype=torch.float64),
        mask,
        UIDS,
        config=config,
        components={key: object_array(values) for key, values in fields.items()},
        batch={} if attention is None else {"attention_mask": attention},
        returned=("tool", "right"),
        run=run,
    )
    return call.tensor


def texts(lists: list[list[float]]) -> list[str]:
    """Return each list as the text that a reward function returns."""
    return [per_turn(entries) for entries in lists]


def test_each_turn_has_its_advantage_on_its_tokens():
    advantages = advantages_of("drgrpo", {"tool": texts(TOOL), "right": RIGHT})
    # The returns of the first turns of p are 1 + 0.5 * 0 + 0.5 * 1 = 1.5 and 1 + 0 = 1.
    advantage_of_p = (1.5 - 1) / 2
    # The returns of the first turns of q are 0 + 0.5 * 1 + 0.25 * 1 + 0.25 * 0 = 0.75 and 0 + 1 = 1.
    advantage_of_q = (0.75 - 1) / 2
    # The other turns are groups of one.
    expected = torch.zeros(4, 7, dtype=torch.float64)
    expected[0, :2] = advantage_of_p
    expected[1, :3] = -advantage_of_p
    expected[2, 1] = advantage_of_q
    expected[3, 0] = -advantage_of_q
    torch.testing.assert_close(advantages, expected, rtol=0, atol=1e-12)


@EVERY
@given(rollout=rollouts(lengths=1))
def test_responses_of_one_turn_have_bitwise_identical_advantages(name, config, rollout):
    columns = components(rollout)
    columns["a"] = object_array([[entry] for entry in rollout.columns["a"]])
    per_turn_settings = config["rewards"] | {"per_turn": ["a"], "turn_discount": 0.3}
    without_turns = run_estimator(name, config, rollout)
    with_turns = run_estimator(name, config | {"rewards": per_turn_settings}, rollout, components=columns)
    assert torch.equal(with_turns.tensor, without_turns.tensor)
    assert with_turns.state == without_turns.state


@pytest.mark.parametrize(
    ("rejected", "last_advantage", "turns_per_response"), [("keep", 0.125, 7 / 4), ("exclude", 0.0, 4 / 3)]
)
def test_the_turns_of_a_rejected_response(rejected, last_advantage, turns_per_response):
    """The third response is rejected after its turns have been read, as rollout correction does."""
    run = run_of("drgrpo", {"rewards": CONFIG["rewards"] | {"rejected": rejected}})
    fields = {"tool": object_array(texts(TOOL)), "right": object_array(RIGHT)}
    mask = torch.tensor(MASKS)
    table = table_of(run, fields, UIDS, mask, returned=["tool", "right"])
    mask[2] = 0
    with computing(run, table):
        advantages, _ = compute(
            "drgrpo", token_level_rewards=torch.zeros(4, 7), response_mask=mask, index=object_array(UIDS)
        )
    assert advantages[:2].any()
    assert not advantages[2].any()
    assert advantages[3, 0] == pytest.approx(last_advantage)
    assert run.metrics["advantage/rejected_responses"] == 1
    assert run.metrics["advantage/turns"] == turns_per_response


def advantages_and_missing_entries(lists: list[list[float]]) -> tuple[torch.Tensor, float]:
    """Compute two batches in a run. Return the advantages and the number of missing entries of the second batch."""
    run = run_of("drgrpo", CONFIG)
    for _ in range(2):
        advantages = advantages_of("drgrpo", {"tool": texts(lists), "right": RIGHT}, run=run)
    assert run.metrics["reward/tool/truncated_entries"] == 0
    return advantages, run.metrics["reward/tool/missing_entries"]


def test_missing_entries_at_the_end_count_as_0(caplog):
    advantages, missing = advantages_and_missing_entries([[1.0], [1.0], [0.0, 1.0], []])
    assert missing == 3
    assert caplog.records == []
    padded = [[1.0, 0.0], [1.0], [0.0, 1.0, 0.0], [0.0]]
    assert torch.equal(advantages, advantages_of("drgrpo", {"tool": texts(padded), "right": RIGHT}))


def test_a_batch_without_entries_is_warned_about_once(caplog):
    advantages, missing = advantages_and_missing_entries([[], [], [], []])
    assert missing == TURNS
    [record] = caplog.records
    assert says(record.getMessage(), "'tool'", "per_turn")
    zeros = [[0.0] * len(entries) for entries in TOOL]
    assert torch.equal(advantages, advantages_of("drgrpo", {"tool": texts(zeros), "right": RIGHT}))


def test_missing_entries_are_counted_even_if_no_reward_is_logged():
    run = run_of("drgrpo", {"rewards": CONFIG["rewards"] | {"log": "none"}})
    advantages_of("drgrpo", {"tool": texts([[1.0, 0.0], [1.0], [0.0], []]), "right": RIGHT}, run=run)
    assert run.metrics["reward/tool/missing_entries"] == 3
    assert "reward/tool/mean" not in run.metrics


def test_unscored_entries_are_left_out():
    assert math.isnan(json.loads(per_turn([math.nan]))[0])
    lists = [[1.0, math.nan], [1.0], [0.0, 1.0, 1.0], [0.0]]
    advantages = advantages_of("gdpo", {"tool": texts(lists), "right": RIGHT})
    assert torch.isfinite(advantages).all()
    assert advantages.any()


NOT_A_LIST = "per_turn([...])"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("[1.0, 0.0, 1.0]", ("3 entries", "2 turns")),
        (1.0, (NOT_A_LIST,)),
        ("1.0", (NOT_A_LIST,)),
        ("not a list", (NOT_A_LIST,)),
        ('["a"]', (NOT_A_LIST,)),
        ([1.0, 0.0], (NOT_A_LIST,)),
        (None, (NOT_A_LIST,)),
        (f"[{10**400}]", (NOT_A_LIST,)),
        ("[" * 100_000, (NOT_A_LIST,)),
        ("[Infinity]", ("finite",)),
    ],
    ids=[
        "too long",
        "a number",
        "the text of a number",
        "another text",
        "a list of texts",
        "a list, not its text",
        "nothing",
        "too large",
        "too deep",
        "infinite",
    ],
)
def test_an_invalid_list_is_an_error_that_names_the_response(value, words):
    fields = {"tool": [value, *texts(TOOL)[1:]], "right": RIGHT}
    with pytest.raises(DataError) as error:
        advantages_of("drgrpo", fields)
    for word in ("'tool'", "'p'", *words):
        assert word in str(error.value)


@pytest.mark.parametrize("entries", ["12", b"12", {1: 0.5}], ids=str)
def test_per_turn_rejects_values_that_are_no_list_of_numbers(entries):
    with pytest.raises(DataError, match="per_turn"):
        per_turn(entries)


@pytest.mark.parametrize("value", ["[1.0, 0.0]", [1.0, 0.0]], ids=["text", "list"])
def test_a_list_without_per_turn_is_an_error(value):
    fields = {"tool": [value, *texts(TOOL)[1:]], "right": RIGHT}
    with pytest.raises(DataError, match="per_turn"):
        advantages_of("drgrpo", fields, config={"rewards": {"keys": ["tool", "right"]}})


def test_a_per_turn_reward_that_does_not_exist_is_an_error():
    with pytest.raises(ConfigurationError, match="per_turn"):
        advantages_of("drgrpo", {"right": RIGHT})


# The first and the third response have the maximum length. The second and the fourth are shorter.
ATTENTION = torch.tensor([[1] * 7, [1, 1, 1, 0, 0, 0, 0], [1] * 7, [1, 0, 0, 0, 0, 0, 0]])


def test_surplus_entries_of_a_truncated_response_are_dropped_and_counted():
    run = run_of("drgrpo", CONFIG)
    tool = texts(TOOL)
    tool[0] = "[1.0, 0.0, 5.0, 5.0]"
    advantages = advantages_of("drgrpo", {"tool": tool, "right": RIGHT}, attention=ATTENTION, run=run)
    assert torch.equal(advantages, advantages_of("drgrpo", {"tool": texts(TOOL), "right": RIGHT}))
    assert run.metrics["reward/tool/truncated_entries"] == 2
    assert run.metrics["reward/tool/missing_entries"] == 0


def test_surplus_entries_of_a_complete_response_are_an_error():
    tool = texts(TOOL)
    tool[1] = "[1.0, 0.0]"
    with pytest.raises(DataError, match="'p'"):
        advantages_of("drgrpo", {"tool": tool, "right": RIGHT}, attention=ATTENTION)


def test_a_session_is_truncated_if_any_output_has_the_maximum_length(monkeypatch):
    """A short output may follow a truncated output."""
    masks = torch.nested.nested_tensor([torch.ones(5), torch.ones(2), torch.ones(3)], layout=torch.jagged)
    monkeypatch.setattr(queue, "fetch", lambda *_: {"response_mask": masks})
    request = Request(Settings().rewards, turns=True, max_response_length=5)
    table = queue.read_table(["p_0_0", "p_0_1", "p_1_0"], "train", request)
    assert table.truncated.tolist() == [True, False]
