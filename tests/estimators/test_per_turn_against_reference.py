"""Each estimator with per-turn rewards against plain loops: uneven turns and groups, missing scores, a discount."""

import math
import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests import reference
from tests.reference import NAN
from verl_ext import Batch, Settings, build
from verl_ext.core.chain import Result
from verl_ext.core.turns import Turns

KEYS = ["tool", "correct", "form"]
WEIGHTS = [1.0, 0.5, 2.0]
REWARDS = {"keys": KEYS, "weights": WEIGHTS, "accuracy_key": "correct"}
VALUES = [0.0, 1.0, -1.0, 0.5]
DISCOUNT = st.sampled_from([1.0, 0.5])

Conditions = dict[str, tuple[str, float]]


@dataclass
class Response:
    """A response to a prompt: the reward `tool` for each turn, and the other rewards once."""

    uid: str
    tool: list[float]
    correct: float
    form: float
    lengths: list[int]
    accuracy: float

    @property
    def turn_count(self) -> int:
        """The number of turns."""
        return len(self.tool)


@st.composite
def responses(draw: st.DrawFn) -> list[Response]:
    """Return uneven groups in any order, of responses with one to four turns."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    group_sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    unscored_fraction = random.choice([0.0, 0.1, 0.4])

    def with_unscored(values: np.ndarray) -> list[float]:
        is_unscored = random.random(len(values)) < unscored_fraction
        return np.where(is_unscored, NAN, values).tolist()

    result = []
    group_of_response = np.repeat(np.arange(len(group_sizes)), group_sizes)
    for group in random.permutation(group_of_response):
        turn_count = int(random.choice([1, 1, 2, 3, 4]))
        correct, form = with_unscored(random.choice(VALUES, size=2))
        (accuracy,) = with_unscored(random.integers(0, 5, 1) / 4)
        tool = with_unscored(random.choice(VALUES, size=turn_count))
        lengths = random.integers(0, 9, turn_count).tolist()
        result.append(Response(f"p{group}", tool, correct, form, lengths, accuracy))
    return result


@dataclass
class Row:
    """One turn of a response."""

    prompt: str
    turn: int
    is_last: bool
    response: int
    length: int
    accuracy: float
    returns: dict[str, float]

    @property
    def label(self) -> tuple[str, int]:
        """The group: the responses to a prompt that reached the turn."""
        return self.prompt, self.turn


def rows_of(batch: list[Response], discount: float, conditions: Conditions | None = None) -> list[Row]:
    """Return one row per turn, with the returns of the rewards after the conditions."""
    rows = []
    for number, response in enumerate(batch):
        count = response.turn_count
        rewards = {"tool": response.tool, "correct": [response.correct] * count, "form": [response.form] * count}
        rewards = reference.conditioned(rewards, conditions or {})
        last_turn = count - 1
        for turn in range(count):
            discounted = [discount ** (later - turn) * rewards["tool"][later] for later in range(turn, count)]
            to_the_end = discount ** (last_turn - turn)
            returns = {
                "tool": sum(discounted),
                "correct": to_the_end * rewards["correct"][turn],
                "form": to_the_end * rewards["form"][turn],
            }
            row = Row(
                prompt=response.uid,
                turn=turn,
                is_last=turn == last_turn,
                response=number,
                length=response.lengths[turn],
                accuracy=response.accuracy,
                returns=returns,
            )
            rows.append(row)
    return rows


def columns_of(rows: list[Row]) -> dict[str, list[float]]:
    """Return the returns of each reward."""
    return {key: [row.returns[key] for row in rows] for key in KEYS}


def labels_of(rows: list[Row]) -> list[tuple[str, int]]:
    """Return the group of each row."""
    return [row.label for row in rows]


def lengths_of(rows: list[Row]) -> list[int]:
    """Return the number of tokens of each row."""
    return [row.length for row in rows]


def totals_of(rows: list[Row]) -> list[float]:
    """Return the weighted sum of the returns of each row."""
    return reference.weighted_total(list(columns_of(rows).values()), WEIGHTS)


def mean_accuracy(batch: list[Response], uid: str | None = None) -> float | None:
    """Return the mean over the scored responses to a prompt, or by default of the batch. None: there is none."""
    known = reference.scored([response.accuracy for response in batch if uid in (None, response.uid)])
    return statistics.fmean(known) if known else None


def core_batch(batch: list[Response], discount: float, **more: Any) -> Batch:
    """Return the batch of the core."""
    turns = Turns.of_counts([response.turn_count for response in batch], (0,), discount)
    response_of_row = [response for response in batch for _ in response.tool]
    rewards = []
    lengths = []
    for response in batch:
        rewards.extend([tool, response.correct, response.form] for tool in response.tool)
        lengths.extend(response.lengths)
    return Batch.of(
        rewards,
        [response.uid for response in response_of_row],
        turns=turns,
        keys=KEYS,
        lengths=lengths,
        accuracy=[response.accuracy for response in response_of_row],
        outputs=(turns.number == 0).astype(float),
        **more,
    )


def assert_advantages(
    name: str, batch: list[Response], discount: float, config: dict[str, Any], expected: list[float], state=None
) -> Result:
    """Compare an estimator with the expected advantages of each row, and return its result."""
    settings = Settings.parse({"rewards": REWARDS} | config)
    chain = build(name, settings)
    result = chain(core_batch(batch, discount, conditions=settings.rewards.conditions), state)
    np.testing.assert_allclose(result.advantages, expected, rtol=1e-8, atol=1e-8)
    return result


@given(responses(), DISCOUNT)
def test_drgrpo_equals_the_plain_loops(batch, discount):
    rows = rows_of(batch, discount)
    expected = reference.drgrpo(totals_of(rows), labels_of(rows))
    assert_advantages("drgrpo", batch, discount, {}, expected)


@given(responses(), DISCOUNT)
def test_grpo_as_a_list_of_steps_equals_the_plain_loops(batch, discount):
    rows = rows_of(batch, discount)
    expected = reference.grpo(totals_of(rows), labels_of(rows))
    steps = ["weighted_sum", "center", {"step": "scale_by_std", "epsilon": 1e-6}]
    assert_advantages("compose", batch, discount, {"compose": {"steps": steps}}, expected)


def whitened_by_sequences(totals: list[float], rows: list[Row]) -> list[float]:
    """Divide by the standard deviation in which each response counts once. The mean is not subtracted."""
    squares_of_response: dict[int, list[float]] = {}
    for total, row in zip(totals, rows, strict=True):
        if not math.isnan(total):
            squares_of_response.setdefault(row.response, []).append(total**2)
    std = 0.0
    if len(squares_of_response) >= 2:
        mean_squares = [statistics.fmean(squares) for squares in squares_of_response.values()]
        std = math.sqrt(sum(mean_squares) / (len(mean_squares) - 1))
    return [total / (std + 1e-6) for total in totals]


@given(
    responses(),
    DISCOUNT,
    st.sampled_from(["sequence", "token", "none"]),
    st.sampled_from([{}, {"tool": ("correct", 0.5)}, {"tool": ("correct", 0.5), "form": ("correct", 0.0)}]),
)
def test_gdpo_with_conditions_before_the_returns_equals_the_plain_loops(batch, discount, whiten, conditions):
    rows = rows_of(batch, discount, conditions)
    labels = labels_of(rows)
    if whiten == "token":
        expected = reference.gdpo(columns_of(rows), labels, lengths_of(rows), weights=WEIGHTS, whiten="token")
    else:
        normalized = [reference.over_std(column, labels, 0.0) for column in columns_of(rows).values()]
        totals = reference.weighted_total(normalized, WEIGHTS)
        reference.cancel(totals, labels)
        expected = totals if whiten == "none" else whitened_by_sequences(totals, rows)
    conditions_setting = {
        easy: {"reward": hard, "at_least": threshold} for easy, (hard, threshold) in conditions.items()
    }
    config = {"gdpo": {"whiten": whiten}, "rewards": REWARDS | {"conditions": conditions_setting}}
    assert_advantages("gdpo", batch, discount, config, reference.learnt(expected))


def balance_factor(rows: list[Row], in_valid_group: list[bool], balance: str) -> float:
    """Return the tokens or responses of the batch divided by those in valid groups.

    A response counts if one of its turns is in a valid group.
    """
    valid_rows = [row for row, is_valid in zip(rows, in_valid_group, strict=True) if is_valid]
    if balance == "token":
        total = sum(lengths_of(rows))
        valid = sum(lengths_of(valid_rows))
    else:
        total = len({row.response for row in rows})
        valid = len({row.response for row in valid_rows})
    return total / valid if valid > 0 else 1.0


@given(responses(), DISCOUNT, st.sampled_from(["token", "sequence"]))
def test_dgpo_with_the_difficulty_of_the_prompt_equals_the_plain_loops(batch, discount, balance):
    rows = rows_of(batch, discount)
    labels = labels_of(rows)
    totals = totals_of(rows)
    in_valid_group = [False] * len(rows)
    for group in reference.groups(labels).values():
        is_valid = reference.has_variance([totals[row] for row in group])
        for row in group:
            in_valid_group[row] = is_valid
    factor = balance_factor(rows, in_valid_group, balance)
    expected = [factor * value for value in reference.over_mad(totals, labels, 1e-4)]

    # A prompt is valid if one of its turns is. Its accuracy counts each response once.
    rows_of_prompt = reference.groups([row.prompt for row in rows])
    valid_prompts = [group for group in rows_of_prompt.values() if any(in_valid_group[row] for row in group)]
    last_rows = [[row for row in group if rows[row].is_last] for group in valid_prompts]
    weights = reference.difficulty_weights(last_rows, [row.accuracy for row in rows], temperature=2.0)
    for group, weight in zip(valid_prompts, weights, strict=True):
        for row in group:
            expected[row] *= weight
    assert_advantages("dgpo", batch, discount, {"dgpo": {"balance": balance}}, reference.learnt(expected))


@given(st.lists(responses(), min_size=1, max_size=4), DISCOUNT, st.sampled_from(["soft", "window"]))
def test_hadw_compares_the_prompt_with_the_batch_once_per_response(batches, discount, anchor):
    history = reference.History(anchor)
    state = None
    for batch in batches:
        rows = rows_of(batch, discount)
        expected = reference.grpo(totals_of(rows), labels_of(rows))
        batch_accuracy = mean_accuracy(batch)
        if batch_accuracy is not None:
            has_no_anchor = anchor == "soft" and history.capability is None
            prior = history.advance(batch_accuracy)
            for number, row in enumerate(rows):
                prompt_accuracy = mean_accuracy(batch, row.prompt)
                if prompt_accuracy is not None and not has_no_anchor:
                    expected[number] *= history.weight(expected[number], prompt_accuracy - prior)
        result = assert_advantages("hadw", batch, discount, {"hadw": {"anchor": anchor}}, expected, state)
        state = result.state


@given(responses(), DISCOUNT)
def test_a_focal_weight_depends_on_the_accuracy_of_the_prompt(batch, discount):
    rows = rows_of(batch, discount)
    expected = reference.centered(totals_of(rows), labels_of(rows))
    for number, row in enumerate(rows):
        accuracy = mean_accuracy(batch, row.prompt)
        if accuracy is not None:
            expected[number] *= 1 - accuracy
    config = {"compose": {"steps": ["weighted_sum", "center", "weight_by_focal"]}}
    assert_advantages("compose", batch, discount, config, reference.learnt(expected))


@given(responses(), DISCOUNT, st.sampled_from([1e-6, 0.5]))
def test_maxrl_equals_the_plain_loops(batch, discount, epsilon):
    """maxrl needs rewards of at least 0."""
    for response in batch:
        response.tool = [abs(reward) for reward in response.tool]
        response.correct = abs(response.correct)
        response.form = abs(response.form)
    rows = rows_of(batch, discount)
    expected = reference.maxrl(totals_of(rows), labels_of(rows), epsilon)
    assert_advantages("maxrl", batch, discount, {"maxrl": {"epsilon": epsilon}}, expected)


@given(responses(), DISCOUNT)
def test_gd2po_equals_the_plain_loops(batch, discount):
    rows = rows_of(batch, discount)
    expected = reference.gd2po(columns_of(rows), labels_of(rows), lengths_of(rows), weights=WEIGHTS)
    assert_advantages("gd2po", batch, discount, {}, expected)
