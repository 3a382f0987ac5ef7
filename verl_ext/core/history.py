"""The step `weight_by_history`: the capability anchor of HA-DW and its reweighting."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from verl_ext.core.batch import LARGEST_COUNT, Batch
from verl_ext.core.chain import Step, StepResult
from verl_ext.core.groups import Array
from verl_ext.core.metrics import Metrics
from verl_ext.core.schema import LARGEST_WEIGHT, bounded
from verl_ext.core.steps import single
from verl_ext.errors import CheckpointError


@dataclass(frozen=True)
class AnchorSettings:
    """The settings of the capability anchor and of the weights."""

    anchor: Literal["soft", "window", "fixed"] = "soft"
    """Estimate of the model's capability C: `soft` (moving average, as in the paper), `window` (mean over recent
    batches, as in the authors' code), or `fixed`."""
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

    `p_g` is the prompt's mean accuracy and C the model's capability (eq. 7-13). `_move` has the formulas by which each
    anchor moves C. The state consists of `anchor`, `value` (C), `window` (the last posteriors for `soft`, or the last
    batch accuracies for `window`, oldest first) and `updates` (the number of batches).

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
