"""What the marks of a pass change in verl's FSDP engine."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch

from verl_ext.errors import ConfigurationError
from verl_ext.integration import hooks
from verl_ext.integration.update import FIGURES, SHARE, SKIP, entry, pack, self_check, split

RANDOM = re.compile("drop|jitter")
"""Names of a model's parts that have a rate of dropout, or of the noise of a MoE router."""
CHECKED = "_verl_ext_checked"
"""The attribute of an engine whose first pass was checked."""


def install(transformer_impl: ModuleType) -> None:
    """Wrap the FSDP engine, after the import of `verl.workers.engine.fsdp.transformer_impl`."""
    hooks.wrap(transformer_impl, "prepare_micro_batches", split.wrap_prepare)
    hooks.wrap(hooks.member(transformer_impl, "FSDPEngine"), "forward_backward_batch", wrap_forward_backward)
    engine = hooks.member(transformer_impl, "FSDPEngineWithLMHead")
    hooks.wrap(engine, "prepare_model_inputs", pack.wrap_inputs)
    hooks.wrap(engine, "prepare_model_outputs", pack.wrap_outputs)


def wrap_forward_backward(
    original: Callable[..., Any], self: Any, data: Any, loss_function: Any, forward_only: bool = False
) -> Any:
    """`forward_backward_batch(self, data, ...)`: check the engine once, and return the figures of an update."""
    skip, share = entry(data, SKIP, False), entry(data, SHARE, False)
    if not (skip or share):
        return original(self, data, loss_function, forward_only)
    if not forward_only:
        require_exact(self.module)
    if share and not hasattr(self, CHECKED):
        self_check.require_equal(self, data)
        setattr(self, CHECKED, True)
    # Until the backward pass is done: gradient checkpointing computes the layers again.
    with pack.sharing(self.module) if share else nullcontext():
        output = original(self, data, loss_function, forward_only)
    if not forward_only:
        output["metrics"] |= {f"actor/{name}": [value] for name, value in entry(data, FIGURES).items()}
    return output


def require_exact(model: torch.nn.Module) -> None:
    """Raise if a model draws random numbers in training: with fewer rows a row would draw others.

    The loss of a MoE router needs no rule: verl passes no labels, and without labels a model does not add it.
    """
    for name, part in model.named_modules():
        dropout = isinstance(part, torch.nn.modules.dropout._DropoutNd)
        for key, rate in vars(part).items():
            if isinstance(rate, float) and rate > 0 and (RANDOM.search(key) or (dropout and key == "p")):
                raise ConfigurationError(
                    f"the noise of {name}.{key}={rate:g} depends on the rows of a micro-batch: set it to 0 in "
                    "actor_rollout_ref.model.override_config, or skip_zero_advantage and share_prompts to False"
                )
