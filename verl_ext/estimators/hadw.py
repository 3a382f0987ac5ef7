r"""HA-DW: "Your Group-Relative Advantage Is Biased", arXiv 2601.08521, sections 3-4, eq. 7-13 and appendix F.

A group of few responses misjudges its prompt: it underrates a hard one and overrates an easy one. HA-DW weighs any
base advantage A by how far the prompt is from what the model has been capable of:

    A'  = A Phi,    Phi = lambda exp(D M),    M = |p_g - C|,    D = -sgn(A) sgn(p_g - C)

`p_g` is the group's mean accuracy. C, the model's capability, is carried from batch to batch; with `y` the mean
accuracy of the batch:

    anchor=soft     C is the prior; the next one is (1 - eta_t) C + eta_t y,
                    eta_t = clip(eta_min + eta sigma_t, 0, 1), sigma_t the std of the last posteriors
    anchor=window   C = mean of y over the last batches, this one included
    anchor=fixed    C = fixed_anchor

`eta_min` is not in the paper, whose formula is `eta_min=0`: sigma_t then collapses and C stands still, and a warning
says so. The default, 0.05, remembers about 20 batches; `eta` shortens that while the capability moves.

Degenerate cases: Phi > 0, so no sign flips and 0 stays 0; groups no longer add up to 0; the first batch of the soft
anchor sets C and has Phi = 1. The state is C, the window and the count of batches, saved with every checkpoint.
"""

from __future__ import annotations

from typing import cast

from verl_ext.core.chain import Chain
from verl_ext.core.history import AnchorKind, WeighByHistory
from verl_ext.errors import ConfigurationError
from verl_ext.estimators.dgpo import dgpo
from verl_ext.estimators.drgrpo import drgrpo
from verl_ext.estimators.gdpo import gdpo
from verl_ext.estimators.grpo import grpo
from verl_ext.settings import Settings

BASES = {"grpo": grpo, "drgrpo": drgrpo, "gdpo": gdpo, "dgpo": dgpo}


def hadw(settings: Settings) -> Chain:
    """The base's steps, then the weighing by history.

    >>> from verl_ext.core.batch import Batch
    >>> chain = hadw(Settings())
    >>> first = chain(Batch.of([[1], [0]], ["a", "a"], accuracy=[1, 0]))
    >>> first.state["weigh_by_history"].value
    0.5
    >>> second = chain(Batch.of([[1], [0], [0], [0]], ["b"] * 4, accuracy=[1, 0, 0, 0]), first.state)
    >>> round(second.metrics["hadw/capability_posterior"], 4)
    0.4625
    """
    own = settings.hadw
    for name in ("accuracy_key", "accuracy_threshold") if own.base == "dgpo" else ():
        if getattr(settings.dgpo, name) not in (None, getattr(own, name)):
            raise ConfigurationError(
                f"algorithm.dgpo.{name}={getattr(settings.dgpo, name)} has no effect under hadw, whose accuracy serves "
                f"its base as well: set algorithm.hadw.{name} instead"
            )
    given = {"window": own.history_window, "eta": own.eta, "eta_min": own.eta_min, "fixed": own.fixed_anchor}
    history = WeighByHistory(
        anchor=cast(AnchorKind, own.anchor),
        lambda_scale=own.lambda_scale,
        **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
    )
    base = BASES[own.base](settings)
    return Chain((*base.steps, history), {**base.log_as, history.name: "hadw"})
