"""All that this package touches of verl: one table, which hooks, `doctor` and the tests check.

Where a new verl moves one of these, everything that moved is listed; it was written against verl 0.9.0 and 0.9.1. A
module under `CPU` is touched only by runs on a machine without a GPU.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from verl_ext.errors import IntegrationError
from verl_ext.integration.pins import Pin, check

_CHECKPOINTS = ("global_steps", "global_step_", "default_local_dir", "resume_mode", "resume_from_path")
_TRACKER = "latest_checkpointed_iteration.txt"
_COMBINED_BY = ("mean", "avg", "average", "max", "min", "sum", "total", "timing_s/")

VERL: Mapping[str, tuple[Pin, ...]] = MappingProxyType(
    {
        # -- the estimators -------------------------------------------------------------------------------------------
        "verl.trainer.ppo.core_algos": (
            Pin("ADV_ESTIMATOR_REGISTRY", kind=dict),
            Pin("get_adv_estimator_fn", takes=("name_or_enum",), says=("ADV_ESTIMATOR_REGISTRY",)),
            Pin("POLICY_LOSS_REGISTRY", kind=dict),
            # Whether a loss takes its mean as configured is read from its source.
            Pin("compute_policy_loss_vanilla", says=("loss_agg_mode=loss_agg_mode",)),
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
        # -- before Ray starts ----------------------------------------------------------------------------------------
        "verl.utils.config": (Pin("validate_config", takes=("config", "use_reference_policy", "use_critic")),),
        "verl.trainer.main_ppo": (
            Pin("run_ppo", takes=("config", "task_runner_class")),
            Pin("", says=("validate_config(", "auto_set_device(")),
        ),
        # -- the default trainer --------------------------------------------------------------------------------------
        "verl.trainer.ppo.v1.trainer_base": (
            Pin("PPOTrainer.__init__", takes=("self", "config"), says=("parameter_sync_step", "_build_replay_buffer")),
            Pin(
                "PPOTrainer._compute_advantage",
                takes=("self", "batch", "metrics"),
                says=(
                    "keys",
                    "partition_id",
                    "uid",
                    "response_mask",
                    "rm_scores",
                    "token_level_scores",
                    "token_level_rewards",
                    "compute_advantage_for_multi_trajectories",
                ),
            ),
            Pin("PPOTrainer._build_replay_buffer", takes=("self",), says=("filter_groups_metric", "custom_sampler")),
            Pin("PPOTrainer._save_checkpoint", takes=("self",), says=(*_CHECKPOINTS[:3], _TRACKER)),
            Pin("PPOTrainer._load_checkpoint", takes=("self",), says=_CHECKPOINTS),
            Pin("PPOTrainer", says=("local_trigger_step", "is_padding", "train_batch_size")),
            Pin("PPOTrainer", says=("reward_loop_manager", "agent_loop_manager", "llm_server_manager")),
            Pin("tq.kv_batch_get", takes=("keys", "partition_id", "select_fields")),
        ),
        "verl.trainer.ppo.v1.utils": (
            Pin("compute_advantage_for_multi_trajectories", says=("compute_advantage",)),
            # A metric is named so that verl combines it as it should be.
            Pin("MetricsAggregator._get_aggregation_type", takes=("self", "metric_name"), says=_COMBINED_BY),
        ),
        "verl.trainer.ppo.v1.agent_loop_tq": (
            Pin("AgentLoopWorkerTQ._agent_loop_postprocess", says=("{uid}_{session_id}_{i}",)),
            # Named in a message as what to look for in the log.
            Pin("AgentLoopWorkerTQ._run_prompt", says=("Error in _run_prompt for uid=", "Error in _run_prompt: ")),
        ),
        "verl.trainer.ppo.v1.replay_buffer": (
            Pin("ReplayBuffer.__init__", accepts=("filter_groups_metric",), says=("partitions",)),
            Pin(
                "ReplayBuffer._dapo_filtered_keys", takes=("self", "partition_id"), says=("finished_keys", "partitions")
            ),
            Pin("ReplayBuffer.sample", takes=("self", "global_steps", "partition_id", "batch_size")),
            Pin(
                "ReplayBuffer._evict_terminal_groups",
                takes=("self", "global_steps", "partition_id", "eviction_reasons"),
                says=("stale_uids", "dapo_uids", "failed_uids", "dapo_counts"),
            ),
            Pin(
                "ReplayBuffer._wait_for_next_poll",
                takes=("self", "partition_id", "last_debug_time"),
                says=("pending_keys", "running_keys", "finished_keys", "failure_keys"),
            ),
            Pin("ReplayBufferAsync.sample", takes=("self", "global_steps", "partition_id", "batch_size")),
            Pin("", says=("_", "reward_extra_info", "extra_fields", "val")),
        ),
        "transfer_queue": (
            Pin("kv_batch_get", accepts=("keys", "partition_id", "select_fields")),
            Pin("kv_batch_put", accepts=("keys", "partition_id", "fields")),
            Pin("KVBatchMeta", has=("keys", "tags", "partition_id")),
        ),
        "verl": (Pin("DataProto", has=("batch", "non_tensor_batch")), Pin("__version__", kind=str)),
        # -- the legacy trainer, and those that are built on it -------------------------------------------------------
        "verl.trainer.ppo.ray_trainer": (
            Pin(
                "RayPPOTrainer.__init__",
                takes=("self", "config", "tokenizer", "role_worker_mapping", "resource_pool_manager"),
            ),
            Pin("RayPPOTrainer.fit", takes=("self",), says=("compute_advantage", "compute_data_metrics")),
            Pin("RayPPOTrainer._save_checkpoint", takes=("self",), says=(*_CHECKPOINTS[:3], _TRACKER)),
            Pin("RayPPOTrainer._load_checkpoint", takes=("self",), says=_CHECKPOINTS),
            Pin(
                "compute_advantage",
                takes=("data", "adv_estimator"),
                says=(
                    "get_adv_estimator_fn",
                    "token_level_rewards",
                    "response_mask",
                    "config",
                    "index",
                    "uid",
                    "non_tensor_batch",
                    "batch",
                    "advantages",
                    "returns",
                ),
            ),
            Pin("compute_data_metrics", takes=("batch", "use_critic")),
        ),
        "verl.experimental.separation.ray_trainer": (
            Pin(
                "SeparateRayPPOTrainer._fit_compute_advantage",
                takes=("self", "batch"),
                says=("metrics", "compute_advantage"),
            ),
        ),
        "verl.experimental.fully_async_policy.fully_async_trainer": (
            Pin(
                "FullyAsyncTrainer.__ray_metadata__.modified_class.load_checkpoint",
                takes=("self",),
                says=("current_param_version", "global_step_"),
                coroutine=True,
            ),
            # By another name it would save, and the wrapped one that it inherits would never be called.
            Pin(
                "FullyAsyncTrainer.__ray_metadata__.modified_class._save_checkpoint",
                takes=("self",),
                says=("current_param_version", "default_local_dir", "global_step_", _TRACKER),
                own=True,
            ),
            Pin("", says=("current_param_version", "local_trigger_step", "_save_checkpoint(")),
        ),
        "verl.experimental.fully_async_policy.fully_async_rollouter": (
            Pin(
                "FullyAsyncRollouter.__ray_metadata__.modified_class._streaming_generation_main",
                takes=("self",),
                coroutine=True,
            ),
            Pin(
                "FullyAsyncRollouter.__ray_metadata__.modified_class.fit",
                takes=("self",),
                says=("_streaming_generation_main", "return_exceptions"),
                coroutine=True,
            ),
            Pin("", says=("config",)),
        ),
        "verl.experimental.reward_loop.reward_loop": (Pin("RewardLoopManager", says=("reward_loop_workers",)),),
        "verl.experimental.agent_loop.agent_loop": (Pin("AgentLoopManager", says=("agent_loop_workers",)),),
        "verl.workers.rollout.llm_server": (Pin("LLMServerManager", says=("server_handles",)),),
        "verl.experimental.fully_async_policy.fully_async_main": (Pin("", says=("run_ppo(",)),),
        "verl.experimental.fully_async_policy.detach_utils": (
            Pin("MetricsAggregator._get_aggregation_type", takes=("self", "metric_name"), says=_COMBINED_BY),
        ),
        "verl.experimental.one_step_off_policy.main_ppo": (Pin("", says=("run_ppo(", "validate_config(")),),
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
        "verl.workers.engine.fsdp.transformer_impl": (
            Pin("CPUOffloadPolicy", accepts=("pin_memory",)),
            Pin("", says=("CPUOffloadPolicy",)),
        ),
        "verl.plugin.platform": (
            Pin("PlatformBase", implemented="verl_ext.cpu.platform:CPUPlatform"),
            Pin("get_platform", takes=()),
        ),
        "verl.plugin.platform.platform_manager": (
            Pin("PlatformRegistry.register", takes=("platform",)),
            Pin("_current_platform"),
        ),
        "verl.workers.rollout.base": (
            Pin("_ROLLOUT_REGISTRY", kind=dict),
            Pin(
                "BaseRollout",
                has=("resume", "update_weights", "release"),
                implemented="verl_ext.cpu.rollout:EmbeddedRollout",
            ),
            Pin("BaseRollout.__init__", takes=("self", "config", "model_config", "device_mesh")),
        ),
        "verl.workers.rollout.replica": (
            Pin("RolloutReplicaRegistry.register", takes=("name", "loader")),
            Pin(
                "RolloutReplica",
                says=(
                    "replica_rank",
                    "world_size",
                    "workers",
                    "servers",
                    "_server_handle",
                    "_server_address",
                    "is_reward_model",
                    "is_teacher_model",
                    *_LOGICAL,
                ),
                has=("max_concurrency", "launch_servers"),
                implemented="verl_ext.cpu.rollout:EmbeddedReplica",
                served="verl_ext.cpu.server:EmbeddedServer",
            ),
            Pin("TokenOutput", has=("token_ids", "log_probs", "stop_reason", "num_preempted", "extra_fields")),
        ),
        "verl.workers.rollout.utils": (Pin("ensure_async_iterator", takes=("iterable",)),),
        "verl.checkpoint_engine.base": (
            Pin("CheckpointEngineRegistry.register", takes=("backend",)),
            Pin("CheckpointEngine", implemented="verl_ext.cpu.weights:SocketCheckpointEngine"),
        ),
        "verl.third_party.vllm": (Pin("get_version", says=("version",)),),
        # What verl asks for vLLM's version with.
        "importlib.metadata": (Pin("version", accepts=("distribution_name",)), Pin("PackageNotFoundError")),
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
    "trainer.use_v1",
    "trainer.v1.sampler.custom_sampler.path",
    "trainer.v1.trainer_mode",
)
"""Entries of verl's `ppo_trainer` configuration that are read, or named in a message as what to set."""

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


def moved(*, cpu: bool = False) -> list[str]:
    """Everything that is not where this package expects it; with `cpu`, of what runs without a GPU touch instead.

    A module that cannot be imported because another package is not installed is no move.
    """
    table, settings = (CPU, CPU_SETTINGS) if cpu else (VERL, SETTINGS)
    found = [text for name, pins in table.items() for text in _of_module(name, pins)]
    return found + list(_of_settings(settings))


def require(name: str, module: Any) -> None:
    """Refuse to install a hook into a module of which something moved, naming all of it; its source is not read."""
    _refuse(text for pin in VERL[name] for text in check(name, module, pin, source=False))


def require_members(name: str, cls: str, owner: type, *members: str) -> None:
    """The same of some members of another class, which stands for `cls` of the module: a sampler of the user's."""
    where = f"{owner.__module__}.{owner.__qualname__}"
    pins = [replace(_pinned(VERL[name], f"{cls}.{member}"), name=member) for member in members]
    _refuse(text for pin in pins for text in check(where, owner, pin, source=False))


def member(name: str, module: Any, path: str) -> Any:
    """A member of a module that is patched for runs without a GPU, which must be as pinned."""
    _refuse(check(name, module, _pinned(CPU[name], path), source=False))
    return operator.attrgetter(path)(module)


def _pinned(pins: tuple[Pin, ...], path: str) -> Pin:
    return next(pin for pin in pins if pin.name == path)


def _refuse(found: Iterable[str]) -> None:
    if complaints := list(found):
        raise IntegrationError(f"{'; '.join(complaints)}: this verl moved what verl_ext hooks into")


def size() -> int:
    """How many things are pinned."""
    return sum(len(pins) for table in (VERL, CPU) for pins in table.values()) + len(SETTINGS) + len(CPU_SETTINGS)


def lacks_package(name: str, error: BaseException) -> bool:
    """Whether a module failed to import because another package is not installed."""
    missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return missing not in ("", name.partition(".")[0], "verl_ext")


def _of_module(name: str, pins: tuple[Pin, ...]) -> Iterator[str]:
    if "vllm" in name and importlib.util.find_spec("vllm") is None:
        return
    try:
        module = importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - whatever it is, it belongs on the list
        if not lacks_package(name, error):
            yield f"{name} cannot be imported any more: {type(error).__name__}: {error}"
        return
    for pin in pins:
        yield from check(name, module, pin)


@functools.cache
def _configuration() -> Any:
    import hydra

    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        return hydra.compose("ppo_trainer")


def _of_settings(paths: tuple[str, ...]) -> Iterator[str]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        config = _configuration()
    except Exception as error:  # noqa: BLE001 - whatever it is, it belongs on the list
        yield (
            f"verl's configuration ppo_trainer cannot be composed any more, so that none of {len(paths)} settings in "
            f"it can be looked for: {type(error).__name__}: {error}"
        )
        return
    for path in paths:
        section, _, name = path.rpartition(".")
        try:
            above = OmegaConf.select(config, section)
        except OmegaConfBaseException as error:
            yield f"verl's configuration ppo_trainer has no {section} in which {path} can be looked for: {error}"
            continue
        if not (OmegaConf.is_dict(above) and (name in above or OmegaConf.is_missing(above, name))):
            yield f"verl's configuration ppo_trainer has no {path} any more"
