"""A shorter update in whole runs of verl: the weights are those of verl's own update."""

import json

import pytest
import torch

from tests.configs import compose
from tests.end_to_end import deterministic_order
from tests.end_to_end.run import FINDS_TESTS
from tests.end_to_end.test_training import TIMEOUT, latest
from verl_ext.checks.judge import judge
from verl_ext.update import rule as update

pytestmark = [pytest.mark.end_to_end, pytest.mark.slow, pytest.mark.runs(2)]
ACTOR = "actor_rollout_ref.actor"
GRPO = "algorithm.adv_estimator=grpo"
RAY = "trainer.use_v1=False"
GSPO, EPOCHS = f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.ppo_epochs=2"
FOUR = f"{ACTOR}.ppo_mini_batch_size=2"
PER_SEQUENCE = f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"
NORM = (f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", f"{ACTOR}.loss_scale_factor=16")
STATIC = (f"{ACTOR}.use_dynamic_bsz=False", "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4")
TWO = "trainer.n_gpus_per_node=2"
KILLED = "trainer.save_freq=1"
CRITIC = ("critic.enable=True", "critic.model.path=${actor_rollout_ref.model.path}")  # trained, but without effect
REFERENCE = ("algorithm.use_kl_in_reward=True",)
ALONE = ("algorithm.adv_estimator=reinforce_plus_plus", "actor_rollout_ref.rollout.n=1")
BOTH = ("skip_zero_advantage", "share_prompts")
CASES = {
    "token-mean": (BOTH[:1], ()),
    "killed, norm, static, 4 mini-batches": (BOTH[:1], (KILLED, *NORM, *STATIC, FOUR)),
    "RayPPOTrainer, static, 4 mini-batches, 2 epochs": (BOTH[:1], (RAY, *STATIC, FOUR, EPOCHS)),
    "RayPPOTrainer, 2 ranks, seq-mean-token-mean": (BOTH[:1], (RAY, TWO, PER_SEQUENCE)),
    "each prompt once, with a reference": (BOTH[1:], REFERENCE),
    "each prompt once, with a critic": (BOTH[1:], CRITIC),
    "both, 2 ranks": (BOTH, (TWO,)),
    "both, killed": (BOTH, (KILLED,)),
    "both, norm, 4 mini-batches, 2 epochs": (BOTH, (*NORM, FOUR, EPOCHS)),
    "both, one answer a prompt": (BOTH, ALONE),
    "RayPPOTrainer, both, gspo": (BOTH, (RAY, GSPO)),
    "RayPPOTrainer, each prompt once, 2 ranks, with a reference": (BOTH[1:], (RAY, TWO, *REFERENCE)),
}
SIZES = {True: ("ppo_micro_batch_size_per_gpu", 4), False: ("ppo_max_token_len_per_gpu", 512)}


@pytest.fixture
def train(start, tmp_path):
    """Trains for 3 steps; returns the weights, the sorted answers by step, and the run."""
    environment = {"VERL_USE_EXTERNAL_MODULES": deterministic_order.__name__, **FINDS_TESTS}

    def train(name, *overrides, kill=False):
        rollouts = tmp_path / name / "rollouts"
        overrides = (
            f"{ACTOR}.optim.lr=1e-3",
            "trainer.save_freq=3",
            f"trainer.rollout_data_dir={rollouts}",
            *overrides,
        )
        run = start(name, *overrides, steps=3, env=environment)
        if kill:
            run.wait_until(lambda: latest(run) > 0, TIMEOUT, pause=0.01)
            run.kill()
            run.process.wait()
            run = start(name, *overrides, steps=3, env=environment)
        assert run.wait(TIMEOUT) == 0, run.tail()
        answers = {path.name: sorted(json.loads(line)["output"] for line in path.open()) for path in rollouts.iterdir()}
        return weights(run), answers, run

    return train


def weights(run):
    shards = sorted(run.folder.glob("checkpoints/global_step_3/actor/model_world_size_*_rank_*.pt"))
    saved = [torch.load(path, weights_only=False).values() for path in shards]
    return torch.cat([value.to_local().flatten().double() for values in saved for value in values])


@pytest.mark.parametrize("case", CASES)
def test_the_weights_are_those_of_verl_s_update(train, case, record_property):
    names, overrides = CASES[case]
    setting, size = SIZES[STATIC[0] in overrides]
    overrides = (*overrides, f"{ACTOR}.{setting}={size}")
    every, answers, usual = train("all", *overrides)
    settings = [f"+algorithm.verl_ext.{name}=True" for name in names]
    found, reports, run = train("shorter", *overrides, *settings, kill=KILLED in overrides)
    # A run that was killed may have written no answers of the step that it saved last.
    assert {*reports} >= {"2.jsonl", "3.jsonl"}
    assert reports.items() <= answers.items()
    rows, saved, norms = (run.column(f"actor/{name}") for name in ("rows_kept", "prompt_tokens_saved", "grad_norm"))
    weights = float((found - every).norm() / every.norm())
    usual_norms = usual.column("actor/grad_norm")[-len(norms) :]
    record_property("figures", f"rows {rows}, saved {saved}, weights {weights:.2e}, norms {norms} {usual_norms}")
    assert (min(rows) < 1.0) == (BOTH[0] in names)
    assert (max(saved, default=0.0) > 0.3) == (BOTH[1] in names and ALONE[1] not in overrides)
    assert (len(saved) > 0) == (BOTH[1] in names)
    config = next(run.folder.glob("checkpoints/global_step_3/actor/huggingface/config.json")).read_text()
    assert "verl_ext" not in config
    # Rounding is far below, and what a row adds far above; AdamW hides a wrong divisor, the norm shows it.
    assert norms == pytest.approx(usual_norms, rel=1e-5)
    assert weights < 1e-5


@pytest.mark.parametrize("refused", [(), (f"{ACTOR}.shuffle=True",)], ids=["packed", "padded"])
def test_the_lines_that_check_proposes_without_flash_attn_train(start, monkeypatch, refused):
    """Where a GPU is there and flash-attn is not; both are made up, the training is on the CPU."""
    with monkeypatch.context() as patch:
        patch.setattr(update, "find_spec", lambda name: None)
        patch.setattr("torch.cuda.is_available", lambda: True)
        findings = judge(compose(GRPO, *refused)).findings
    [fix] = [finding.fix for finding in findings if "flash-attn" in finding.text]
    proposed = [word.rstrip(".,") for word in fix.split() if "=" in word]
    run = start("run", GRPO, *refused, *proposed, steps=2)
    assert run.wait(TIMEOUT) == 0, run.tail()
    assert len(run.column("actor/grad_norm")) == 2
    assert min(run.column("actor/grad_norm")) > 0
    assert bool(run.column("actor/prompt_tokens_saved")) == (not refused)
    assert ("fused kernels in" in run.log) == bool(refused)
