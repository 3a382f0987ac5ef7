r"""HA-DW: "Your Group-Relative Advantage Is Biased", arXiv 2601.08521, sections 3-4, eq. 7-13 and appendix F.

With few responses per prompt, group-relative advantages are too small for hard prompts and too large for easy prompts.
HA-DW weights any base advantage A by the distance of the prompt's accuracy from the model's capability C:

    A'  = A Phi,    Phi = lambda exp(D M),    M = |p_g - C|,    D = -sgn(A) sgn(p_g - C)

`p_g` is the group's mean accuracy. C is carried from batch to batch. With `y` the mean accuracy of the batch:

    anchor=soft     C is the prior; the next prior is (1 - eta_t) C + eta_t y,
                    eta_t = clip(eta_min + eta sigma_t, 0, 1), sigma_t the std of the last posteriors
    anchor=window   C = mean of y over the last batches, including the current batch
    anchor=fixed    C = fixed_anchor

`eta_min` is an addition to the paper, whose formula is `eta_min=0`. With 0, sigma_t collapses and C stops moving, as
the metric `capability_posterior` shows. The default, 0.05, corresponds to a memory of about 20 batches. `eta` shortens
the memory while the capability moves.

Edge cases: a group of one response, or with a range of at most 1e-6 max(1, |mean|), has A = 0. Phi is above 0, so no
sign flips, and 0 stays 0. The advantages of a group no longer sum to 0. The first batch of the soft anchor sets C and
has Phi = 1. The state consists of C, the window and the number of batches, and is saved with every checkpoint.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from verl_ext.core.chain import Step
from verl_ext.core.post_sum import AnchorSettings, WeightByHistory
from verl_ext.methods.method import Method
from verl_ext.settings import Settings


@dataclass(frozen=True)
class HadwSettings(AnchorSettings):
    """`algorithm.hadw`."""

    base: str = "grpo"
    """Estimator whose advantages are reweighted."""


def steps_of(section: HadwSettings, _settings: Settings) -> Sequence[Step]:
    """Return the step that reweights the advantages of the base.

    >>> from verl_ext.core.batch import Batch
    >>> from verl_ext.core.chain import Chain
    >>> from verl_ext.core.steps import Center, WeightedSum
    >>> chain = Chain((WeightedSum(), Center(), *steps_of(HadwSettings(), Settings())))
    >>> first = chain(Batch.of([[1], [0]], ["a", "a"], accuracy=[1, 0]))
    >>> first.state["weight_by_history"]["value"]
    0.5
    >>> second = chain(Batch.of([[1], [0], [0], [0]], ["b"] * 4, accuracy=[1, 0, 0, 0]), first.state)
    >>> round(second.metrics["capability_posterior"], 4)
    0.4625
    """
    anchor_settings = {item.name: getattr(section, item.name) for item in fields(AnchorSettings)}
    return (WeightByHistory(**anchor_settings),)


HADW = Method(
    paper="HA-DW, arXiv 2601.08521, sections 3-4, eq. 7-13 and appendix F",
    summary="weights any base advantage by the distance of the prompt's accuracy from the model's capability",
    build=steps_of,
    settings=HadwSettings,
    base_setting="base",
    doc=__doc__,
)
