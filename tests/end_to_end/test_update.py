"""The faster actor update in whole runs of verl: the weights are those of verl's own update."""

import json
from typing import NamedTuple

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests import fsdp1_on_cpu
from tests.configs import compose
from tests.end_to_end import deterministic_order
from tests.end_to_end.run import FINDS_TESTS
from tests.end_to_end.test_training import TIMEOUT, latest
from verl_ext.checks.judge import judge
from verl_ext.update import rule as update

pytestmark = [pytest.mark.end_to_end, pytest.mark.slow, pytest.mark.runs(2)]
ACTOR = "actor_rollout_ref.actor"
GRPO = "algorithm.adv_estimator=grpo"
SKIP = "skip_zero_advantage"
SHARE = "share_prompts"
RAY_TRAINER = "trainer.use_v1=False"
GSPO = f"{ACTOR}.policy_loss.loss_mode=gspo"
TWO_EPOCHS = f"{ACTOR}.ppo_epochs=2"
FOUR_MINI_BATCHES = f"{ACTOR}.ppo_mini_batch_size=2"
SEQ_MEAN_TOKEN_MEAN = f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"
SEQ_SUM_NORM = (f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", f"{ACTOR}.loss_scale_factor=16")
STATIC_BATCHES = (f"{ACTOR}.use_dynamic_bsz=False", "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4")
TWO_RANKS = "trainer.n_gpus_per_node=2"
FSDP1 = f"{ACTOR}.strategy=fsdp"
SAVE_EACH_STEP = "trainer.save_freq=1"
# The critic is trained, but it has no effect.
CRITIC = ("critic.enable=True", "critic.model.path=${actor_rollout_ref.model.path}")
REFERENCE = "algorithm.use_kl_in_reward=True"
ONE_RESPONSE = ("algorithm.adv_estimator=reinforce_plus_plus", "actor_rollout_ref.rollout.n=1")


class Case(NamedTuple):
    """Settings of the faster update, the overrides of both runs, and properties of the runs."""

    settings: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    is_killed: bool = False
    """Whether the run with the faster update is killed after a checkpoint and resumed."""
    one_response: bool = False
    """Whether each prompt has one response, so that no prompt is shared."""


CASES = {
    "skip, token-mean": Case((SKIP,)),
    "skip, killed, norm, static, 4 mini-batches": Case(
        (SKIP,), (SAVE_EACH_STEP, *SEQ_SUM_NORM, *STATIC_BATCHES, FOUR_MINI_BATCHES), is_killed=True
    ),
    "skip, RayPPOTrainer, static, 4 mini-batches, 2 epochs": Case(
        (SKIP,), (RAY_TRAINER, *STATIC_BATCHES, FOUR_MINI_BATCHES, TWO_EPOCHS)
    ),
    "skip, RayPPOTrainer, 2 ranks, seq-mean-token-mean": Case((SKIP,), (RAY_TRAINER, TWO_RANKS, SEQ_MEAN_TOKEN_MEAN)),
    "share, with a reference": Case((SHARE,), (REFERENCE,)),
    "share, with a critic": Case((SHARE,), CRITIC),
    "both, 2 ranks": Case((SKIP, SHARE), (TWO_RANKS,)),
    "both, killed": Case((SKIP, SHARE), (SAVE_EACH_STEP,), is_killed=True),
    "both, FSDP1, 2 ranks, killed": Case((SKIP, SHARE), (SAVE_EACH_STEP, TWO_RANKS, FSDP1), is_killed=True),
    "both, norm, 4 mini-batches, 2 epochs": Case((SKIP, SHARE), (*SEQ_SUM_NORM, FOUR_MINI_BATCHES, TWO_EPOCHS)),
    "both, one response per prompt": Case((SKIP, SHARE), ONE_RESPONSE, one_response=True),
    "both, RayPPOTrainer, gspo": Case((SKIP, SHARE), (RAY_TRAINER, GSPO)),
    "share, RayPPOTrainer, 2 ranks, with a reference": Case((SHARE,), (RAY_TRAINER, TWO_RANKS, REFERENCE)),
}


@pytest.fixture
def train(start, tmp_path):
    """Return a function that trains for 3 steps. It returns the run and the sorted responses by file name."""

    def train(name, *overrides, is_killed=False):
        modules = [deterministic_order.__name__]
        if FSDP1 in overrides:
            modules.append(fsdp1_on_cpu.__name__)
        environment = {"VERL_USE_EXTERNAL_MODULES": ",".join(modules), **FINDS_TESTS}
        rollouts = tmp_path / name / "rollouts"
        all_overrides = (
            f"{ACTOR}.optim.lr=1e-3",
            "trainer.save_freq=3",
            f"trainer.rollout_data_dir={rollouts}",
            *overrides,
        )
        run = start(name, *all_overrides, steps=3, env=environment)
        if is_killed:
            run.wait_until(lambda: latest(run) > 0, TIMEOUT, pause=0.01)
            run.kill()
            run.process.wait()
            run = start(name, *all_overrides, steps=3, env=environment)
        assert run.wait(TIMEOUT) == 0, run.tail()
        return run, responses_by_file(rollouts)

    return train


def responses_by_file(rollouts):
    """Return the sorted responses in each file of rollouts, which has the responses of a step."""
    responses = {}
    for path in rollouts.iterdir():
        lines = path.read_text().splitlines()
        responses[path.name] = sorted(json.loads(line)["output"] for line in lines)
    return responses


def weights_of(run):
    """Return all weights of the model after 3 steps, of all ranks, in one vector."""
    shards = sorted(run.folder.glob("checkpoints/global_step_3/actor/model_world_size_*_rank_*.pt"))
    parameters = []
    for path in shards:
        for parameter in torch.load(path, weights_only=False).values():
            weights = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            parameters.append(weights.flatten().double())
    return torch.cat(parameters)


def version_of_fsdp(run):
    """Return 1 or 2, as verl wrote it to the checkpoint after 3 steps."""
    [path] = run.folder.glob("checkpoints/global_step_3/actor/fsdp_config.json")
    return json.loads(path.read_text())["FSDP_version"]


def relative_difference(weights, expected):
    return float((weights - expected).norm() / expected.norm())


def assert_settings_have_effect(run, case):
    """Assert that zero-advantage rows are skipped and prompts are shared exactly if the settings of the case say so."""
    kept_fractions = run.column("actor/rows_kept")
    saved_fractions = run.column("actor/prompt_tokens_saved")
    assert (min(kept_fractions) < 1.0) == (SKIP in case.settings)
    assert (len(saved_fractions) > 0) == (SHARE in case.settings)
    shares_prompts = SHARE in case.settings and not case.one_response
    assert (max(saved_fractions, default=0.0) > 0.3) == shares_prompts


@pytest.mark.parametrize("name", CASES)
def test_the_weights_are_those_of_verls_update(train, name, record_property):
    case = CASES[name]
    size = f"{ACTOR}.ppo_max_token_len_per_gpu=512"
    if STATIC_BATCHES[0] in case.overrides:
        size = f"{ACTOR}.ppo_micro_batch_size_per_gpu=4"
    overrides = (*case.overrides, size)
    settings = [f"+algorithm.verl_ext.{setting}=True" for setting in case.settings]
    verls_run, expected_responses = train("all", *overrides)
    run, responses = train("faster", *overrides, *settings, is_killed=case.is_killed)

    # A run that was killed may not have written the responses of the step that it saved last.
    assert {"2.jsonl", "3.jsonl"} <= responses.keys()
    assert responses.items() <= expected_responses.items()
    assert_settings_have_effect(run, case)
    config = next(run.folder.glob("checkpoints/global_step_3/actor/huggingface/config.json")).read_text()
    assert "verl_ext" not in config
    assert version_of_fsdp(run) == (1 if FSDP1 in case.overrides else 2)

    difference = relative_difference(weights_of(run), weights_of(verls_run))
    norms = run.column("actor/grad_norm")
    expected_norms = verls_run.column("actor/grad_norm")[-len(norms) :]
    rows, saved = run.column("actor/rows_kept"), run.column("actor/prompt_tokens_saved")
    figures = f"rows {rows}, saved {saved}, weights {difference:.2e}, norms {norms} {expected_norms}"
    record_property("figures", figures)
    # Floating-point errors are far smaller, and the effect of a row is far larger. AdamW hides a wrong divisor of the
    # gradient, but its norm does not.
    assert norms == pytest.approx(expected_norms, rel=1e-5)
    assert difference < 1e-5


@pytest.mark.parametrize(
    ("overrides", "is_packed"), [((), True), ((f"{ACTOR}.shuffle=True",), False)], ids=["packed", "padded"]
)
def test_the_settings_that_check_proposes_without_flash_attn_train(start, monkeypatch, overrides, is_packed):
    """A GPU without flash-attn is simulated for `check`. The training is on the CPU."""
    with monkeypatch.context() as patch:
        patch.setattr(update, "find_spec", lambda name: None)
        patch.setattr("torch.cuda.is_available", lambda: True)
        findings = judge(compose(GRPO, *overrides)).findings
    [fix] = [finding.fix for finding in findings if "flash-attn" in finding.text]
    proposed = [word.rstrip(".,") for word in fix.split() if "=" in word]
    run = start("run", GRPO, *overrides, *proposed, steps=2)
    assert run.wait(TIMEOUT) == 0, run.tail()
    norms = run.column("actor/grad_norm")
    assert len(norms) == 2
    assert min(norms) > 0
    assert bool(run.column("actor/prompt_tokens_saved")) == is_packed
    assert ("fused kernels in" in run.log) == (not is_packed)
