"""The plugin in processes of its own, because what it does at import cannot be undone in this process."""

import os
from types import SimpleNamespace

import pytest

from tests import fresh
from verl_ext.cpu import patches


def run_python(code, **environment):
    """Run code in a new interpreter that is not switched to the CPU; return the lines that it prints."""
    inherited = dict(os.environ)
    for name in ("VERL_PLATFORM", "VERL_ENGINE_DEVICE"):
        inherited.pop(name, None)
    result = fresh.run(code, environment={**inherited, **environment})
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


IS_CHANGED = """
import os, verl
import verl_ext.cpu.plugin
import verl.utils.distributed, verl.utils.model
from verl.plugin.platform import PlatformRegistry
from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplicaRegistry
is_changed = {
    "platform": PlatformRegistry.get("cpu") is not None,
    "adapter": ("embedded", "async") in _ROLLOUT_REGISTRY,
    "replica": "embedded" in RolloutReplicaRegistry._registry,
    "process group": hasattr(verl.utils.distributed.initialize_global_process_group_ray, "__wrapped__"),
    "critic": hasattr(verl.utils.model.load_valuehead_model, "__wrapped__"),
    "VERL_PLATFORM": "VERL_PLATFORM" in os.environ,
    "VERL_ENGINE_DEVICE": "VERL_ENGINE_DEVICE" in os.environ,
}
print("changed:", *(name for name, changed in is_changed.items() if changed))
print("unchanged:", *(name for name, changed in is_changed.items() if not changed))
"""
PLATFORM_OF_VERL = """
from verl.utils.device import get_device_name, get_device_id, get_nccl_backend, get_resource_name
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import get_rollout_replica_class
print(get_device_name(), get_device_id(), get_nccl_backend(), get_resource_name())
print(get_rollout_class("embedded").__name__, get_rollout_replica_class("embedded").__name__)
"""


def test_verl_is_unchanged_unless_the_cpu_is_requested():
    assert run_python(IS_CHANGED)[0] == "changed:"


def test_verl_uses_the_platform_and_the_rollout_if_the_cpu_is_requested():
    _, unchanged, device, rollout = run_python(IS_CHANGED + PLATFORM_OF_VERL, VERL_PLATFORM="cpu")
    assert unchanged == "unchanged:"
    assert device == "cpu cpu gloo GPU"
    assert rollout == "EmbeddedRollout EmbeddedReplica"


def test_on_a_machine_with_a_gpu_verls_own_cpu_setting_keeps_the_gpu_platform():
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
    assert run_python(code) == ["cuda cuda"]


PRINT_VISIBLE = "import os, verl_ext.cpu.plugin; print(os.environ.get('CUDA_VISIBLE_DEVICES'))"
PRINT_VISIBLE_IN_CLUSTER = f"""
{PRINT_VISIBLE}
import ray, sys, subprocess, tempfile

@ray.remote(num_gpus=1)
def visible():
    import verl_ext.cpu.plugin
    child = subprocess.run([sys.executable, "-c", {PRINT_VISIBLE!r}], capture_output=True, text=True)
    return os.environ.get("CUDA_VISIBLE_DEVICES"), child.stdout.strip()

with tempfile.TemporaryDirectory(prefix="ve-", dir="/tmp", ignore_cleanup_errors=True) as folder:
    ray.init(address="local", num_cpus=1, num_gpus=1, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
    print(*ray.get(visible.remote()), sep="|")
    ray.shutdown()
"""


def test_gpus_that_a_driver_hides_stay_hidden_in_the_processes_of_its_cluster():
    """Ray rejects its virtual slots if the variable is empty in the driver, so the driver must not have it."""
    driver, worker_and_child = run_python(PRINT_VISIBLE_IN_CLUSTER, VERL_PLATFORM="cpu", CUDA_VISIBLE_DEVICES="")[-2:]
    assert driver == "None"
    assert worker_and_child == "|"  # empty in both


def test_gpus_that_a_driver_shows_stay_visible_in_the_processes_of_its_cluster():
    driver, worker_and_child = run_python(PRINT_VISIBLE_IN_CLUSTER, VERL_PLATFORM="cpu", CUDA_VISIBLE_DEVICES="0")[-2:]
    assert driver == "0"
    assert worker_and_child == "0|0"


def test_without_the_cpu_an_empty_variable_stays_as_it_is():
    assert run_python(PRINT_VISIBLE, VERL_PLATFORM="", CUDA_VISIBLE_DEVICES="") == [""]


def test_a_reference_model_is_offloaded_without_pinned_memory():
    module = SimpleNamespace(CPUOffloadPolicy=lambda pin_memory=True: pin_memory)
    patches.offload_without_pinned_memory(module)
    assert module.CPUOffloadPolicy(pin_memory=True) is False


def test_without_flash_attention_sequences_are_padded_and_unpadded(monkeypatch):
    import torch

    monkeypatch.setattr(patches, "find_spec", lambda name: None)
    module = SimpleNamespace(_get_attention_functions=lambda: pytest.fail("needs flash-attn"))
    patches.pad_without_flash_attn(module)
    index_first_axis, pad, _, unpad = module._get_attention_functions()
    mask = torch.tensor([[0, 1, 1], [1, 0, 0]])
    rows = torch.arange(6.0).view(2, 3, 1)
    tokens, indices, offsets, longest, _ = unpad(rows, mask)
    assert (indices.tolist(), offsets.tolist(), int(longest)) == ([1, 2, 3], [0, 2, 3], 2)
    assert torch.equal(index_first_axis(rows.view(6, 1), indices), tokens)
    assert torch.equal(pad(tokens, indices, 2, 3), rows * mask[:, :, None])
