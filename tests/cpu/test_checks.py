"""Rules about a run on the CPU: what needs a GPU is rejected with the line to change."""

import pytest
from omegaconf import OmegaConf

from tests.configs import compose_quickly
from tests.facts import says
from verl_ext.checks.judge import judge
from verl_ext.checks.on_cpu import asks_for_cpu, needs_gpu
from verl_ext.run import Run

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
ATTENTION = "override_config.attn_implementation"


@pytest.fixture(autouse=True)
def environment_without_requests(monkeypatch):
    for name in ("VERL_PLATFORM", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


def configuration(*overrides, preset="cpu"):
    presets = [f"+verl_ext={preset}"] if preset else []
    return compose_quickly(*presets, "algorithm.adv_estimator=grpo", *overrides)


def findings_of(*overrides, preset="cpu"):
    """What a run cannot use on the CPU."""
    return list(needs_gpu(Run("grpo", config=configuration(*overrides, preset=preset))))


def proposed_overrides(finding):
    """The overrides that a fix proposes."""
    words = [word.rstrip(".,") for word in finding.fix.split()]
    return [word for word in words if "=" in word]


@pytest.mark.parametrize(
    ("preset", "overrides"),
    [
        pytest.param("cpu", [], id="the preset"),
        pytest.param("cpu", ["~transfer_queue", "~trainer.v1", "trainer.use_v1=False"], id="a verl without V1"),
        pytest.param("cpu", ["algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=True"], id="critic and KL"),
        pytest.param("cpu", ["trainer.v1.trainer_mode=colocate_async"], id="colocate_async"),
        pytest.param(
            "cpu",
            [
                "trainer.v1.trainer_mode=separate_async",
                f"{ROLLOUT}.checkpoint_engine.custom_backend_module=my_engine",
            ],
            id="separate_async with an engine of the user's own",
        ),
        pytest.param(
            "cpu", ["trainer.v1.trainer_mode=separate_async", "trainer.use_v1=False"], id="a mode that is not used"
        ),
        pytest.param(None, ["trainer.v1.trainer_mode=separate_async"], id="no run for the CPU"),
    ],
)
def test_a_run_that_works_on_the_cpu_has_no_finding(preset, overrides):
    assert findings_of(*overrides, preset=preset) == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([f"{ACTOR}.strategy=fsdp"], (f"{ACTOR}.strategy=fsdp", f"++{ACTOR}.strategy=fsdp2")),
        (
            ["actor_rollout_ref.ref.strategy=fsdp", f"{ACTOR}.use_kl_loss=True"],
            ("++actor_rollout_ref.ref.strategy=fsdp2",),
        ),
        (["critic.strategy=fsdp", "algorithm.adv_estimator=gae"], ("critic.strategy=fsdp", "++critic.strategy=fsdp2")),
        (
            [f"actor_rollout_ref.model.{ATTENTION}=flash_attention_2"],
            (f"{ATTENTION}=flash_attention_2", "'eager'", f"++actor_rollout_ref.model.{ATTENTION}=sdpa"),
        ),
        ([f"~actor_rollout_ref.model.{ATTENTION}"], (f"++actor_rollout_ref.model.{ATTENTION}=sdpa",)),
        (["actor_rollout_ref.model.use_remove_padding=True"], ("use_remove_padding=False",)),
        ([f"{ROLLOUT}.tensor_model_parallel_size=2"], (f"++{ROLLOUT}.tensor_model_parallel_size=1",)),
        ([f"{ROLLOUT}.logprobs_mode=raw_logprobs"], (f"++{ROLLOUT}.logprobs_mode=processed_logprobs",)),
        # As from a user's own file, where a line of its own wins over a preset before it.
        ([f"{ROLLOUT}.name=vllm"], (f"{ROLLOUT}.name=vllm", f"++{ROLLOUT}.name=embedded")),
        (
            ["trainer.v1.trainer_mode=separate_async"],
            ("trainer.v1.trainer_mode=separate_async", "++trainer.v1.trainer_mode=colocate_async"),
        ),
    ],
)
def test_a_setting_that_needs_a_gpu_is_rejected_with_the_line_to_change(overrides, words):
    (finding,) = findings_of(*overrides)
    assert finding.severity == "error"
    assert says(finding, *words)
    assert findings_of(*overrides, *proposed_overrides(finding)) == []


CLUSTER = "10.0.0.1:6379"
RAY = "ray_kwargs.ray_init"
WITHOUT_SLOTS = (f"{RAY}.num_cpus=null", f"{RAY}.num_gpus=null")


def findings_about_cluster(*overrides, preset="cpu"):
    """The findings about an ignored cluster that the checks of a run have."""
    findings = judge(configuration(*overrides, preset=preset)).findings
    return [finding for finding in findings if "RAY_ADDRESS" in str(finding)]


def test_a_run_on_the_cpu_starts_its_own_ray():
    assert configuration().ray_kwargs.ray_init.address == "local"


def test_a_warning_says_that_the_cluster_of_the_environment_is_ignored(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", CLUSTER)
    (finding,) = findings_about_cluster()
    assert finding.severity == "warning"
    assert says(finding, f"RAY_ADDRESS={CLUSTER}", f"{RAY}.address=local")
    assert proposed_overrides(finding) == [f"++{RAY}.address={CLUSTER}", *WITHOUT_SLOTS]


def test_the_proposed_overrides_use_the_cluster(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", CLUSTER)
    (finding,) = findings_about_cluster()
    overrides = proposed_overrides(finding)
    assert findings_about_cluster(*overrides) == []
    ray_init = configuration(*overrides).ray_kwargs.ray_init
    assert ray_init.address == CLUSTER
    assert ray_init.num_cpus is None
    assert ray_init.num_gpus is None


def test_the_warning_proposes_only_overrides_that_change_the_run(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", CLUSTER)
    (finding,) = findings_about_cluster(*WITHOUT_SLOTS)
    assert proposed_overrides(finding) == [f"++{RAY}.address={CLUSTER}"]


@pytest.mark.parametrize("address", [None, "", "local"])
def test_without_a_cluster_in_the_environment_there_is_no_warning(monkeypatch, address):
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    assert findings_about_cluster() == []


def test_a_run_that_uses_the_cluster_of_the_environment_has_no_warning(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", CLUSTER)
    assert findings_about_cluster(preset=None) == []
    assert findings_about_cluster("~ray_kwargs.ray_init.address") == []


def test_the_preset_requests_the_cpu_and_verls_own_setting_does_not():
    assert asks_for_cpu(configuration())
    assert not asks_for_cpu(configuration(preset=None))
    assert not asks_for_cpu(configuration("trainer.device=cpu", preset=None))


def test_the_environment_requests_the_cpu_for_trainings_only(monkeypatch):
    monkeypatch.setenv("VERL_PLATFORM", "CPU")
    assert asks_for_cpu(configuration(preset=None))
    other_program = OmegaConf.create({"trainer": {"device": "cpu"}})
    assert not asks_for_cpu(other_program)
