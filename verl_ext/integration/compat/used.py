"""All that this package calls or wraps of verl, by name and signature, and the settings of verl that it reads.

Hooks, `doctor` and the docs read these tables, which were written for verl 0.9.0 and 0.9.1. The modules in `CPU` are
used only by runs on a machine without a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from verl_ext.integration.compat.names import REPLAY_BUFFER
from verl_ext.integration.compat.pins import Pin

VERL: Mapping[str, tuple[Pin, ...]] = MappingProxyType(
    {
        # the estimators
        "verl.trainer.ppo.core_algos": (
            Pin("ADV_ESTIMATOR_REGISTRY", kind=dict),
            Pin("get_adv_estimator_fn", takes=("name_or_enum",)),
            Pin("POLICY_LOSS_REGISTRY", kind=dict),
        ),
        "verl.trainer.config": (
            Pin(
                "AlgoConfig",
                has=(
                    "adv_estimator",
                    "norm_adv_by_std_in_grpo",
                    "use_kl_in_reward",
                    "filter_groups",
                    "gdpo_reward_keys",
                    "gdpo_reward_weights",
                ),
            ),
        ),
        # before Ray starts
        "verl.utils.config": (Pin("validate_config", takes=("config", "use_reference_policy", "use_critic")),),
        "verl.trainer.main_ppo": (Pin("run_ppo", takes=("config", "task_runner_class")),),
        # the default trainer
        "verl.trainer.ppo.v1.trainer_base": (
            Pin("PPOTrainer.__init__", takes=("self", "config")),
            Pin("PPOTrainer._compute_advantage", takes=("self", "batch", "metrics")),
            Pin("PPOTrainer.fit", accepts=("self",)),
            Pin("PPOTrainer._build_replay_buffer", takes=("self",)),
            Pin("PPOTrainer._save_checkpoint", takes=("self",)),
            Pin("PPOTrainer._load_checkpoint", takes=("self",)),
            Pin("tq.kv_batch_get", takes=("keys", "partition_id", "select_fields")),
        ),
        REPLAY_BUFFER: (
            Pin("ReplayBuffer.__init__", accepts=("filter_groups_metric",)),
            Pin("ReplayBuffer._dapo_filtered_keys", takes=("self", "partition_id")),
            Pin("ReplayBuffer.sample", takes=("self", "global_steps", "partition_id", "batch_size")),
            Pin(
                "ReplayBuffer._evict_terminal_groups",
                takes=("self", "global_steps", "partition_id", "eviction_reasons"),
                guard="watch_rollouts",
            ),
            Pin(
                "ReplayBuffer._wait_for_next_poll",
                takes=("self", "partition_id", "last_debug_time"),
                guard="watch_rollouts",
            ),
            Pin("ReplayBufferAsync.sample", takes=("self", "global_steps", "partition_id", "batch_size")),
        ),
        "transfer_queue": (
            Pin("kv_batch_get", accepts=("keys", "partition_id", "select_fields")),
            Pin("kv_batch_put", accepts=("keys", "partition_id", "fields")),
            Pin("KVBatchMeta", has=("keys", "tags", "partition_id")),
        ),
        "verl": (
            Pin("DataProto", has=("batch", "non_tensor_batch")),
            Pin("__version__", kind=str),
        ),
        # the legacy trainer, and those built on it
        "verl.trainer.ppo.ray_trainer": (
            Pin(
                "RayPPOTrainer.__init__",
                takes=("self", "config", "tokenizer", "role_worker_mapping", "resource_pool_manager"),
            ),
            Pin("RayPPOTrainer.fit", takes=("self",)),
            Pin("RayPPOTrainer._save_checkpoint", takes=("self",)),
            Pin("RayPPOTrainer._load_checkpoint", takes=("self",)),
            Pin("compute_advantage", takes=("data", "adv_estimator")),
            Pin("compute_data_metrics", takes=("batch", "use_critic")),
        ),
        "verl.experimental.separation.ray_trainer": (
            Pin("SeparateRayPPOTrainer._fit_compute_advantage", takes=("self", "batch")),
        ),
        "verl.experimental.fully_async_policy.fully_async_trainer": (
            Pin("FullyAsyncTrainer.__ray_metadata__.modified_class.load_checkpoint", takes=("self",), coroutine=True),
            Pin("FullyAsyncTrainer.__ray_metadata__.modified_class._save_checkpoint", takes=("self",), own=True),
        ),
        "verl.experimental.fully_async_policy.fully_async_rollouter": (
            Pin(
                "FullyAsyncRollouter.__ray_metadata__.modified_class._streaming_generation_main",
                takes=("self",),
                coroutine=True,
                guard="watch_rollouts",
            ),
            Pin(
                "FullyAsyncRollouter.__ray_metadata__.modified_class.fit",
                takes=("self",),
                coroutine=True,
                guard="watch_rollouts",
            ),
        ),
    }
)

_LOGICAL = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")

CPU: Mapping[str, tuple[Pin, ...]] = MappingProxyType(
    {
        "verl.trainer.ppo.v1.replay_buffer": (Pin("ReplayBuffer.__init__", accepts=("poll_interval",)),),
        "verl.utils.device": (Pin("auto_set_device", takes=("config",)),),
        "verl.utils.distributed": (Pin("initialize_global_process_group_ray", accepts=("timeout_second", "backend")),),
        "verl.utils.model": (
            Pin("load_valuehead_model", accepts=("local_path", "torch_dtype", "model_config", "trust_remote_code")),
        ),
        "verl.utils.config": (Pin("omega_conf_to_dataclass", accepts=("config",)),),
        "verl.trainer.ppo.utils": (
            Pin("need_reference_policy", takes=("config",)),
            Pin("need_critic", takes=("config",)),
        ),
        "verl.workers.engine.fsdp.transformer_impl": (Pin("CPUOffloadPolicy", accepts=("pin_memory",)),),
        "verl.plugin.platform": (
            Pin("PlatformBase"),
            Pin("get_platform", takes=()),
        ),
        "verl.plugin.platform.platform_manager": (
            Pin("PlatformRegistry.register", takes=("platform",)),
            Pin("_current_platform"),
        ),
        "verl.workers.rollout.base": (
            Pin("_ROLLOUT_REGISTRY", kind=dict),
            Pin("BaseRollout", has=("resume", "update_weights", "release")),
            Pin("BaseRollout.__init__", takes=("self", "config", "model_config", "device_mesh")),
        ),
        "verl.workers.rollout.replica": (
            Pin("RolloutReplicaRegistry.register", takes=("name", "loader")),
            Pin("RolloutReplica", has=("max_concurrency", "launch_servers")),
            Pin("TokenOutput", has=("token_ids", "log_probs", "stop_reason", "num_preempted", "extra_fields")),
        ),
        "verl.workers.rollout.utils": (Pin("ensure_async_iterator", takes=("iterable",)),),
        "verl.checkpoint_engine.base": (
            Pin("CheckpointEngine"),
            Pin("CheckpointEngineRegistry.register", takes=("backend",)),
        ),
        "importlib.metadata": (
            Pin("version", accepts=("distribution_name",)),
            Pin("PackageNotFoundError"),
        ),
        "vllm.model_executor.layers.utils": (Pin("dispatch_cpu_unquantized_gemm", accepts=("layer", "remove_weight")),),
    }
)

SETTINGS = (
    "actor_rollout_ref.actor.checkpoint.async_save",
    "actor_rollout_ref.actor.checkpoint.load_contents",
    "actor_rollout_ref.actor.loss_agg_mode",
    "actor_rollout_ref.actor.loss_scale_factor",
    "actor_rollout_ref.actor.policy_loss.loss_mode",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.actor.use_kl_loss",
    "actor_rollout_ref.rollout.n",
    "algorithm.adv_estimator",
    "algorithm.norm_adv_by_std_in_grpo",
    "algorithm.use_kl_in_reward",
    "algorithm.use_pf_ppo",
    "critic.checkpoint.load_contents",
    "critic.enable",
    "data.max_response_length",
    "data.train_batch_size",
    "reward.custom_reward_function.name",
    "reward.custom_reward_function.path",
    "reward.reward_manager.name",
    "reward.reward_manager.source",
    "reward.reward_model.enable",
    "trainer.default_local_dir",
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
    "trainer.resume_from_path",
    "trainer.resume_mode",
    "trainer.save_freq",
    "trainer.test_freq",
    "trainer.total_epochs",
    "trainer.total_training_steps",
    "trainer.use_v1",
    "trainer.v1.sampler.custom_sampler.path",
    "trainer.v1.trainer_mode",
)
"""Entries of verl's `ppo_trainer` configuration that this package reads, or that a message tells the user to set."""

CPU_SETTINGS = (
    "actor_rollout_ref.actor.strategy",
    "actor_rollout_ref.actor.use_dynamic_bsz",
    "actor_rollout_ref.model.lora_rank",
    "actor_rollout_ref.model.override_config",
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.model.use_fused_kernels",
    "actor_rollout_ref.model.use_liger",
    "actor_rollout_ref.model.use_remove_padding",
    "actor_rollout_ref.ref.strategy",
    "actor_rollout_ref.rollout.checkpoint_engine.backend",
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes",
    "actor_rollout_ref.rollout.ignore_eos",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz",
    "actor_rollout_ref.rollout.max_model_len",
    "actor_rollout_ref.rollout.max_num_seqs",
    "actor_rollout_ref.rollout.n_gpus_per_node",
    "actor_rollout_ref.rollout.name",
    "actor_rollout_ref.rollout.nnodes",
    "actor_rollout_ref.rollout.prompt_length",
    "actor_rollout_ref.rollout.response_length",
    *(f"actor_rollout_ref.rollout.{name}" for name in _LOGICAL),
    "critic.model.override_config",
    "critic.strategy",
    "ray_kwargs.ray_init.num_cpus",
    "trainer.device",
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units",
)
