"""The step `weigh_by_history`: the capability anchor of HA-DW and its reweighting."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from verl_ext.core.batch import Batch
from verl_ext.core.chain import SUM, Order, Step, Update
from verl_ext.core.groups import Array
from verl_ext.core.observe import Metrics, mean_of, std_of
from verl_ext.core.typed import LARGEST_WEIGHT, limited
from verl_ext.errors import CheckpointError, ConfigurationError

MOST_TICKS = 2**53  # metrics are floats, which are exact up to this integer
AnchorKind = Literal["soft", "window", "fixed"]
ANCHORS: tuple[str, ...] = get_args(AnchorKind)


@dataclass(frozen=True)
class Capability:
    """The state of the anchor between batches."""

    anchor: str
    value: float | None = None
    """The anchor C after the last batch, None before the first."""
    window: tuple[float, ...] = ()
    """Last posteriors (`soft`) or last batch accuracies (`window`), oldest first."""
    ticks: int = 0
    """Batches seen."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; floats survive JSON exactly."""
        return asdict(self) | {"window": list(self.window)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Capability:
        """Read the data of `to_dict`; raise `CheckpointError` for anything else."""
        if not isinstance(data, Mapping) or set(data) != {"anchor", "value", "window", "ticks"}:
            raise CheckpointError(f"the capability state must have anchor, value, window and ticks, found {data!r}")
        anchor, value, window, ticks = data["anchor"], data["value"], data["window"], data["ticks"]
        if anchor not in ANCHORS:
            raise _damaged(data, f"anchor must be one of {', '.join(ANCHORS)}")
        if not isinstance(window, list | tuple) or not all(map(_is_share, window)):
            raise _damaged(data, "window must be a list of numbers in [0, 1]")
        if not (value is None or _is_share(value)):
            raise _damaged(data, "value must be null or a number in [0, 1]")
        if type(ticks) is not int or not 0 <= ticks <= MOST_TICKS:
            raise _damaged(data, f"ticks must be an integer from 0 to {MOST_TICKS}")
        if anchor != "fixed" and ((value is None) != (ticks == 0) or bool(window) != (ticks > 0)):
            raise _damaged(data, "value and window must be set if ticks > 0, and only then")
        if len(window) > ticks:
            raise _damaged(data, "window must not hold more batches than ticks")
        if anchor == "soft" and window and value != window[-1]:
            raise _damaged(data, "value must be the last entry of window")
        return cls(anchor, None if value is None else float(value), tuple(map(float, window)), ticks)


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def _damaged(data: Mapping[str, Any], why: str) -> CheckpointError:
    return CheckpointError(f"the capability state is damaged: {why}; found {dict(data)!r}")


@dataclass(frozen=True)
class WeighByHistory(Step):
    """`x * Phi`, `Phi = lambda exp(D M)`, `M = |p_g - C|`, `D = -sgn(x) sgn(p_g - C)` (HA-DW, eq. 7-13).

    `p_g` is the group's mean accuracy, `y` the batch's, `C` the model's capability. On a prompt that is hard for the
    model (`p_g < C`) a positive advantage grows and a negative one shrinks; on an easy prompt the reverse.

    `soft`: `C` is the prior; the posterior `(1 - eta_t) C + eta_t y` is the next prior, with
    `eta_t = clip(eta_min + eta sigma_t, 0, 1)` and `sigma_t` the population std of the last `history_window` posteriors
    (1 while there is only one). `eta_min` is not in the paper: with 0, the paper's formula, sigma_t collapses and C
    stops moving. It is added instead of being a lower limit: in `max(eta sigma_t, eta_min)` the default `eta` would
    have no effect after the second batch, because sigma_t is at most 0.5. The first batch sets C and has Phi = 1.
    `window`: `C` is the mean of y over the last `history_window` batches, including this one.
    `fixed`: `C` is `fixed_anchor`.

    Phi > 0, so no sign flips and 0 stays 0. A group without a scored accuracy has Phi = 1. A batch without a scored
    accuracy does not change the anchor.
    """

    name: ClassVar[str] = "weigh_by_history"
    needs_accuracy: ClassVar[bool] = True
    after: ClassVar[Order] = MappingProxyType(
        {SUM: "it takes one value per trajectory", "centre": "it needs the sign of a value within its group"}
    )
    anchor: AnchorKind = "soft"
    lambda_scale: float = limited(1.3, above=0.0, high=LARGEST_WEIGHT)
    history_window: int = limited(10, low=1)
    """Batches remembered, by `soft` and `window`."""
    eta: float = limited(0.1, low=0.0, high=1.0)
    """Factor of sigma in the step of the `soft` anchor."""
    eta_min: float = limited(0.05, low=0.0, high=1.0)
    """Added to the step of the `soft` anchor; with 0, the paper's formula, the anchor can stand still."""
    fixed_anchor: float | None = limited(None, low=0.0, high=1.0)
    """The anchor for `anchor=fixed`, which requires it."""
    renamed: ClassVar[Mapping[str, str]] = MappingProxyType({"window": "history_window", "fixed": "fixed_anchor"})

    def __post_init__(self) -> None:
        check_anchor(self, who=f"{self.name}: ")

    @staticmethod
    def read(data: Any) -> Capability:
        """Read the capability from the plain data of a checkpoint."""
        return Capability.from_dict(data)

    def init(self) -> Capability:
        """Return the capability before the first batch."""
        return Capability(self.anchor, value=self.fixed_anchor)

    def check_state(self, state: Capability) -> None:
        """Raise if another anchor wrote the state."""
        if state.anchor != self.anchor:
            raise CheckpointError(
                f"the saved capability has anchor={state.anchor}, this run has algorithm.hadw.anchor={self.anchor}: "
                f"set algorithm.hadw.anchor={state.anchor}, or start from a folder without that state"
            )

    def update(self, values: Array, batch: Batch, state: Capability | None) -> Update:
        """Reweigh with the anchor, then move it."""
        old = self.init() if state is None else state
        self.check_state(old)
        accuracy = batch.accuracy_for(self.name)
        scored = accuracy[~np.isnan(accuracy)]
        if not len(scored):
            return Update(values, old)
        y = mean_of(scored)
        centre, new, eta_t = self._move(old, y)
        gap = batch.groups.broadcast(batch.groups.mean(accuracy) - centre)[:, None]
        # D M = -sgn(x) (p_g - C)
        phi = np.where(np.isnan(gap), 1.0, self.lambda_scale * np.exp(-np.sign(values) * gap))
        if self.anchor == "soft" and old.value is None:
            phi = np.ones_like(phi)
        used = phi[~np.isnan(values)]
        metrics: Metrics = {
            "capability_prior": centre,
            "capability_posterior": float(new.value if new.value is not None else centre),
            "batch_accuracy": y,
            "eta_t": eta_t,
            "tick": float(new.ticks),
        }
        if used.size:
            mean = mean_of(used)
            metrics |= {"reweighting_mean": mean, "reweighting_std": std_of(used, mean)}
        return Update(values * phi, new, metrics, self._warnings(new, y))

    def _move(self, old: Capability, y: float) -> tuple[float, Capability, float]:
        """Return the anchor for this batch, the new state, and the step size of `soft`."""
        ticks = old.ticks + 1
        if self.fixed_anchor is not None:
            return self.fixed_anchor, Capability(self.anchor, self.fixed_anchor, (), ticks), 0.0
        if self.anchor == "window":
            kept = (*old.window, y)[-self.history_window :]
            centre = math.fsum(kept) / len(kept)
            return centre, Capability(self.anchor, centre, kept, ticks), 0.0
        if old.value is None:
            return y, Capability(self.anchor, y, (y,), ticks), 1.0
        # A run may resume with a shorter window than it was saved with.
        recent = np.array(old.window[-self.history_window :])
        sigma = std_of(recent, mean_of(recent)) if len(recent) > 1 else 1.0
        eta_t = min(self.eta_min + self.eta * sigma, 1.0)
        posterior = (1 - eta_t) * old.value + eta_t * y
        kept = (*old.window, posterior)[-self.history_window :]
        return old.value, Capability(self.anchor, posterior, kept, ticks), eta_t

    def _warnings(self, new: Capability, y: float) -> dict[str, str]:
        """Warn if the soft anchor stands still although the batch accuracy is far from it.

        With the default `eta_min` or a larger one the anchor cannot stand still, and only an outlier among the batches
        would cause the warning.
        """
        if self.eta_min >= type(self).eta_min:
            return {}
        still = len(new.window) == self.history_window > 1 and max(new.window) - min(new.window) < 0.01
        # With `window` the last value is y, and `fixed` has no window: neither warns.
        if not still or abs(y - new.window[-1]) < 0.1:
            return {}
        return {
            "hadw_frozen": f"hadw's anchor has stood still near {new.window[-1]:.3f} over the last "
            f"{self.history_window} batches while batch accuracy is {y:.3f}: its step eta_t is too small (eta_min="
            f"{self.eta_min:g}); set algorithm.hadw.eta_min=0.05 (a memory of about 20 batches), or "
            "{step: weigh_by_history, eta_min: 0.05} in algorithm.compose.steps"
        }


USED_BY = MappingProxyType(
    {
        "history_window": ("soft", "window"),
        "eta": ("soft",),
        "eta_min": ("soft",),
        "fixed_anchor": ("fixed",),
    }
)
"""Settings to the anchors that use them."""


def check_anchor(settings: Any, *, prefix: str = "", who: str = "") -> None:
    """Raise if a changed setting has no effect with the chosen anchor, or if `fixed_anchor` is missing.

    `settings` is any dataclass with the settings of `WeighByHistory`; messages put `prefix` before each name.
    """
    anchor = settings.anchor
    for name, anchors in USED_BY.items():
        value = getattr(settings, name)
        if anchor not in anchors and value != getattr(WeighByHistory, name):
            valid = " or ".join(f"{prefix}anchor={one}" for one in anchors)
            raise ConfigurationError(
                f"{who}{prefix}{name}={value} has no effect with {prefix}anchor={anchor}: remove it, or set {valid}"
            )
    if anchor == "fixed" and settings.fixed_anchor is None:
        raise ConfigurationError(f"{who}{prefix}anchor=fixed needs {prefix}fixed_anchor, a number in [0, 1]")
