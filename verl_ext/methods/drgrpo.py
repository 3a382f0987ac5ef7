r"""Dr. GRPO: "Understanding R1-Zero-Like Training", arXiv 2503.20783, section 3.2.

The advantage is the centered reward. It is not divided by the group's standard deviation:

    A_i = r_i - mean_g(r)        r_i = sum_k w_k r_ik, or the score; g the responses to one prompt

The method also changes the loss. The sum over a response's tokens is divided by a constant instead of the response's
length, and then averaged over responses. In verl:

- actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm
- actor_rollout_ref.actor.loss_scale_factor=<data.max_response_length>
- actor_rollout_ref.actor.use_kl_loss=False

Edge cases: a group of one response, or with a range of at most 1e-6 max(1, |mean|), has advantage 0. Rewards are not
rescaled: doubling the rewards doubles the advantages, unless the range crosses that limit. For example, [8e-7, 0] gives
0, and [1.6e-6, 0] gives +-8e-7.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from verl_ext.core.chain import Step
from verl_ext.core.steps import Center, WeightedSum
from verl_ext.errors import Finding
from verl_ext.methods.method import Method
from verl_ext.settings import Settings


@dataclass(frozen=True)
class DrgrpoSettings:
    """`algorithm.drgrpo`."""

    check_loss: bool = True
    """Whether a run is rejected if the actor's loss differs from that of Dr. GRPO."""


def rule(settings: Settings, select: Callable[[str], Any]) -> Iterator[Finding]:
    """Reject a run whose actor loss is not that of Dr. GRPO; `select` reads an entry of verl's configuration."""
    if not settings.of("drgrpo", DrgrpoSettings).check_loss:
        return
    actor = "actor_rollout_ref.actor"
    mode, factor = f"{actor}.loss_agg_mode", f"{actor}.loss_scale_factor"
    factor_value = select(factor)
    wrong_settings = []
    corrections = []
    if settings.loss_agg_mode != "seq-mean-token-sum-norm":
        wrong_settings.append(f"{mode}={settings.loss_agg_mode}")
        corrections.append(f"{mode}=seq-mean-token-sum-norm")
    is_number = isinstance(factor_value, int | float) and not isinstance(factor_value, bool)
    if not is_number or factor_value <= 0:
        length = select("data.max_response_length") or "<data.max_response_length>"
        wrong_settings.append(f"{factor}={'null' if factor_value is None else repr(factor_value)}")
        corrections.append(f"{factor}={length}")
    if corrections:
        text = (
            "Dr. GRPO divides the summed token losses of a response by a constant, but this run has "
            f"{' and '.join(wrong_settings)}."
        )
        if factor_value is None:
            text += " Without a loss_scale_factor, verl divides by the length of the longest response in a micro-batch."
        yield Finding(
            "error",
            text,
            f"Set {' '.join(corrections)}, or ++algorithm.drgrpo.check_loss=False to keep your loss.",
        )
    if select(f"{actor}.use_kl_loss"):
        yield Finding(
            "warning",
            f"{actor}.use_kl_loss=True adds a KL term to the loss, but Dr. GRPO trains without a KL term.",
            f"Set {actor}.use_kl_loss=False, or ++algorithm.drgrpo.check_loss=False to keep your loss.",
        )


def steps_of(_section: DrgrpoSettings, _settings: Settings) -> Sequence[Step]:
    """Return the steps of `A = r - mean_g(r)`.

    >>> from verl_ext.core.batch import Batch
    >>> from verl_ext.core.chain import Chain
    >>> batch = Batch.of([[1], [0], [0], [0], [1], [1]], ["a", "a", "a", "a", "b", "b"])
    >>> Chain(steps_of(DrgrpoSettings(), Settings()))(batch).advantages
    array([ 0.75, -0.25, -0.25, -0.25,  0.  ,  0.  ])
    """
    return WeightedSum(), Center()


DRGRPO = Method(
    paper="Dr. GRPO, arXiv 2503.20783, section 3.2",
    summary="centers only, with a loss divided by a constant",
    build=steps_of,
    settings=DrgrpoSettings,
    preset={
        "actor_rollout_ref": {
            "actor": {
                "loss_agg_mode": "seq-mean-token-sum-norm",
                "loss_scale_factor": "${data.max_response_length}",
                "use_kl_loss": False,
            }
        }
    },
    rule=rule,
    doc=__doc__,
)
