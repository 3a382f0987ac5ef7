"""Steps after the sum that use accuracies, lengths, groups and history. Values are `[N, 1]`, NaN is "not scored"."""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from verl_ext.core.batch import LARGEST_COUNT, Batch
from verl_ext.core.chain import Step, StepResult
from verl_ext.core.groups import TOLERANCE, Array, divide
from verl_ext.core.metrics import Metrics
from verl_ext.core.schema import LARGEST_WEIGHT, bounded
from verl_ext.core.steps import single
from verl_ext.errors import CheckpointError


@dataclass(frozen=True)
class LengthPenalty(Step):
    """Penalize length among correct responses: `x - weight (len - shortest) / (longest - shortest)`.

    `len` is the response's number of tokens in the loss. `shortest` and `longest` are taken over the prompt's correct
    responses, whose accuracy is above `above`. Incorrect responses keep their value. With per-turn rewards a response
    receives the penalty at its last turn, so that the returns of its earlier turns include the penalty.

    Edge cases: if a prompt has one correct response, or if all correct responses have the same length, they keep their
    value. A response that is not scored, or has no token in the loss, is ignored.

    Kimi k1.5 (2501.12599, 2.3.3) uses a different formula, which penalizes incorrect responses as well.

    >>> batch = Batch.of([[1.0], [1.0], [1.0], [0.0]], ["g"] * 4, lengths=[2, 4, 6, 9], accuracy=[1, 1, 1, 0])
    >>> LengthPenalty(weight=0.5).apply(batch.returns, batch)[:, 0]
    array([1.  , 0.75, 0.5 , 0.  ])
    """

    name: ClassVar[str] = "length_penalty"
    before_center: ClassVar[bool] = True
    needs_accuracy: ClassVar[bool] = True
    weight: float = bounded(dataclasses.MISSING, above=0.0)
    """Penalty of the longest correct response to a prompt."""
    above: float = bounded(0.5, low=0.0, high=1.0)
    """Accuracy above which a response counts as correct."""

    def apply(self, values: Array, batch: Batch) -> Array:
        prompts = batch.prompts
        tokens_of_trajectory = np.bincount(batch.turns.trajectory, batch.lengths)
        tokens = tokens_of_trajectory[batch.turns.trajectory]  # [N], equal for the turns of a trajectory
        is_correct = batch.accuracy_for(self.name) > self.above + TOLERANCE  # False before the last turn
        is_compared = is_correct & (tokens > 0) & ~np.isnan(single(values, self.name))
        length = np.where(is_compared, tokens, np.nan)
        shortest = np.fmin.reduceat(length[prompts.order], prompts.starts)
        longest = np.fmax.reduceat(length[prompts.order], prompts.starts)
        excess = divide(length - prompts.broadcast(shortest), prompts.broadcast(longest - shortest))
        penalty = -self.weight * np.nan_to_num(excess)
        return values + batch.turns.discounted_sums(penalty)[:, None]


@dataclass(frozen=True)
class Balance(Step):
    """Multiply by `z` to compensate for zero-variance groups in the mean of the loss: `x * z` (DGPO, 3.2).

    With `over="token"`, `z = sum_all len / sum_valid len`. With `over="sequence"`, `z = B / B_valid`, counted in rows
    of verl's batch, over which the loss averages. A group is valid if it has nonzero variance. A row with several turns
    is valid if one of its turns is in a valid group. The metric `balance_z` is z (`zero_mask_ratio` in the authors'
    code and TRL). The metric `zero_variance_fraction` is the fraction of segments that are not valid.

    Edge case: `z = 1` if no group is valid.
    """

    name: ClassVar[str] = "balance"
    over: Literal["token", "sequence"] = "token"
    """Unit over which the loss averages: `token` or `sequence`."""

    def transform(self, values: Array, batch: Batch, state: Any) -> StepResult:
        is_valid = batch.groups.broadcast(batch.groups.varies(single(values, self.name)))
        sizes = batch.lengths
        if self.over == "sequence":
            sizes = batch.outputs
            # The turns of one row of verl's batch follow its first turn, which alone has an output.
            row_of_turn = (batch.outputs > 0).cumsum()
            valid_turns_of_row = np.bincount(row_of_turn, is_valid)
            is_valid = (valid_turns_of_row > 0)[row_of_turn]
        valid_size = float(sizes[is_valid].sum())
        z = float(sizes.sum()) / valid_size if valid_size else 1.0
        zero_variance_fraction = float((~is_valid).mean()) if len(is_valid) else 0.0
        return StepResult(values * z, metrics={"balance_z": z, "zero_variance_fraction": zero_variance_fraction})


@dataclass(frozen=True)
class WeightByDifficulty(Step):
    """Give hard prompts more weight: `x * lambda_g`, `lambda = B_v softmax(-acc_g / T)` (DGPO, DQW).

    `acc_g` is the prompt's mean accuracy. The softmax is over the `B_v` valid prompts; other prompts have weight 1. A
    prompt is valid if its values have nonzero variance, or with per-turn rewards the values of one of its groups.

    Edge cases: a valid prompt with accuracy 0 varies only in another reward. It gets the minimum weight, as if its
    accuracy were 1. A prompt without a scored accuracy gets the minimum weight as well.
    """

    name: ClassVar[str] = "weight_by_difficulty"
    needs_accuracy: ClassVar[bool] = True
    dqw_temp: float = bounded(2.0, low=1e-6)
    """Temperature T of the softmax. A smaller value gives hard prompts more weight."""

    def transform(self, values: Array, batch: Batch, state: Any) -> StepResult:
        group_varies = batch.groups.broadcast(batch.groups.varies(single(values, self.name)))  # [N]
        is_valid = batch.prompts.sum(group_varies.astype(np.float64)) > 0  # [prompts]
        accuracy = batch.prompts.mean(batch.accuracy_for(self.name))
        valid_accuracy = np.where(accuracy > 0, accuracy, 1.0)[is_valid]  # NaN is not above 0
        weights = np.ones(len(is_valid))
        metrics: Metrics = {
            "valid_groups": float(len(valid_accuracy)),
            "all_correct_groups": float((accuracy >= 1).sum()),
            "all_incorrect_groups": float((accuracy <= 0).sum()),
        }
        if len(valid_accuracy):
            lam = np.exp((valid_accuracy.min() - valid_accuracy) / self.dqw_temp)
            lam *= len(lam) / lam.sum()
            weights[is_valid] = lam
            metrics["difficulty_weight_max"] = float(lam.max())
            metrics["difficulty_weight_min"] = float(lam.min())
        return StepResult(values * batch.prompts.broadcast(weights)[:, None], metrics=metrics)


@dataclass(frozen=True)
class WeightByFocal(Step):
    """Give easy prompts less weight: `x (1 - p_g)^gamma`, with `p_g` the prompt's mean accuracy (F-GRPO).

    Edge case: a prompt without a scored accuracy keeps its values.
    """

    name: ClassVar[str] = "weight_by_focal"
    needs_accuracy: ClassVar[bool] = True
    gamma: float = bounded(1.0, low=0.0)
    """Exponent. A larger value gives easy prompts less weight, and with 0 all prompts have weight 1."""

    def apply(self, values: Array, batch: Batch) -> Array:
        accuracy = batch.prompts.mean(batch.accuracy_for(self.name))
        focal = (1.0 - accuracy) ** self.gamma
        weights: Array = np.where(np.isnan(accuracy), 1.0, focal)
        return values * batch.prompts.broadcast(weights)[:, None]


@dataclass(frozen=True)
class AnchorSettings:
    """The settings of the capability anchor and of the weights."""

    anchor: Literal["soft", "window", "fixed"] = "soft"
    """Estimate of the model's capability C: `soft` (moving average, the paper), `window` (mean over recent batches, the
    authors' code), or `fixed`."""
    lambda_scale: float = bounded(1.3, above=0.0, high=LARGEST_WEIGHT)
    """Factor of every weight. With 1.0, a prompt whose accuracy equals C keeps its advantages."""
    history_window: int = bounded(10, low=1, only_with={"anchor": ("soft", "window")})
    """Number of recent batches that `soft` and `window` use."""
    eta: float = bounded(0.1, low=0.0, high=1.0, only_with={"anchor": ("soft",)})
    """Factor of sigma in the step size of the `soft` anchor."""
    eta_min: float = bounded(0.05, low=0.0, high=1.0, only_with={"anchor": ("soft",)})
    """Constant added to the step size of the `soft` anchor. With 0, as in the paper, the anchor can stop moving."""
    fixed_anchor: float = bounded(0.5, low=0.0, high=1.0, only_with={"anchor": ("fixed",)})
    """Value of C with `anchor=fixed`."""


@dataclass(frozen=True)
class WeightByHistory(AnchorSettings, Step):
    """Weight by the gap between the prompt's accuracy and the capability: `x lambda exp(-sgn(x) (p_g - C))` (HA-DW).

    `p_g` is the prompt's mean accuracy and C the model's capability (eq. 7-13). `verl_ext.methods.hadw` has the
    formulas by which each anchor moves C, and `algorithm.hadw` has the same settings.

    The state consists of `anchor`, `value` (C), `window` (the last posteriors for `soft`, or the last batch accuracies
    for `window`, oldest first) and `updates` (the number of batches).

    Edge cases: a prompt without a scored accuracy has weight 1. A batch without a scored accuracy does not change the
    anchor.
    """

    name: ClassVar[str] = "weight_by_history"
    after_center: ClassVar[bool] = True
    needs_accuracy: ClassVar[bool] = True

    def init(self) -> dict[str, Any]:
        """Return the state before the first batch."""
        value = self.fixed_anchor if self.anchor == "fixed" else None
        return {"anchor": self.anchor, "value": value, "window": [], "updates": 0}

    def check_state(self, state: Any) -> None:
        """Raise if the state is damaged, or if another anchor wrote the state."""
        if not _is_sound(state):
            raise CheckpointError(
                f"The saved state of {self.name} is damaged ({state!r:.300}). Resume from another checkpoint."
            )
        saved_anchor = state["anchor"]
        if saved_anchor != self.anchor:
            raise CheckpointError(
                f"The saved state of {self.name} has anchor={saved_anchor}, but this run has anchor={self.anchor}. "
                f"Set anchor={saved_anchor}, with hadw as algorithm.hadw.anchor={saved_anchor}."
            )

    def transform(self, values: Array, batch: Batch, state: dict[str, Any]) -> StepResult:
        """Reweight with the anchor, then move the anchor."""
        self.check_state(state)
        accuracy = batch.accuracy_for(self.name)
        scored_accuracy = accuracy[~np.isnan(accuracy)]
        if not len(scored_accuracy):
            return StepResult(values, state)
        batch_accuracy = float(scored_accuracy.mean())
        capability, new_state, step_size = self._move(state, batch_accuracy)
        # [N] p_g - C; D M of the paper is -sgn(x) (p_g - C)
        gap = batch.prompts.broadcast(batch.prompts.mean(accuracy) - capability)
        exponent = -np.sign(single(values, self.name)) * gap
        phi = np.where(np.isnan(gap), 1.0, self.lambda_scale * np.exp(exponent))
        if self.anchor == "soft" and state["value"] is None:
            phi = np.ones_like(phi)
        phi = phi[:, None]
        metrics: Metrics = {
            "capability_prior": capability,
            "capability_posterior": float(new_state["value"]),
            "batch_accuracy": batch_accuracy,
            "eta_t": step_size,
            "updates": float(new_state["updates"]),
        }
        is_reweighted = ~np.isnan(values) & (values != 0)
        if is_reweighted.any():
            metrics["reweighting_mean"] = float(phi[is_reweighted].mean())
            metrics["reweighting_std"] = float(phi[is_reweighted].std())
        return StepResult(values * phi, new_state, metrics)

    def _move(self, state: dict[str, Any], batch_accuracy: float) -> tuple[float, dict[str, Any], float]:
        """Return the capability C for this batch, the new state, and the step size (0 unless the anchor is `soft`).

        With `y` the mean accuracy of the batch:

            anchor=soft     C is the prior; the next prior is (1 - eta_t) C + eta_t y
            anchor=window   C = mean of y over the last batches, including the current batch
            anchor=fixed    C = fixed_anchor
        """
        past = state["window"]
        step_size = 0.0
        if self.anchor == "fixed":
            capability = next_capability = self.fixed_anchor
            window = []
        elif self.anchor == "window":
            window = [*past, batch_accuracy][-self.history_window :]
            capability = next_capability = float(np.mean(window))
        else:
            is_first_batch = state["value"] is None
            capability = batch_accuracy if is_first_batch else state["value"]
            step_size = 1.0 if is_first_batch else self._soft_step_size(past)
            next_capability = (1 - step_size) * capability + step_size * batch_accuracy
            window = [*past, next_capability][-self.history_window :]
        updates = state["updates"] + 1
        new_state = {"anchor": self.anchor, "value": next_capability, "window": window, "updates": updates}
        return capability, new_state, step_size

    def _soft_step_size(self, past: list[float]) -> float:
        """Return the fraction by which the `soft` anchor moves toward the accuracy of the batch.

        The formula is `eta_t = clip(eta_min + eta sigma_t, 0, 1)`, where sigma_t is the standard deviation of the last
        posteriors. With fewer than two posteriors, sigma_t is 1.
        """
        recent = past[-self.history_window :]  # a run may resume with a shorter window than it was saved with
        sigma = float(np.std(recent)) if len(recent) > 1 else 1.0
        return min(self.eta_min + self.eta * sigma, 1.0)


def _is_sound(state: Any) -> bool:
    """Return whether a saved state has the entries that `init` describes, each within its range."""
    if not isinstance(state, dict) or state.keys() != {"anchor", "value", "window", "updates"}:
        return False
    value, window, updates = state["value"], state["window"], state["updates"]
    if not isinstance(window, list) or not isinstance(updates, int):
        return False
    capabilities = window if value is None else [*window, value]
    for capability in capabilities:
        if not isinstance(capability, int | float) or not 0 <= capability <= 1:
            return False
    must_have_value = state["anchor"] == "fixed" or len(window) > 0
    has_value = value is not None
    return len(window) <= updates <= LARGEST_COUNT and has_value == must_have_value
