"""Log-probabilities without verl's loop over tokens: log_softmax in fp32, and its gradient."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from verl_ext.integration.update import engine
from verl_ext.integration.update.log_probs import log_probs


def example(dtype, tokens=1100, words=300):
    random = torch.Generator().manual_seed(0)
    logits = (8 * torch.randn(tokens, words, generator=random)).to(dtype).requires_grad_()
    return logits, torch.randint(words, (tokens,), generator=random), torch.randn(tokens, generator=random)


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_they_are_log_softmax_in_fp32(dtype, inplace):
    logits, labels, slope = example(dtype)
    usual = logits.detach().float().requires_grad_()
    expected = usual.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    expected.backward(slope)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = log_probs(1.0 * logits, labels, inplace)
    found.backward(slope)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=3e-6, rtol=1e-6)
    rounding = torch.finfo(dtype).eps + 4e-6  # the second is that of an exponential of fp32
    torch.testing.assert_close(logits.grad.float(), usual.grad, atol=1e-6, rtol=rounding)


@pytest.mark.parametrize("inplace", [True, False])
def test_the_gradient_is_written_into_the_logits_only_if_it_is_asked_for(inplace):
    leaf, labels, slope = example(torch.float32)
    logits = 1.0 * leaf
    before = logits.detach().clone()
    log_probs(logits, labels, inplace).backward(slope)
    assert torch.equal(logits, before) != inplace
    assert torch.equal(logits, leaf.grad) == inplace


def test_a_second_gradient_of_the_logits_that_were_written_over_raises():
    leaf, labels, slope = example(torch.float32)
    logits = 1.0 * leaf
    entropy = logits.square().sum()  # its gradient needs the logits, and comes after
    found = log_probs(logits, labels, True)
    with pytest.raises(RuntimeError, match="inplace"):
        (found @ slope + entropy).backward()
    found = log_probs(1.0 * leaf, labels, True)
    found.backward(slope, retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        found.backward(slope)


@pytest.mark.parametrize("package", [None, "flash_attn", "torch_npu"])
def test_a_marked_pass_without_a_kernel_leaves_verl_s_own_function(monkeypatch, package):
    from verl.workers.engine.fsdp import transformer_impl

    usual = transformer_impl.logprobs_from_logits
    model = SimpleNamespace(config=SimpleNamespace(_attn_implementation="sdpa"))
    monkeypatch.setattr(engine, "find_spec", lambda name: name == package or None)
    with engine.marked_pass(SimpleNamespace(module=model), share=False):
        assert (transformer_impl.logprobs_from_logits is usual) == (package is not None)
        assert model.config._attn_implementation == "sdpa"
    assert transformer_impl.logprobs_from_logits is usual
