"""Log-probabilities for a marked pass without flash-attn, for which verl would use a loop over tokens."""

from typing import Any

import torch

CHUNK = 512
"""How many tokens have their logits in fp32 at a time, which bounds the memory."""


def log_probs(logits: torch.Tensor, labels: torch.Tensor, inplace_backward: bool = True) -> Any:
    """Return `log_softmax` of `[token, vocabulary]` at the labels, in fp32.

    On request the gradient overwrites the logits.
    """
    return _LogProbs.apply(logits, labels, inplace_backward)  # type: ignore[no-untyped-call]


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, inplace: bool) -> torch.Tensor:
        chunks = torch.split(logits, CHUNK)
        normalizers = torch.cat([chunk.float().logsumexp(dim=-1) for chunk in chunks])
        ctx.save_for_backward(logits, labels, normalizers)
        ctx.inplace = inplace
        chosen_logits = logits.gather(-1, labels[:, None])[:, 0]
        return chosen_logits.float() - normalizers

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Return `grad * (one_hot(label) - softmax(logits))`, in the type of the logits."""
        logits, labels, normalizers = ctx.saved_tensors
        logits = logits.detach()  # of one version with the saved ones, so that autograd raises if they are used again
        result = logits if ctx.inplace else torch.empty_like(logits)
        columns = (normalizers[:, None], grad[:, None], labels[:, None])
        chunks = (torch.split(tensor, CHUNK) for tensor in (logits, result, *columns))
        for chunk, result_chunk, normalizer, slope, label in zip(*chunks, strict=True):
            probabilities = (chunk.float() - normalizer).exp_()
            gradient = probabilities.mul_(-slope).scatter_add_(-1, label, slope)
            result_chunk.copy_(gradient)
        return result, None, None
