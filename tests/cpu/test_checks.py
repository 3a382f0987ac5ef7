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
def nothing_asked(monkeypatch):
    for name in ("VERL_PLATFORM", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


def configuration(*overrides, group="cpu"):
    presets = [f"+verl_ext={group}"] if group else []
    return compose_quickly(*presets, "algorithm.adv_estimator=grpo", *overrides)


def complaints(*overrides, group="cpu"):
    run = Run("grpo", config=configuration(*overrides, group=group))
    return [*needs_gpu(run)]


def lines(finding):
    """The lines that a fix proposes."""
    words = (word.rstrip(".,") for word in finding.fix.split())
    return [word for word in words if "=" in word]


@pytest.mark.parametrize(
    ("group", "overrides"),
    [
        ("cpu", []),
        ("cpu", ["~transfer_queue", "~trainer.v1", "trainer.use_v1=False"]),  # as in a verl without V1
        ("cpu", ["algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=True"]),
        ("[cpu,separate_async]", []),
        (None, []),  # no run for the CPU
    ],
)
def test_the_presets_run(group, overrides):
    assert complaints(*overrides, group=group) == []


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
    ],
)
def test_a_run_that_cannot_work_is_refused_with_the_line_to_change(overrides, words):
    (finding,) = complaints(*overrides)
    assert says(finding, *words)
    assert complaints(*overrides, *lines(finding)) == []


CLUSTER = "10.0.0.1:6379"
RAY = "ray_kwargs.ray_init"
NO_NUMBERS = (f"{RAY}.num_cpus=null", f"{RAY}.num_gpus=null")


def ignored(*overrides, group="cpu"):
    """The findings about a cluster that the checks of a run have."""
    findings = judge(configuration(*overrides, group=group)).findings
    return [finding for finding in findings if "RAY_ADDRESS" in str(finding)]


def test_a_run_on_the_cpu_starts_a_ray_of_its_own():
    assert configuration().ray_kwargs.ray_init.address == "local"


def test_a_cluster_that_the_environment_names_is_ignored_with_a_warning_that_says_how_to_use_it(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", CLUSTER)
    (finding,) = ignored()
    assert finding.severity == "warning"
    assert says(finding, f"RAY_ADDRESS={CLUSTER}", f"{RAY}.address=local")
    proposed = lines(finding)
    assert proposed == [f"++{RAY}.address={CLUSTER}", *NO_NUMBERS]
    assert ignored(*proposed) == []
    given = OmegaConf.to_container(configuration(*proposed).ray_kwargs.ray_init)
    assert given["address"] == CLUSTER
    assert given["num_cpus"] is given["num_gpus"] is None
    (finding,) = ignored(*NO_NUMBERS)
    assert lines(finding) == proposed[:1]


@pytest.mark.parametrize("address", [None, "", "local"])
def test_without_a_cluster_in_the_environment_there_is_no_warning(monkeypatch, address):
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    assert ignored() == []


def test_a_run_that_uses_the_cluster_of_the_environment_is_not_warned(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", CLUSTER)
    assert ignored(group=None) == []
    assert ignored("~ray_kwargs.ray_init.address") == []


def test_the_configuration_or_the_environment_asks_for_the_cpu_and_verls_own_does_not(monkeypatch):
    assert asks_for_cpu(configuration())
    assert not asks_for_cpu(configuration(group=None))
    assert not asks_for_cpu(configuration("trainer.device=cpu", group=None))
    monkeypatch.setenv("VERL_PLATFORM", "CPU")
    assert asks_for_cpu(configuration(group=None))
    assert not asks_for_cpu(OmegaConf.create({"trainer": {"device": "cpu"}}))  # another program of verl
