from __future__ import annotations

import torch

from verl_ext.cpu.platform import CPUPlatform


def test_memory_counters_are_this_processs_real_memory():
    device = CPUPlatform().device_module
    before = device.memory_allocated()
    held = torch.ones(64, 1 << 20)  # 256 MiB
    assert device.memory_allocated() - before > 200 << 20
    del held
    assert device.max_memory_allocated() > before + (200 << 20)
    free, total = device.mem_get_info()
    assert 0 < free < total


def test_the_device_can_be_used_where_verl_moves_tensors():
    assert torch.ones(2).to(CPUPlatform().current_device()).device.type == "cpu"
