"""The benchmark of the advantage step. Its times depend on the machine and are not tested."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "scripts/bench"))
import bench_advantage


@pytest.mark.parametrize("turns", [0, 2])
def test_benchmark_runs_every_estimator(turns):
    batch = bench_advantage.batch(64, 32, torch.int64, turns)
    functions = bench_advantage.contenders(batch, turns)
    assert set(bench_advantage.OURS) < set(functions)
    for function in functions.values():
        function()
