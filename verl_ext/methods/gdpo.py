r"""GDPO: "Group reward-Decoupled Normalization Policy Optimization", arXiv 2601.05242, section 3, eq. 4-8.

Each reward is normalized separately in its group, so that rewards of different scale have the same influence:

    A_ik = (r_ik - mean_g(r_k)) / std_g(r_k)        reward k of response i to prompt g, std with n - 1
    S_i  = sum_k w_k A_ik
    A_i  = (S_i - mean(S)) / (std(S) + 1e-6)        over the responses of the batch

With `whiten=token`, the last mean and standard deviation are computed over tokens, as in NVIDIA's verl fork and in
verl's own `gdpo`. With `algorithm.rewards.conditions`, a reward counts only where another reward reached a threshold
(eq. 8).

Edge cases:

- A reward whose range in a group is at most 1e-6 max(1, |mean|) has zero variance and adds 0 there. verl whitens the
  float32 rounding of such a group.
- With `whiten=sequence`, a group in which no reward varies has advantage exactly 0. The same holds for a group whose
  rewards cancel, whatever their scales. A nonzero `epsilon` in the group leaves a residual instead. Other
  implementations have such an epsilon, and `whiten=token` keeps it (1e-6).
- A single reward is still whitened, so the result differs from GRPO.
- A reward that is not scored (NaN) adds 0 to its row and is excluded from the group's mean and standard deviation.
- A group of one response keeps its raw reward in verl, and has advantage 0 here.

Outside these cases, `whiten=token` equals verl's own function to about 1e-6.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from verl_ext.core.chain import Step
from verl_ext.core.schema import bounded
from verl_ext.core.steps import Center, ScaleByMad, ScaleByStd, WeightedSum, Whiten
from verl_ext.errors import ConfigurationError, Finding
from verl_ext.methods.method import Method
from verl_ext.settings import VERL_NAMES, Settings


@dataclass(frozen=True)
class GdpoSettings:
    """`algorithm.gdpo`."""

    whiten: Literal["sequence", "token", "none"] | None = None
    """Unit of the final whitening: `sequence` (the paper), `token` (verl), or `none`. null: `sequence`, and an error if
    `algorithm.gdpo_reward_keys` is set."""
    scale: Literal["std", "mad", "none"] = "std"
    """Divisor of each reward in its group: `std` (standard deviation), `mad` (mean absolute deviation), or `none`."""
    epsilon: float | None = bounded(None, above=0.0)
    """Constant added to the divisors, with `whiten=token` in the group only. null: 0 in the group (1e-6 with
    `whiten=token`) and 1e-6 in the whitening."""


def rule(settings: Settings, _select: Callable[[str], Any]) -> Iterator[Finding]:
    """Report a configuration written for verl's own gdpo if its advantages would change silently."""
    names = [f"algorithm.{name}" for name in VERL_NAMES.values() if name in settings.given]
    if names and settings.of("gdpo", GdpoSettings).whiten is None:
        belong = "is a setting" if len(names) == 1 else "are settings"
        yield Finding(
            "error",
            f"{' and '.join(names)} {belong} of verl's gdpo, which whitens over tokens. The gdpo of verl_ext whitens "
            "over sequences by default.",
            "Set ++algorithm.gdpo.whiten=token to match verl, or ++algorithm.gdpo.whiten=sequence to match the paper.",
        )
    if names and not settings.norm_by_std:
        yield Finding(
            "warning",
            "algorithm.norm_adv_by_std_in_grpo=False removes the division by the standard deviation from the gdpo of "
            "verl_ext. verl's own gdpo ignores this setting.",
            "Remove algorithm.norm_adv_by_std_in_grpo=False to match verl.",
        )


def steps_of(section: GdpoSettings, settings: Settings) -> Sequence[Step]:
    """Return the steps: normalize each reward in its group, take the weighted sum, and whiten.

    >>> from verl_ext.core.batch import Batch
    >>> from verl_ext.core.chain import Chain
    >>> correctness, format = [3, -3, -3, -3], [1, 1, 0, 0]
    >>> batch = Batch.of(list(zip(correctness, format)), ["a"] * 4, keys=("correctness", "format"))
    >>> chain = Chain(tuple(steps_of(GdpoSettings(), Settings())))
    >>> chain(batch).advantages.round(3)
    array([ 1.332,  0.206, -0.769, -0.769])
    """
    _check_epsilon(section, settings)
    group_epsilon = section.epsilon or (1e-6 if section.whiten == "token" else 0.0)
    steps: list[Step] = [Center()]
    if section.scale == "mad":
        steps.append(ScaleByMad(group_epsilon))
    elif section.scale == "std" and settings.norm_by_std:
        steps.append(ScaleByStd(group_epsilon))
    steps.append(WeightedSum())
    if section.whiten in (None, "sequence"):
        steps.append(Whiten("sequence", section.epsilon or Whiten.epsilon))
    elif section.whiten == "token":
        steps.append(Whiten("token"))
    return steps


def _check_epsilon(section: GdpoSettings, settings: Settings) -> None:
    """Raise for an `epsilon` that no divisor uses: neither rewards nor sequences are divided by a deviation."""
    divides_rewards = section.scale == "mad" or (section.scale == "std" and settings.norm_by_std)
    whitens_sequences = section.whiten in (None, "sequence")
    if section.epsilon is None or divides_rewards or whitens_sequences:
        return
    if section.scale == "none":
        reason = "algorithm.gdpo.scale=none"
        remedy = "algorithm.gdpo.scale=std or algorithm.gdpo.scale=mad"
    else:
        reason = "algorithm.norm_adv_by_std_in_grpo=False"
        remedy = "algorithm.norm_adv_by_std_in_grpo=True or algorithm.gdpo.scale=mad"
    raise ConfigurationError(
        f"algorithm.gdpo.epsilon={section.epsilon} has no effect with {reason} and "
        f"algorithm.gdpo.whiten={section.whiten}. Remove epsilon, or set {remedy} or algorithm.gdpo.whiten=sequence."
    )


GDPO = Method(
    paper="GDPO, arXiv 2601.05242, section 3, eq. 4-8",
    summary="normalizes each reward in its group separately, sums them, and whitens the sum",
    build=steps_of,
    settings=GdpoSettings,
    rule=rule,
    doc=__doc__,
)
