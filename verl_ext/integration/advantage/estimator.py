"""Compute advantages: convert verl's tensors for the core, and the result back."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from verl_ext.core.batch import Batch, unit_accuracy
from verl_ext.core.chain import Chain
from verl_ext.core.groups import Array, Groups
from verl_ext.core.metrics import advantage_metrics, reward_metrics
from verl_ext.core.rows import Rows, broadcast, float_mask, scores, token_counts
from verl_ext.core.state import RunState, plain_state
from verl_ext.errors import ConfigurationError, DataError, IntegrationError, listed
from verl_ext.estimators import build
from verl_ext.integration.advantage import dump
from verl_ext.integration.advantage.components import Components
from verl_ext.integration.advantage.context import StepContext, context_of_call
from verl_ext.integration.compat import hooks
from verl_ext.integration.compat.names import SCORE
from verl_ext.integration.config.read import read_settings
from verl_ext.run import run_state
from verl_ext.settings import Settings

logger = logging.getLogger("verl_ext")


def compute(
    name: str,
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    index: Any,
    config: Any,
    non_tensor_batch: Mapping[str, Any] | None = None,
    batch: Mapping[str, Any] | None = None,
    **_other: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns `[B, L]` in verl's convention; both are the same tensor, as in verl's own estimators.

    `index` holds the rows' uids and `config` is the `algorithm` section. Components come from `non_tensor_batch` and
    from the tensors `token_level_scores_<key>` of `batch`. verl passes these two only to `gdpo`; within a trainer they
    come from its context.
    """
    hooks.require()
    context = context_of_call(name, non_tensor_batch, batch)
    context.used = True
    settings, chain = _built(name, config, context)
    _check_shapes(token_level_rewards, response_mask)
    uids, groups = _grouped(index, len(response_mask))
    run = run_state()
    _check_mask(response_mask, run)
    rows = context.rows or Rows.of_groups(groups, response_mask)
    if len(rows.owner) != len(uids):
        raise IntegrationError(
            f"{name} was called with {len(uids)} rows of a batch of {len(rows.owner)}: the trainer "
            f"{type(context.trainer).__qualname__} must pass all rows in one call"
        )
    labels = rows.labels(uids)
    mask = float_mask(response_mask, token_level_rewards.dtype)  # becomes the result
    if not labels:
        return _both(broadcast(np.zeros(len(uids)), mask))
    builder = BatchBuilder(settings, name, chain, rows, labels, token_level_rewards, mask, context)
    trajectories = builder.batch(groups if rows.plain else None)
    result = chain(trajectories, run.states.get(name))
    if name not in run.states:
        plain_state(result.state)  # raise now, not at the first checkpoint
    run.states[name] = result.state
    warn_once(run, {**_singletons(trajectories), **result.warnings})
    if settings.verl_ext.dump_dir is not None:
        dump.write(settings, name, trajectories, labels, result.advantages, trainer=context.trainer, run=run)
    context.metrics |= reward_metrics(trajectories, result.seen) | advantage_metrics(result.advantages)
    context.metrics |= {f"{name}/{metric}": value for metric, value in result.metrics.items()}
    return _both(broadcast(rows.give(result.advantages), mask))


def _built(name: str, config: Any, context: StepContext) -> tuple[Settings, Chain]:
    """The settings and steps of the trainer's run, or from the configuration for a call from outside a trainer."""
    run = context.run
    if run is not None and run.name == name and run.chain is not None:
        return run.settings, run.chain
    settings = read_settings(config)
    return settings, build(name, settings)


@dataclass
class BatchBuilder:
    """Builds the core's `Batch` from verl's tensors: rewards, accuracy, KL term."""

    settings: Settings
    name: str
    chain: Chain
    rows: Rows
    labels: Sequence[Hashable]
    rewards: torch.Tensor
    mask: torch.Tensor
    context: StepContext

    @cached_property
    def components(self) -> Components:
        """The named rewards."""
        given = self.context
        return given.components or Components.of_batch(self.rows, self.labels, self.mask, given.fields, given.tensors)

    def batch(self, groups: Groups | None) -> Batch:
        """The trajectories for the core; pass `groups` if they are known already."""
        keys = self.settings.rewards.keys
        if keys is None and self.chain.per_reward:
            raise ConfigurationError(
                f"{self.name} normalises each reward separately and needs their names: set "
                f"'algorithm.rewards.keys=[...]' (or '+algorithm.gdpo_reward_keys=[...]'); the samples have "
                f"{listed(self.components.names())}"
            )
        columns = [self.score] if keys is None else [self.column(key, "algorithm.rewards.keys") for key in keys]
        return Batch.of(
            columns[0][:, None] if len(columns) == 1 else np.stack(columns, axis=1),
            self.labels,
            groups=groups,
            keys=(SCORE,) if keys is None else keys,
            lengths=lambda: self.rows.total(token_counts(self.mask)),
            accuracy=self.accuracy(),
            kl_reward=self.kl_reward(),
            outputs=self.rows.total(np.ones(len(self.rows.owner))),
        )

    def column(self, key: str, setting: str) -> Array:
        """A component by name; `score` is the batch's score unless a component has that name."""
        if key == SCORE and key not in self.components:
            return self.score
        return self.components.column(key, setting)

    @cached_property
    def score(self) -> Array:
        """The score of each trajectory, before any KL term."""
        before = self._before_kl()
        return self.rows.take(scores(self.rewards if before is None else before, self.mask))

    def kl_reward(self) -> Array | None:
        """The KL term of the reward, or None if there is none or it need not be separated."""
        if not self.settings.kl_in_reward:
            return None
        if self._before_kl() is None:
            if self.settings.rewards.keys is None:
                return None  # only the total is needed, and it contains the KL term
            raise DataError(
                "algorithm.use_kl_in_reward=True with algorithm.rewards.keys needs the scores before KL: pass them as "
                "batch['token_level_scores']"
            )
        return self.rows.take(scores(self.rewards, self.mask)) - self.score

    def _before_kl(self) -> torch.Tensor | None:
        """Token-level scores before KL; None if there is no KL term or the scores are unknown."""
        tensors = self.context.tensors
        if not self.settings.kl_in_reward or tensors is None or "token_level_scores" not in tensors:
            return None
        before: torch.Tensor = tensors["token_level_scores"]
        return before

    def accuracy(self) -> Array | None:
        """The accuracy, or None if no step uses it."""
        if not self.chain.needs_accuracy:
            return None
        where, own = "algorithm.rewards", self.settings.rewards
        key = own.accuracy_key or ("acc" if "acc" in self.components else SCORE)
        if key == SCORE and key not in self.components and self.settings.kl_in_reward and self._before_kl() is None:
            raise DataError(
                f"the accuracy must be taken before KL: set {where}.accuracy_key to a component, or pass "
                "batch['token_level_scores']"
            )
        values = self.column(key, f"{where}.accuracy_key")
        return unit_accuracy(values, self.labels, key=key, threshold=own.accuracy_threshold, where=where)


def warn_once(run: RunState, warnings: Mapping[str, str]) -> None:
    """Log each warning once per run."""
    for kind, text in warnings.items():
        if kind not in run.warned:
            run.warned.add(kind)
            logger.warning("%s", text)


def _singletons(batch: Batch) -> dict[str, str]:
    alone = np.count_nonzero(batch.groups.sizes == 1)
    if not alone:
        return {}
    return {
        "singletons": f"{alone} of {len(batch.groups)} prompts have one response: with nothing to compare it to, its "
        "advantage is 0; a run with actor_rollout_ref.rollout.n=1 learns nothing"
    }


def _check_shapes(rewards: torch.Tensor, mask: torch.Tensor) -> None:
    for name, value in (("token_level_rewards", rewards), ("response_mask", mask)):
        if not isinstance(value, torch.Tensor):
            raise DataError(f"{name} must be a torch tensor [rows, tokens], found {type(value).__name__}")
        if value.is_nested or value.layout is not torch.strided or value.is_complex():
            raise DataError(f"{name} must be a dense tensor of real numbers, found {value.layout} of {value.dtype}")
    if rewards.shape != mask.shape or mask.dim() != 2:
        raise DataError(
            f"token_level_rewards {tuple(rewards.shape)} and response_mask {tuple(mask.shape)} must be [rows, tokens]"
        )


def _grouped(index: Any, size: int) -> tuple[list[Hashable], Groups]:
    """The uids of the rows, and the rows by uid."""
    if index is None:
        raise DataError("the uids are missing: pass index=<one uid per row>")
    try:
        uids = list(index.tolist() if hasattr(index, "tolist") else index)
    except TypeError as error:
        raise DataError(f"index must be a list or an array of uids, one per row, found {index!r}") from error
    if len(uids) != size:
        raise DataError(f"index holds {len(uids)} uids for {size} rows")
    groups = Groups.of(uids)
    # Tensors hash by identity, so each would be a group of its own.
    if any(issubclass(kind, torch.Tensor) for kind in set(map(type, groups.labels))):
        uids = [uid.tolist() if isinstance(uid, torch.Tensor) else uid for uid in uids]
        groups = Groups.of(uids)
    return uids, groups


def _check_mask(mask: torch.Tensor, run: RunState) -> None:
    """Raise unless a mask of floats is within 0 and 1. Checked once per run, because it reads the whole mask.

    verl's own masks are integers and need no check.
    """
    if not mask.is_floating_point() or not mask.numel() or "mask" in run.warned:
        return
    low, high = torch.aminmax(mask)
    if not (low >= 0 and high <= 1):
        raise DataError(f"response_mask must be 0 or 1, found values from {low.item():g} to {high.item():g}")
    run.warned.add("mask")


def _both(advantages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return advantages, advantages
