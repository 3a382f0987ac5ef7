"""In processes of their own: what the plugin does at import cannot be undone in this one."""

import os
from types import SimpleNamespace

import pytest

from tests import fresh
from verl_ext.cpu import patches


def python(code, **environment):
    """Run the code in a fresh interpreter without anything asked for; return what it prints."""
    env = {k: v for k, v in os.environ.items() if k not in ("VERL_PLATFORM", "VERL_ENGINE_DEVICE")}
    done = fresh.run(code, environment={**env, **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


PLACES = """
import os, verl
import verl_ext.cpu.plugin
import verl.utils.distributed, verl.utils.model, verl.checkpoint_engine.base
from verl.plugin.platform import PlatformRegistry
from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplicaRegistry
changed = [
    PlatformRegistry.get("cpu") is not None,
    ("embedded", "async") in _ROLLOUT_REGISTRY,
    "embedded" in RolloutReplicaRegistry._registry,
    "ray" in verl.checkpoint_engine.base.CheckpointEngineRegistry._registry,
    hasattr(verl.utils.distributed.initialize_global_process_group_ray, "__wrapped__"),
    hasattr(verl.utils.model.load_valuehead_model, "__wrapped__"),
    "VERL_PLATFORM" in os.environ,
    "VERL_ENGINE_DEVICE" in os.environ,
]
print(*sorted(set(changed)))
"""
SEEN = """
from verl.utils.device import get_device_name, get_device_id, get_nccl_backend, get_resource_name
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import get_rollout_replica_class
print(get_device_name(), get_device_id(), get_nccl_backend(), get_resource_name())
print(get_rollout_class("embedded").__name__, get_rollout_replica_class("embedded").__name__)
"""


def test_verl_changes_only_where_the_cpu_is_asked_for_and_sees_it_there():
    assert python(PLACES) == ["False"]
    assert python(PLACES + SEEN, VERL_PLATFORM="cpu") == ["True", "cpu cpu gloo GPU", "EmbeddedRollout EmbeddedReplica"]


def test_with_a_gpus_platform_a_configuration_of_verls_own_stays_with_it():
    code = """
import verl
from omegaconf import OmegaConf
from verl.plugin.platform import get_platform, platform_cuda
from verl.utils.device import auto_set_device
platform_cuda.PlatformCUDA.is_available = lambda self: True  # as on a machine with a GPU
platform_cuda.PlatformCUDA.is_platform_available = lambda self, use_smi_check=False: True
config = OmegaConf.create({"trainer": {"device": "cpu"}, "actor_rollout_ref": {}})
auto_set_device(config)
print(get_platform().device_name, config.trainer.device)
"""
    assert python(code) == ["cuda cuda"]


VISIBLE = "import os, verl_ext.cpu.plugin; print(os.environ.get('CUDA_VISIBLE_DEVICES'))"
CLUSTER = f"""
{VISIBLE}
import ray, sys, subprocess, tempfile

@ray.remote(num_gpus=1)
def visible():
    import verl_ext.cpu.plugin
    below = subprocess.run([sys.executable, "-c", {VISIBLE!r}], capture_output=True, text=True).stdout.strip()
    return os.environ.get("CUDA_VISIBLE_DEVICES"), below

with tempfile.TemporaryDirectory(prefix="ve-", dir="/tmp", ignore_cleanup_errors=True) as folder:
    ray.init(address="local", num_cpus=1, num_gpus=1, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
    print(*ray.get(visible.remote()), sep="|")
    ray.shutdown()
"""


def test_gpus_that_a_driver_hides_stay_hidden_in_the_processes_of_its_cluster():
    """Ray rejects its virtual slots where the variable is empty, so a driver must not have it."""
    assert python(VISIBLE, VERL_PLATFORM="", CUDA_VISIBLE_DEVICES="") == [""]
    assert python(CLUSTER, VERL_PLATFORM="cpu", CUDA_VISIBLE_DEVICES="")[-2:] == ["None", "|"]
    assert python(CLUSTER, VERL_PLATFORM="cpu", CUDA_VISIBLE_DEVICES="0")[-2:] == ["0", "0|0"]


def test_a_reference_model_is_offloaded_without_pinned_memory():
    module = SimpleNamespace(CPUOffloadPolicy=lambda pin_memory=True: pin_memory)
    patches.offload_policy(module)
    assert module.CPUOffloadPolicy(pin_memory=True) is False


def test_without_flash_attention_sequences_are_padded_and_back(monkeypatch):
    import torch

    monkeypatch.setattr(patches, "find_spec", lambda name: None)
    module = SimpleNamespace(_get_attention_functions=lambda: pytest.fail("needs flash-attn"))
    patches.padding(module)
    take, pad, _, unpad = module._get_attention_functions()
    mask = torch.tensor([[0, 1, 1], [1, 0, 0]])
    rows = torch.arange(6.0).view(2, 3, 1)
    flat, indices, offsets, longest, _ = unpad(rows, mask)
    assert (indices.tolist(), offsets.tolist(), int(longest)) == ([1, 2, 3], [0, 2, 3], 2)
    assert torch.equal(take(rows.view(6, 1), indices), flat)
    assert torch.equal(pad(flat, indices, 2, 3), rows * mask[:, :, None])
