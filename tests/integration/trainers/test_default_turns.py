"""Rewards by turn on the default trainer, through verl's own queue: sessions of one to three outputs."""

from __future__ import annotations

import pytest

from tests import reference
from tests.integration.pipeline import Pipeline, Update
from tests.integration.stand_ins import REWARDS
from tests.integration.trainers.default_runs import DRGRPO, PADDED

BY_TURN = "+algorithm.rewards={keys:[%s,acc],by_turn:[%s]}"


def wanted(update: Update, entries) -> dict[str, float]:
    """The advantage of each row by its key: outputs are the turns of a session."""
    sessions: dict[str, list[tuple[int, int]]] = {}
    for row, key in enumerate(update.keys):
        session, _, index = key.rpartition("_")
        if not update.padding[row]:
            sessions.setdefault(session, []).append((int(index), row))
    labels, returns, keys = [], [], []
    for turns in map(sorted, sessions.values()):
        accuracy = REWARDS[update.answers[turns[-1][1]][0]][0]
        given = entries(len(turns) - 1, accuracy)
        for turn, row in turns:
            labels.append((update.prompts[row], turn))
            returns.append(sum(given[turn:]) + accuracy)
            keys.append(update.keys[row])
    return dict(zip(keys, reference.drgrpo(returns, labels), strict=True))


CASES = {
    "steps": lambda drafts, accuracy: [1.0] * drafts + [accuracy],  # text of the reward function
    "tool_rewards": lambda drafts, _: [1.0] * drafts,  # a list of the agent loop, shorter by a turn
}


@pytest.mark.parametrize("key", CASES)
def test_each_output_of_a_session_is_a_turn_with_its_advantage(pipeline: Pipeline, key: str) -> None:
    result = pipeline.run("several", *DRGRPO, BY_TURN % (key, key), PADDED)
    (update,) = result.updates
    expected = wanted(update, CASES[key])
    found = {name: update.advantage(row) for row, name in enumerate(update.keys) if not update.padding[row]}
    assert found == pytest.approx(expected, abs=1e-6)
    assert len({abs(value) for value in found.values()}) > 2
    assert result.metrics[1]["advantage/turns"] == pytest.approx(len(expected) / 12)
    assert f"reward/{key}/by_turn/1/mean" in result.metrics[1]


def test_turns_are_those_before_rollout_correction_rejects_a_token(pipeline: Pipeline) -> None:
    """Every token is rejected; the responses count with the turns that they had."""
    reject = "+algorithm.rollout_correction={rollout_rs:token_k1,rollout_rs_threshold:0.999_1.001}"
    given = (*DRGRPO, BY_TURN % ("steps", "steps"), "actor_rollout_ref.rollout.calculate_log_probs=True")
    plain = pipeline.run("several", *given)
    result = pipeline.run("several", *given, reject)
    assert result.metrics[1]["advantage/rejected_responses"] == 12
    for name in ("advantage/turns", "advantage/std", "reward/steps/mean"):
        assert result.metrics[1][name] == pytest.approx(plain.metrics[1][name])
    assert not any(row.any() for row in result.updates[0].advantages)
