"""The step `weight_by_history`: the capability anchor of HA-DW and its reweighting."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from verl_ext.core.batch import LARGEST_COUNT, Batch
from verl_ext.core.chain import COMPARED, Order, Step, StepResult
from verl_ext.core.groups import Array
from verl_ext.core.metrics import Metrics
from verl_ext.core.steps import single
from verl_ext.core.typed import LARGEST_WEIGHT, bounded
from verl_ext.errors import CheckpointError


@dataclass(frozen=True)
class Anchor:
    """The settings of the capability anchor and of the weights."""

    anchor: Literal["soft", "window", "fixed"] = "soft"
    """How the model's capability is estimated: `soft` (the paper), `window` (the authors' code), `fixed`."""
    lambda_scale: float = bounded(1.3, above=0.0, high=LARGEST_WEIGHT)
    """Factor of every weight; 1.0 leaves a prompt at the anchor unchanged."""
    history_window: int = bounded(10, low=1, only_with={"anchor": ("soft", "window")})
    """Batches remembered, by `soft` and `window`."""
    eta: float = bounded(0.1, low=0.0, high=1.0, only_with={"anchor": ("soft",)})
    """Factor of sigma in the step of the `soft` anchor."""
    eta_min: float = bounded(0.05, low=0.0, high=1.0, only_with={"anchor": ("soft",)})
    """Added to the step of the `soft` anchor; with 0, the paper's formula, the anchor can stand still."""
    fixed_anchor: float = bounded(0.5, low=0.0, high=1.0, only_with={"anchor": ("fixed",)})
    """The anchor of `anchor=fixed`."""


@dataclass(frozen=True)
class WeightByHistory(Anchor, Step):
    """`x * Phi`, `Phi = lambda exp(D M)`, `M = |p_g - C|`, `D = -sgn(x) sgn(p_g - C)` (HA-DW, eq. 7-13).

    `p_g` is the prompt's mean accuracy, `C` the model's capability; `verl_ext/estimators/hadw.py` says how each anchor
    moves it. A prompt without a scored accuracy has Phi = 1. A batch without one does not change the anchor.

    The state is `anchor`; `value`, which is C; `window`, the last posteriors (`soft`) or batch accuracies (`window`),
    oldest first; and `updates`, the batches seen.
    """

    name: ClassVar[str] = "weight_by_history"
    needs_accuracy: ClassVar[bool] = True
    after: ClassVar[Order] = {"weighted_sum": "it needs the sum's sign", COMPARED: "it needs a sign within the group"}

    def init(self) -> dict[str, Any]:
        """Return the state before the first batch."""
        value = self.fixed_anchor if self.anchor == "fixed" else None
        return {"anchor": self.anchor, "value": value, "window": [], "updates": 0}

    def check_state(self, state: Any) -> None:
        """Raise if the state is damaged, or another anchor wrote it."""
        if not _is_sound(state):
            raise CheckpointError(f"the state of {self.name} is damaged: {state!r:.300}")
        if state["anchor"] != self.anchor:
            raise CheckpointError(
                f"the saved state of {self.name} has anchor={state['anchor']}, this run has anchor={self.anchor}: set "
                f"algorithm.hadw.anchor={state['anchor']}, or start from a folder without that state"
            )

    def transform(self, values: Array, batch: Batch, state: dict[str, Any]) -> StepResult:
        """Reweigh with the anchor, then move it."""
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
        """Return the anchor for this batch, the new state, and the step size of `soft`."""
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
    """Whether a saved state has the entries that `init` describes, each within its range."""
    match state:
        case {"anchor": anchor, "value": value, "window": [*window], "updates": int(updates)} if len(state) == 4:
            shares = window if value is None else [*window, value]
            in_range = all(isinstance(share, int | float) and 0 <= share <= 1 for share in shares)
            has_value = anchor == "fixed" or bool(window)
            return in_range and len(window) <= updates <= LARGEST_COUNT and (value is not None) == has_value
    return False
