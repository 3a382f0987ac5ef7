"""The step `weight_by_history`: the capability anchor of HA-DW and its reweighting."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from verl_ext.core.batch import LARGEST_COUNT, Batch
from verl_ext.core.chain import COMPARED, Order, Step, StepResult
from verl_ext.core.groups import Array
from verl_ext.core.metrics import Metrics
from verl_ext.core.schema import LARGEST_WEIGHT, bounded
from verl_ext.core.steps import single
from verl_ext.errors import CheckpointError


@dataclass(frozen=True)
class Anchor:
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
class WeightByHistory(Anchor, Step):
    """Weight by the gap between the prompt's accuracy and the capability: `x lambda exp(-sgn(x) (p_g - C))` (HA-DW).

    `p_g` is the prompt's mean accuracy and C the model's capability (eq. 7-13).
    `verl_ext/methods/hadw.py` says how each anchor moves `C`. The state consists of `anchor`, `value` (C), `window`
    (the last posteriors for `soft`, or the last batch accuracies for `window`, oldest first) and `updates` (the number
    of batches).

    Edge cases: a prompt without a scored accuracy has weight 1. A batch without a scored accuracy does not change the
    anchor.
    """

    name: ClassVar[str] = "weight_by_history"
    needs_accuracy: ClassVar[bool] = True
    after: ClassVar[Order] = {
        "weighted_sum": "it uses the sign of the summed rewards",
        COMPARED: "it uses the sign of the values relative to their group",
    }

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
        if state["anchor"] != self.anchor:
            raise CheckpointError(
                f"The saved state of {self.name} has anchor={state['anchor']}, but this run has anchor={self.anchor}. "
                f"Set algorithm.hadw.anchor={state['anchor']}."
            )

    def transform(self, values: Array, batch: Batch, state: dict[str, Any]) -> StepResult:
        """Reweight with the anchor, then move the anchor."""
        self.check_state(state)
        accuracy = batch.accuracy_for(self.name)
        scored = accuracy[~np.isnan(accuracy)]
        if not len(scored):
            return StepResult(values, state)
        y = float(scored.mean())
        center, new, eta_t = self._move(state, y)
        gap = batch.prompts.broadcast(batch.prompts.mean(accuracy) - center)
        # D M = -sgn(x) (p_g - C)
        phi = np.where(np.isnan(gap), 1.0, self.lambda_scale * np.exp(-np.sign(single(values)) * gap))[:, None]
        if self.anchor == "soft" and state["value"] is None:
            phi = np.ones_like(phi)
        metrics: Metrics = {
            "capability_prior": center,
            "capability_posterior": float(new["value"]),
            "batch_accuracy": y,
            "eta_t": eta_t,
            "updates": float(new["updates"]),
        }
        used = phi[~np.isnan(values) & (values != 0)]
        if used.size:
            metrics |= {"reweighting_mean": float(used.mean()), "reweighting_std": float(used.std())}
        return StepResult(values * phi, new, metrics)

    def _move(self, old: dict[str, Any], y: float) -> tuple[float, dict[str, Any], float]:
        """Return the anchor for this batch, the new state, and the step size (0 unless the anchor is `soft`)."""
        past, eta_t = old["window"], 0.0
        if self.anchor == "fixed":
            center = value = self.fixed_anchor
            window = []
        elif self.anchor == "window":
            window = [*past, y][-self.history_window :]
            center = value = float(np.mean(window))
        else:
            # A run may resume with a shorter window than it was saved with.
            recent = past[-self.history_window :]
            sigma = float(np.std(recent)) if len(recent) > 1 else 1.0
            eta_t = 1.0 if old["value"] is None else min(self.eta_min + self.eta * sigma, 1.0)
            center = y if old["value"] is None else old["value"]
            value = (1 - eta_t) * center + eta_t * y
            window = [*past, value][-self.history_window :]
        return center, {"anchor": self.anchor, "value": value, "window": window, "updates": old["updates"] + 1}, eta_t


def _is_sound(state: Any) -> bool:
    """Return whether a saved state has the entries that `init` describes, each within its range."""
    match state:
        case {"anchor": anchor, "value": value, "window": [*window], "updates": int(updates)} if len(state) == 4:
            shares = window if value is None else [*window, value]
            in_range = all(isinstance(share, int | float) and 0 <= share <= 1 for share in shares)
            has_value = anchor == "fixed" or bool(window)
            return in_range and len(window) <= updates <= LARGEST_COUNT and (value is not None) == has_value
    return False
