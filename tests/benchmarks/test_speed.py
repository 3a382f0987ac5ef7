"""What `scripts/bench/bench_advantage.py` promises, and the promise itself at two sizes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "scripts/bench/bench_advantage.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_advantage", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("other", "milliseconds", "kept"), [(1.0, 2.0, True), (1.0, 2.1, False), (10.0, 10.0, True), (10.0, 10.1, False)]
)
def test_the_promise_against_grpo_vectorized(bench, other, milliseconds, kept):
    times = {"verl grpo_vectorized": other, **dict.fromkeys(bench.OURS, other)}
    for name in bench.OURS:
        assert bench.too_slow(times | {name: milliseconds}) == ([] if kept else [name])


@pytest.mark.parametrize("masks", ["int64", "bool"])
def test_every_round_calls_each_estimator_once_on_the_masks_that_are_named(bench, masks, monkeypatch):
    seen: dict[str, list[torch.dtype]] = {}
    real = bench.contenders

    def watched(given):
        def watch(name, function):
            def call():
                seen.setdefault(name, []).append(given["response_mask"].dtype)
                return function()

            return call

        return {name: watch(name, function) for name, function in real(given).items()}

    monkeypatch.setattr(bench, "contenders", watched)
    monkeypatch.setattr(bench, "too_slow", lambda times: ["gdpo"])
    arguments = ["bench", "--sizes", "16x32", "--masks", masks, "--seconds", "0", "--least-rounds", "2"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert bench.main() == (masks == "int64")  # bool masks are not part of the promise
    assert set(seen) >= {"floor", "floor + score", "verl grpo_vectorized", "verl gdpo", *bench.OURS}
    assert all(kinds == [bench.MASKS[masks]] * 3 for kinds in seen.values())  # once to warm up


@pytest.mark.slow
@pytest.mark.timing
def test_the_promise_holds() -> None:
    """On int64 masks; the script's exit status says it."""
    for _ in range(3):  # other load on the machine can spoil a measurement
        done = subprocess.run(
            [sys.executable, str(SCRIPT), "--sizes", "1024x1024", "16384x1024", "--masks", "int64", "--seconds", "10"],
            capture_output=True,
            text=True,
            timeout=300,
        )
        if done.returncode == 0:
            break
    assert done.returncode == 0, done.stdout + done.stderr
