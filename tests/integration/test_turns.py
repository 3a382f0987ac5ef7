"""Rewards by turn in verl's convention: turns in a mask, lists of a reward function, advantages on tokens."""

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given

from tests.batches import rollouts
from tests.calls import call_on_tensors, object_array, table_of
from tests.estimators.estimator_variants import EVERY_VARIANT as EVERY
from tests.estimators.estimator_variants import call_on_rollout as computed
from tests.estimators.estimator_variants import components
from verl_ext import DataError, Settings, build, per_turn
from verl_ext.advantages import queue
from verl_ext.advantages.estimator import compute, computing
from verl_ext.advantages.table import Request
from verl_ext.errors import ConfigurationError
from verl_ext.run import Run

CONFIG = {"rewards": {"keys": ["tool", "right"], "per_turn": ["tool"], "turn_discount": 0.5}}
# Two prompts; two turns, one, three with a tool's tokens between them, one.
MASKS = [[1, 1, 0, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0], [0, 1, 0, 1, 1, 0, 1], [1, 0, 0, 0, 0, 0, 0]]
TOOL = [[1.0, 0.0], [1.0], [0.0, 1.0, 1.0], [0.0]]
RIGHT = [1.0, 0.0, 0.0, 1.0]
UIDS = ["p", "p", "q", "q"]


def run_of(name: str, config: dict[str, Any]) -> Run:
    settings = Settings.parse(config)
    return Run(name, settings, build(name, settings))


def advantages(
    name: str,
    masks: list[list[int]],
    fields: dict[str, Any],
    *,
    config: dict[str, Any] = CONFIG,
    attention: torch.Tensor | None = None,
    run: Run | None = None,
) -> torch.Tensor:
    mask = torch.tensor(masks)
    batch = {} if attention is None else {"attention_mask": attention}
    columns = {key: object_array(values) for key, values in fields.items()}
    given_too = {"config": config, "components": columns, "batch": batch, "returned": ("tool", "right"), "run": run}
    return call_on_tensors(name, torch.zeros(mask.shape, dtype=torch.float64), mask, UIDS, **given_too).tensor


def texts(lists: list[list[float]]) -> list[str]:
    return [per_turn(entries) for entries in lists]


def test_each_turn_has_its_advantage_on_its_tokens():
    found = advantages("drgrpo", MASKS, {"tool": texts(TOOL), "right": RIGHT})
    # Returns of p: 1 + .5 * 0 + .5 * 1 = 1.5 and 0 + 1 = 1; 1 + 0 = 1. The second turn stands alone.
    # Returns of q: 0 + .5 + .25 + 0, 1 + .5, 1; 0 + 1. The second and third turn stand alone.
    first, other = (1.5 - 1) / 2, (0.75 - 1) / 2
    wanted = [[first] * 2 + [0] * 5, [-first] * 3 + [0] * 4, [0, other, *[0] * 5], [-other, *[0] * 6]]
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-12)


@EVERY
@given(rollout=rollouts(lengths=1))
def test_with_one_turn_each_nothing_changes_to_the_last_bit(name, config, rollout):
    plain = computed(name, config, rollout)
    columns = components(rollout) | {"a": object_array([[entry] for entry in rollout.columns["a"]])}
    config = config | {"rewards": config["rewards"] | {"per_turn": ["a"], "turn_discount": 0.3}}
    found = computed(name, config, rollout, components=columns)
    assert torch.equal(found.tensor, plain.tensor)
    assert found.state == plain.state


@pytest.mark.parametrize("rejected", ["keep", "exclude"])
def test_a_rejected_response_keeps_its_turns_or_leaves(rejected):
    """On the default trainer the turns are read before rollout correction empties a mask."""
    config = {"rewards": CONFIG["rewards"] | {"rejected": rejected}}
    run = run_of("drgrpo", config)
    fields = {"tool": object_array(texts(TOOL)), "right": object_array(RIGHT)}
    table = table_of(run, fields, UIDS, torch.tensor(MASKS), returned=["tool", "right"])
    after = torch.tensor([MASKS[0], MASKS[1], [0] * 7, MASKS[3]])
    with computing(run, table):
        found, _ = compute(
            "drgrpo", token_level_rewards=torch.zeros(4, 7), response_mask=after, index=object_array(UIDS)
        )
    assert found[:2].any()
    assert not found[2].any()
    assert found[3, 0] == pytest.approx(0.125 if rejected == "keep" else 0.0)
    assert run.metrics["advantage/rejected_responses"] == 1
    assert run.metrics["advantage/turns"] == (7 / 4 if rejected == "keep" else 4 / 3)


@pytest.mark.parametrize("lists", [[[1.0], [1.0], [0.0, 1.0], []], [[], [], [], []]])
def test_a_missing_entry_at_the_end_is_0_and_counted_and_a_batch_without_any_is_warned_of_once(lists, caplog):
    full = [[*entries, *[0.0] * (len(turns) - len(entries))] for entries, turns in zip(lists, TOOL, strict=True)]
    run = run_of("drgrpo", CONFIG)
    for _ in range(2):
        short = advantages("drgrpo", MASKS, {"tool": texts(lists), "right": RIGHT}, run=run)
        assert run.metrics["reward/tool/missing_entries"] == sum(map(len, TOOL)) - sum(map(len, lists))
        assert run.metrics["reward/tool/truncated_entries"] == 0
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == (not any(lists))
    assert all("'tool'" in text and "per_turn" in text for text in warned)
    assert torch.equal(short, advantages("drgrpo", MASKS, {"tool": texts(full), "right": RIGHT}))


def test_missing_entries_are_counted_even_if_no_reward_is_logged():
    run = run_of("drgrpo", {"rewards": CONFIG["rewards"] | {"log": "none"}})
    advantages("drgrpo", MASKS, {"tool": texts([[1.0, 0.0], [1.0], [0.0], []]), "right": RIGHT}, run=run)
    assert run.metrics["reward/tool/missing_entries"] == 3
    assert "reward/tool/mean" not in run.metrics


def test_entries_that_are_not_scored_are_left_out():
    assert math.isnan(json.loads(per_turn([math.nan]))[0])
    lists = [[1.0, math.nan], [1.0], [0.0, 1.0, 1.0], [0.0]]
    found = advantages("gdpo", MASKS, {"tool": texts(lists), "right": RIGHT})
    assert torch.isfinite(found).all()
    assert found.any()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("[1.0, 0.0, 1.0]", ("'p'", "3 entries", "2 turns")),
        (1.0, ("'p'", "per_turn([...])")),
        ("1.0", ("'p'", "per_turn([...])")),
        ("not a list", ("'p'", "per_turn([...])")),
        ('["a"]', ("'p'", "per_turn([...])")),
        ([1.0, 0.0], ("'p'", "per_turn([...])")),
        (None, ("'p'", "per_turn([...])")),
        (f"[{10**400}]", ("'p'", "per_turn([...])")),
        ("[" * 100_000, ("'p'", "per_turn([...])")),
        ("[Infinity]", ("'p'", "finite")),
    ],
)
def test_a_wrong_list_is_an_error_that_names_the_response(value, words):
    with pytest.raises(DataError) as error:
        advantages("drgrpo", MASKS, {"tool": [value, *texts(TOOL)[1:]], "right": RIGHT})
    assert all(word in str(error.value) for word in (*words, "'tool'"))


@pytest.mark.parametrize("entries", ["12", b"12", {1: 0.5}], ids=str)
def test_by_turn_refuses_what_is_no_list_of_numbers(entries):
    with pytest.raises(DataError, match="per_turn"):
        per_turn(entries)


@pytest.mark.parametrize("value", ["[1.0, 0.0]", [1.0, 0.0]])
def test_a_list_that_was_not_announced_is_an_error_that_says_how(value):
    config = {"rewards": {"keys": ["tool", "right"]}}
    with pytest.raises(DataError, match="per_turn"):
        advantages("drgrpo", MASKS, {"tool": [value, *texts(TOOL)[1:]], "right": RIGHT}, config=config)


def test_a_reward_that_does_not_exist_is_an_error():
    with pytest.raises(ConfigurationError, match="per_turn"):
        advantages("drgrpo", MASKS, {"right": RIGHT})


def test_entries_of_a_response_that_was_cut_are_dropped_and_counted():
    attention = torch.ones(4, 7, dtype=torch.int64)
    attention[1, 3:] = attention[3, 1:] = 0
    run = run_of("drgrpo", CONFIG)
    fields = {"tool": ["[1.0, 0.0, 5.0, 5.0]", *texts(TOOL)[1:]], "right": RIGHT}
    found = advantages("drgrpo", MASKS, fields, attention=attention, run=run)
    assert torch.equal(found, advantages("drgrpo", MASKS, {"tool": texts(TOOL), "right": RIGHT}))
    assert run.metrics["reward/tool/truncated_entries"] == 2
    assert run.metrics["reward/tool/missing_entries"] == 0
    fields["tool"][1] = "[1.0, 0.0]"  # its response was not cut
    with pytest.raises(DataError, match="'p'"):
        advantages("drgrpo", MASKS, fields, attention=attention)


def test_a_session_was_cut_if_any_of_its_outputs_has_the_longest_length(monkeypatch):
    """A short output may follow one that was cut."""
    masks = torch.nested.nested_tensor([torch.ones(size) for size in (5, 2, 3)], layout=torch.jagged)
    monkeypatch.setattr(queue, "fetch", lambda *_: {"response_mask": masks})
    request = Request(Settings().rewards, turns=True, max_response_length=5)
    table = queue.read_table(["p_0_0", "p_0_1", "p_1_0"], "train", request)
    assert table.truncated.tolist() == [True, False]
