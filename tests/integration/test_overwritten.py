"""A preset on the command line comes after the user's own file, and would put its settings back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.test_driver import main_ppo

MINE = """
hydra: {searchpath: ['pkg://verl.trainer.config']}
defaults: [%s_self_]
algorithm:
  rewards: {keys: [acc, format], weights: [1, 0.5]}
  gdpo: {whiten: token}
actor_rollout_ref: {actor: {loss_agg_mode: seq-mean-token-mean}}
"""


@pytest.fixture
def run(tmp_path: Path):
    def start(file: str, *arguments: str):
        (tmp_path / "mine.yaml").write_text(file)
        stop = "actor_rollout_ref.actor.policy_loss.loss_mode=vanilla", "data.train_batch_size=0"
        return main_ppo(tmp_path, "--config-path", str(tmp_path), "--config-name", "mine", *arguments, *stop)

    return start


def test_what_would_be_lost_is_named_with_both_ways_out(run) -> None:
    done = run(MINE % "ppo_trainer, ", "+verl_ext=dgpo")
    assert done.returncode == 1
    told = " ".join(done.stderr.split())
    assert "+verl_ext=dgpo on the command line comes after mine.yaml and replaces what stands there" in told
    assert "algorithm.rewards.keys=['acc', 'format'] (by None)" in told
    assert "algorithm.rewards.weights=[1, 0.5] (by None)" in told
    assert "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean (by token-mean)" in told
    assert "algorithm.gdpo.whiten" not in told.split("replaces what stands there")[1].split("put the preset")[0]
    assert "defaults: [ppo_trainer, verl_ext: dgpo, _self_]" in told


def test_a_preset_within_the_file_or_values_repeated_on_the_command_line_lose_nothing(run) -> None:
    kept = ("algorithm.rewards.keys=[acc,format]", "algorithm.rewards.weights=[1,0.5]", "algorithm.gdpo.whiten=token")
    for done in (run(MINE % "ppo_trainer, verl_ext: gdpo, "), run(MINE % "ppo_trainer, ", "+verl_ext=gdpo", *kept)):
        assert "comes after mine.yaml" not in done.stderr
        assert "train_batch_size" in done.stderr  # verl's own complaint, which comes after ours


def test_a_file_of_verls_own_holds_nothing_that_anyone_chose(tmp_path: Path) -> None:
    """It sets loss_agg_mode=token-mean, which the preset replaces."""
    arguments = ("+verl_ext=drgrpo", "async_training=null", "algorithm.drgrpo.check_loss=maybe")
    program = "verl.experimental.fully_async_policy.fully_async_main"
    done = main_ppo(tmp_path, *arguments, program=program)
    assert done.returncode == 1
    assert "check_loss must be True or False, found 'maybe'" in done.stderr
    assert "comes after" not in done.stderr
