from __future__ import annotations

import logging
import time
from types import SimpleNamespace

import pytest
import torch

from tests.cpu.test_checks import configuration
from tests.facts import says
from verl_ext.cpu import checks, precision

ROLLOUT = "actor_rollout_ref.rollout.dtype"
ACTOR = "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype"
REF = "actor_rollout_ref.ref.fsdp_config.mixed_precision.param_dtype"
CRITIC = "critic.fsdp.mixed_precision.param_dtype"


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def only_fp32(dtype):
    return dtype in ("float32", "fp32")


def test_bf16_counts_as_slow_where_torch_takes_many_times_as_long():
    """The loops that torch falls back to take some fifty times as long; with instructions it is at most a few times."""

    def seconds(dtype):
        left, right = torch.ones(64, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
        times = []
        for _ in range(5):
            start = time.thread_time()
            left @ right
            times.append(time.thread_time() - start)
        return min(times)

    fast = seconds(torch.bfloat16) < 12 * seconds(torch.float32)
    assert [precision.is_fast(name) for name in ("bf16", "bfloat16")] == [fast, fast]
    assert precision.is_fast("float32")
    assert precision.is_fast("fp32")


def test_a_slow_type_is_warned_of_at_the_start(monkeypatch, caplog):
    monkeypatch.setattr(precision, "is_fast", only_fp32)
    checks.log_remarks(configuration(f"{ROLLOUT}=bfloat16", f"{ACTOR}=bf16", f"{REF}=bf16", f"{CRITIC}=bf16"))
    warned = warnings_of(caplog)
    assert len(warned) == 2  # there is no reference model and no critic
    assert says(warned[0], f"{ACTOR}=bf16", f"{ACTOR}=fp32")
    assert says(warned[1], f"{ROLLOUT}=bfloat16", f"{ROLLOUT}=float32")
    caplog.clear()
    checks.log_remarks(configuration())  # the preset's own
    assert not warnings_of(caplog)


def test_the_types_of_a_reference_model_and_a_critic_count_where_the_run_has_them(monkeypatch, caplog):
    monkeypatch.setattr(precision, "is_fast", only_fp32)
    used = ("actor_rollout_ref.actor.use_kl_loss=True", "algorithm.adv_estimator=gae")
    checks.log_remarks(configuration(*used, f"{REF}=fp16", f"{CRITIC}=null"))
    warned = warnings_of(caplog)
    assert len(warned) == 2
    assert says(warned[0], f"{REF}=fp16", f"{REF}=fp32")
    assert says(warned[1], f"{CRITIC}=bf16", f"{CRITIC}=fp32")  # null is verl's default


@pytest.mark.parametrize(
    ("names", "call"),
    [(("bf16", "bfloat16"), "_is_mkldnn_bf16_supported"), (("fp16", "16"), "_is_mkldnn_fp16_supported")],
)
@pytest.mark.parametrize("supported", [True, False])
def test_torch_says_which_types_are_fast(monkeypatch, names, call, supported):
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace(**{call: lambda: supported}))
    assert [precision.is_fast(name) for name in names] == [supported, supported]


def test_a_torch_without_the_call_counts_as_fast(monkeypatch):
    monkeypatch.setattr(precision, "CALLS", {"bf16": "_is_not_there"})
    assert precision.is_fast("bf16")
