"""Log-probabilities without flash-attn are `log_softmax` in fp32, and the gradient may overwrite the logits."""

from types import SimpleNamespace

import pytest
import torch

from verl_ext.update import engine
from verl_ext.update.engine import log_probs


def example(dtype, tokens=1100, words=300):
    """Return random logits, labels, and the gradient of each log-probability."""
    random = torch.Generator().manual_seed(0)
    logits = (8 * torch.randn(tokens, words, generator=random)).to(dtype).requires_grad_()
    labels = torch.randint(words, (tokens,), generator=random)
    slopes = torch.randn(tokens, generator=random)
    return logits, labels, slopes


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_and_gradients_are_those_of_log_softmax_in_fp32(dtype, inplace):
    logits, labels, slopes = example(dtype)
    reference_logits = logits.detach().float().requires_grad_()
    reference = reference_logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    reference.backward(slopes)
    copy = 1.0 * logits  # may be overwritten
    with torch.autocast("cpu", dtype=torch.bfloat16):
        values = log_probs(copy, labels, inplace)
    values.backward(slopes)
    assert values.dtype == torch.float32
    is_unchanged = torch.equal(copy, logits)
    assert is_unchanged != inplace
    torch.testing.assert_close(values, reference, atol=3e-6, rtol=1e-6)
    rounding = torch.finfo(dtype).eps + 4e-6  # the second is that of an exponential of fp32
    torch.testing.assert_close(logits.grad.float(), reference_logits.grad, atol=1e-6, rtol=rounding)


def test_second_gradient_of_overwritten_logits_raises():
    logits, labels, slopes = example(torch.float32)
    values = log_probs(1.0 * logits, labels, True)
    values.backward(slopes, retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        values.backward(slopes)


def test_gradient_of_another_function_of_overwritten_logits_raises():
    leaf, labels, slopes = example(torch.float32)
    logits = 1.0 * leaf
    entropy = logits.square().sum()  # its gradient needs the logits, and comes later
    values = log_probs(logits, labels, True)
    with pytest.raises(RuntimeError, match="inplace"):
        (values @ slopes + entropy).backward()


@pytest.mark.parametrize("package", [None, "flash_attn", "torch_npu"])
def test_function_of_verl_is_replaced_only_without_a_fast_one(monkeypatch, package):
    from verl.workers.engine.fsdp import transformer_impl

    usual = transformer_impl.logprobs_from_logits
    model = SimpleNamespace(config=SimpleNamespace(_attn_implementation="sdpa"))
    monkeypatch.setattr(engine, "find_spec", lambda name: name == package or None)
    with engine.computing(SimpleNamespace(module=model), share=False):
        is_usual = transformer_impl.logprobs_from_logits is usual
        assert is_usual == (package is not None)
        assert model.config._attn_implementation == "sdpa"
    assert transformer_impl.logprobs_from_logits is usual
