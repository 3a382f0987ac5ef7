"""What this package relies on in verl's source, beyond the names and signatures that are checked at run time.

Names, attributes, keywords, calls and text constants that a piece of verl's source must contain. A test that fails here
on a new verl says where to look; at run time nothing reads a source.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import operator
import re

import pytest

SAVES = ("global_steps", "global_step_", "default_local_dir", "latest_checkpointed_iteration.txt")
LOADS = ("global_steps", "global_step_", "default_local_dir", "resume_mode", "resume_from_path")
AGGREGATES = ("mean", "avg", "average", "max", "min", "sum", "total", "timing_s/")
VERL = {
    "verl.trainer.ppo.core_algos": [("get_adv_estimator_fn", ("ADV_ESTIMATOR_REGISTRY",))],
    "verl.trainer.main_ppo": [("", ("validate_config(", "auto_set_device("))],
    "verl.trainer.ppo.v1.trainer_base": [
        ("PPOTrainer.__init__", ("parameter_sync_step", "_build_replay_buffer")),
        (
            "PPOTrainer._compute_advantage",
            (
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
        ("PPOTrainer._build_replay_buffer", ("filter_groups_metric", "custom_sampler")),
        ("PPOTrainer._save_checkpoint", SAVES),
        ("PPOTrainer._load_checkpoint", LOADS),
        ("PPOTrainer", ("local_trigger_step", "is_padding", "train_batch_size")),
        ("PPOTrainer", ("reward_loop_manager", "agent_loop_manager", "llm_server_manager")),
    ],
    "verl.trainer.ppo.v1.utils": [
        ("compute_advantage_for_multi_trajectories", ("compute_advantage",)),
        ("MetricsAggregator._get_aggregation_type", AGGREGATES),
    ],
    "verl.trainer.ppo.v1.agent_loop_tq": [
        ("AgentLoopWorkerTQ._agent_loop_postprocess", ("{uid}_{session_id}_{i}",)),
        ("AgentLoopWorkerTQ._run_prompt", ("Error in _run_prompt for uid=", "Error in _run_prompt: ")),
    ],
    "verl.trainer.ppo.v1.replay_buffer": [
        ("ReplayBuffer.__init__", ("partitions",)),
        ("ReplayBuffer._dapo_filtered_keys", ("finished_keys", "partitions")),
        ("ReplayBuffer._evict_terminal_groups", ("stale_uids", "dapo_uids", "failed_uids", "dapo_counts")),
        ("ReplayBuffer._wait_for_next_poll", ("pending_keys", "running_keys", "finished_keys", "failure_keys")),
        ("", ("_", "reward_extra_info", "extra_fields", "val")),
    ],
    "verl.trainer.ppo.ray_trainer": [
        ("RayPPOTrainer.fit", ("compute_advantage", "compute_data_metrics")),
        ("RayPPOTrainer._save_checkpoint", SAVES),
        ("RayPPOTrainer._load_checkpoint", LOADS),
        (
            "compute_advantage",
            (
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
    ],
    "verl.experimental.separation.ray_trainer": [
        ("SeparateRayPPOTrainer._fit_compute_advantage", ("metrics", "compute_advantage"))
    ],
    "verl.experimental.fully_async_policy.fully_async_trainer": [
        (
            "FullyAsyncTrainer.__ray_metadata__.modified_class.load_checkpoint",
            ("current_param_version", "global_step_"),
        ),
        (
            "FullyAsyncTrainer.__ray_metadata__.modified_class._save_checkpoint",
            ("current_param_version", "default_local_dir", "global_step_", "latest_checkpointed_iteration.txt"),
        ),
        ("", ("current_param_version", "local_trigger_step", "_save_checkpoint(")),
    ],
    "verl.experimental.fully_async_policy.fully_async_rollouter": [
        (
            "FullyAsyncRollouter.__ray_metadata__.modified_class.fit",
            ("_streaming_generation_main", "return_exceptions"),
        ),
        ("", ("config",)),
    ],
    "verl.experimental.reward_loop.reward_loop": [("RewardLoopManager", ("reward_loop_workers",))],
    "verl.experimental.agent_loop.agent_loop": [("AgentLoopManager", ("agent_loop_workers",))],
    "verl.workers.rollout.llm_server": [("LLMServerManager", ("server_handles",))],
    "verl.experimental.fully_async_policy.fully_async_main": [("", ("run_ppo(",))],
    "verl.experimental.fully_async_policy.detach_utils": [("MetricsAggregator._get_aggregation_type", AGGREGATES)],
    "verl.experimental.one_step_off_policy.main_ppo": [("", ("run_ppo(", "validate_config("))],
}
CPU = {
    "verl.workers.engine.fsdp.transformer_impl": [("", ("CPUOffloadPolicy",))],
    "verl.workers.rollout.replica": [
        (
            "RolloutReplica",
            (
                "replica_rank",
                "world_size",
                "workers",
                "servers",
                "_server_handle",
                "_server_address",
                "is_reward_model",
                "is_teacher_model",
                "tensor_model_parallel_size",
                "data_parallel_size",
                "pipeline_model_parallel_size",
            ),
        ),
    ],
    "verl.third_party.vllm": [("get_version", ("version",))],
}

IMPLEMENTED = [
    ("verl.plugin.platform", "PlatformBase", "verl_ext.cpu.platform:CPUPlatform"),
    ("verl.workers.rollout.base", "BaseRollout", "verl_ext.cpu.rollout:EmbeddedRollout"),
    ("verl.workers.rollout.replica", "RolloutReplica", "verl_ext.cpu.rollout:EmbeddedReplica"),
    ("verl.checkpoint_engine.base", "CheckpointEngine", "verl_ext.cpu.weights:SocketCheckpointEngine"),
]
"""Abstract classes of verl's, and classes of ours that have all their methods."""
SERVED = [("verl.workers.rollout.replica", "RolloutReplica", "verl_ext.cpu.server:EmbeddedServer")]
"""Classes of verl's that call a server, and ours that answers."""


def resolve(module, name):
    if "vllm" in module and importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        pytest.skip(f"{module} needs {error.name}, which is not installed")
    return operator.attrgetter(name)(found) if name else found


@pytest.mark.parametrize(
    ("module", "name", "says"),
    [(module, name, says) for table in (VERL, CPU) for module, rows in table.items() for name, says in rows],
)
def test_the_source_says_what_is_relied_on(module, name, says):
    assert set(says) <= words(inspect.getsource(resolve(module, name)))


@pytest.mark.parametrize(("module", "name", "ours"), IMPLEMENTED)
def test_every_abstract_method_is_implemented(module, name, ours):
    needed = resolve(module, name).__abstractmethods__
    home, _, own = ours.partition(":")
    assert not needed & getattr(importlib.import_module(home), own).__abstractmethods__


@pytest.mark.parametrize(("module", "name", "ours"), SERVED)
def test_the_server_has_every_method_that_is_called(module, name, ours):
    called = set(re.findall(r"\bserver\.(\w+)\.remote\(", inspect.getsource(resolve(module, name))))
    home, _, own = ours.partition(":")
    assert called
    assert all(hasattr(getattr(importlib.import_module(home), own), method) for method in called)


def test_words_are_those_of_the_code_not_of_comments() -> None:
    assert "gone" not in words('x = 1  # gone\n"""gone, as it was"""')
    assert "f(" not in words("from m import f")
    assert "f(" in words("f()")
    assert {"f", "mode=m", "mode", "global_step_"} <= words('f(mode=m, at=f"global_step_{n}")')


@functools.cache
def words(source: str) -> set[str]:
    """Names, attributes, keywords, calls and text constants of a piece of source; no comments.

    >>> sorted(words("self.at = take(data['key'], over=axis)"))
    ['at', 'axis', 'data', 'key', 'over', 'over=axis', 'self', 'take', 'take(']
    >>> sorted(words('f"{a}_{b}"'))
    ['_', 'a', 'b', '{a}_{b}']
    """
    found: set[str] = set()
    # A method is indented. To take that away would break on a text of several lines that goes to the margin.
    for node in ast.walk(ast.parse(f"if True:\n{source}" if source.startswith((" ", "\t")) else source)):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name)
        elif isinstance(node, ast.keyword) and node.arg is not None:
            found |= {node.arg, f"{node.arg}={ast.unparse(node.value)}"}
        elif isinstance(node, ast.Call):
            found.add(f"{ast.unparse(node.func).rpartition('.')[2]}(")
        elif isinstance(node, ast.JoinedStr):
            found.add("".join(_piece(part) for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


def _piece(part: ast.expr) -> str:
    return f"{{{ast.unparse(part.value)}}}" if isinstance(part, ast.FormattedValue) else str(ast.literal_eval(part))
