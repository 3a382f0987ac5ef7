"""The step that weighs an advantage by the model's history: HA-DW's capability anchor and its reweighting."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from verl_ext.core.batch import Batch
from verl_ext.core.chain import SUM, Order, Update
from verl_ext.core.groups import Array
from verl_ext.core.observe import Metrics
from verl_ext.core.typed import LARGEST_WEIGHT, limited
from verl_ext.errors import CheckpointError, ConfigurationError

MOST_TICKS = 2**53  # whole numbers up to here survive as floats, in which they are logged
AnchorKind = Literal["soft", "window", "fixed"]
ANCHORS: tuple[str, ...] = get_args(AnchorKind)


@dataclass(frozen=True)
class Capability:
    """What the anchor remembers between batches."""

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
        """Read `to_dict`'s data, refusing anything else."""
        if not isinstance(data, Mapping) or set(data) != {"anchor", "value", "window", "ticks"}:
            raise CheckpointError(f"capability state needs anchor, value, window and ticks, found {data!r}")
        anchor, value, window, ticks = data["anchor"], data["value"], data["window"], data["ticks"]
        numbers = [*window, 0.0 if value is None else value] if isinstance(window, list | tuple) else [None]
        sound = all(isinstance(n, int | float) and not isinstance(n, bool) and 0 <= n <= 1 for n in numbers)
        sound = sound and anchor in ANCHORS and type(ticks) is int and 0 <= ticks <= MOST_TICKS
        if sound and anchor != "fixed":
            sound = (value is None) == (ticks == 0) and bool(window) == (ticks > 0) and len(window) <= ticks
            sound = sound and (anchor == "window" or not window or value == window[-1])
        if not sound:
            raise CheckpointError(f"capability state is damaged: {dict(data)!r}")
        return cls(anchor, None if value is None else float(value), tuple(map(float, window)), ticks)


@dataclass(frozen=True)
class WeighByHistory:
    """`x * Phi`, `Phi = lambda exp(D M)`, `M = |p_g - C|`, `D = -sgn(x) sgn(p_g - C)` (HA-DW, eq. 7-13).

    `p_g` is the group's mean accuracy, `y` the batch's, `C` the model's capability. On a prompt that is hard for the
    model (`p_g < C`) a positive advantage grows and a negative one shrinks; on an easy prompt the reverse.

    `soft`: `C` is the prior; the posterior `(1 - eta_t) C + eta_t y` is the next one, with
    `eta_t = clip(eta_min + eta sigma_t, 0, 1)` and `sigma_t` the population std of the last `window` posteriors
    (1 while there is one). `eta_min` is not in the paper: with 0, its formula, sigma_t collapses and C stands still. It
    is added, because a floor `max(eta sigma_t, eta_min)` of 0.1 hides `eta` for good (sigma_t is at most 0.5). The
    first batch sets C and has Phi = 1. `window`: `C` is the mean of y over the last
    `window` batches, this one included. `fixed`: `C` is given.

    Phi > 0, so no sign flips and 0 stays 0. A group whose accuracy is not scored has Phi = 1; a batch of which no
    accuracy is scored leaves the anchor as it was.
    """

    name: ClassVar[str] = "weigh_by_history"
    needs_accuracy: ClassVar[bool] = True
    after: ClassVar[Order] = MappingProxyType(
        {SUM: "it takes one value a trajectory", "centre": "it goes by the sign of a value within its group"}
    )
    anchor: AnchorKind = "soft"
    lambda_scale: float = limited(1.3, above=0.0, high=LARGEST_WEIGHT)
    window: int = limited(10, low=1)
    eta: float = limited(0.1, low=0.0, high=1.0)
    eta_min: float = limited(0.05, low=0.0, high=1.0)
    fixed: float | None = limited(None, low=0.0, high=1.0)
    """The anchor of `fixed`, which has no default."""

    read: ClassVar[Callable[[Mapping[str, Any]], Capability]] = Capability.from_dict

    def __post_init__(self) -> None:
        if (self.anchor == "fixed") != (self.fixed is not None):
            raise ConfigurationError(
                f"step {self.name!r}: anchor=fixed needs fixed=NUMBER in [0, 1], and no other anchor takes it; found "
                f"anchor={self.anchor}, fixed={self.fixed}"
            )

    @classmethod
    def check(cls, given: Mapping[str, Any]) -> str | None:
        """A setting that the chosen anchor does not use."""
        anchor = given.get("anchor", cls.anchor)
        used = {"soft": ("window", "eta", "eta_min"), "window": ("window",), "fixed": ("fixed",)}[anchor]
        unused = [name for name in ("window", "eta", "eta_min") if name in given and name not in used]
        return (
            f"{', '.join(unused)} without effect with anchor={anchor}, which uses {', '.join(used)}" if unused else None
        )

    def init(self) -> Capability:
        """No batch seen."""
        return Capability(self.anchor, value=self.fixed)

    def check_state(self, state: Capability) -> None:
        """Refuse what another anchor remembered."""
        if state.anchor != self.anchor:
            raise CheckpointError(
                f"the saved capability is of anchor={state.anchor}, this run has algorithm.hadw.anchor={self.anchor}: "
                "set the saved one, or start anew from a directory without that state"
            )

    def update(self, values: Array, batch: Batch, state: Capability | None) -> Update:
        """Reweigh with the anchor, then move it."""
        old = self.init() if state is None else state
        self.check_state(old)
        if batch.accuracy is None:
            raise ConfigurationError(f"step {self.name!r} needs an accuracy in [0, 1], the batch has none")
        scored = ~np.isnan(batch.accuracy)
        if not scored.any():
            return Update(values, old)
        y = float(batch.accuracy[scored].mean())
        centre, new, eta_t = self._move(old, y)
        gap = batch.groups.spread(batch.groups.mean(batch.accuracy))[:, None] - centre
        direction = -np.sign(values) * np.sign(gap)
        phi = np.where(np.isnan(gap), 1.0, self.lambda_scale * np.exp(direction * np.abs(gap)))
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
            metrics |= {"reweighting_mean": float(used.mean()), "reweighting_std": float(used.std())}
        return Update(values * phi, new, metrics, self._remarks(new, y))

    def _move(self, old: Capability, y: float) -> tuple[float, Capability, float]:
        """The anchor to weigh this batch with, what to remember, and the step size (soft)."""
        ticks = old.ticks + 1
        if self.fixed is not None:
            return self.fixed, Capability(self.anchor, self.fixed, (), ticks), 0.0
        if self.anchor == "window":
            kept = (*old.window, y)[-self.window :]
            centre = math.fsum(kept) / len(kept)
            return centre, Capability(self.anchor, centre, kept, ticks), 0.0
        if old.value is None:
            return y, Capability(self.anchor, y, (y,), ticks), 1.0
        recent = old.window[-self.window :]  # a run may resume with a shorter window than it was saved with
        sigma = float(np.std(recent)) if len(recent) > 1 else 1.0
        eta_t = min(self.eta_min + self.eta * sigma, 1.0)
        posterior = (1 - eta_t) * old.value + eta_t * y
        kept = (*old.window, posterior)[-self.window :]
        return old.value, Capability(self.anchor, posterior, kept, ticks), eta_t

    def _remarks(self, new: Capability, y: float) -> dict[str, str]:
        """A warning when the soft anchor stands still while accuracy is elsewhere."""
        still = len(new.window) == self.window > 1 and max(new.window) - min(new.window) < 0.01
        # Of the window anchor the last value is y itself, and the fixed one has no window.
        if not still or abs(y - new.window[-1]) < 0.1:
            return {}
        return {
            "hadw_frozen": f"hadw's anchor has stood still near {new.window[-1]:.3f} over the last {self.window} "
            f"batches while batch accuracy is {y:.3f}: its step eta_t is too small (eta_min={self.eta_min:g}); set "
            "algorithm.hadw.eta_min=0.05, a memory of about 20 batches, or in algorithm.compose.steps "
            "{step: weigh_by_history, eta_min: 0.05}"
        }
