"""Log-probabilities for a marked pass without flash-attn, for which verl would use a loop over tokens."""

from typing import Any

import torch

CHUNK = 512  # tokens whose logits are in fp32 at a time


def log_probs(logits: torch.Tensor, labels: torch.Tensor, inplace_backward: bool = True) -> Any:
    """`log_softmax` of [token, vocabulary] at the labels, in fp32; on request the gradient overwrites the logits."""
    return _LogProbs.apply(logits, labels, inplace_backward)  # type: ignore[no-untyped-call]


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, inplace: bool) -> torch.Tensor:
        sums = torch.cat([part.float().logsumexp(dim=-1) for part in torch.split(logits, CHUNK)])
        ctx.save_for_backward(logits, labels, sums)
        ctx.inplace = inplace
        return logits.gather(-1, labels[:, None])[:, 0].float() - sums

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, labels, sums = ctx.saved_tensors
        logits = logits.detach()  # of one version with the saved ones, so that autograd raises if they are used again
        result = logits if ctx.inplace else torch.empty_like(logits)
        parts = (torch.split(x, CHUNK) for x in (logits, result, sums[:, None], grad[:, None], labels[:, None]))
        for part, into, total, slope, label in zip(*parts, strict=True):
            change = (part.float() - total).exp_().mul_(-slope)
            into.copy_(change.scatter_add_(-1, label, slope))
        return result, None, None
