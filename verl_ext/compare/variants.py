"""What is compared: estimators with their settings, and the advantages that they give."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from verl_ext.compare.rollouts import TOKENS, Rollouts
from verl_ext.core.batch import Batch, unit_accuracy
from verl_ext.core.chain import Chain, State
from verl_ext.core.groups import Array, Groups
from verl_ext.errors import ConfigurationError, printable, unknown
from verl_ext.estimators import ESTIMATORS, build
from verl_ext.estimators.compose import try_out
from verl_ext.estimators.grpo import grpo
from verl_ext.registry import declaration
from verl_ext.settings import Settings, sections
from verl_ext.show import configured

BASELINE = "grpo"
"""grpo on the score, as verl computes it: all others are compared to it."""
ON_SUM = "grpo (sum)"
"""grpo on the weighted sum of the named rewards."""
ACCURACY = "acc"
"""The reward that is the accuracy in a run, if the scorer returns it."""
DUMPED_ACCURACY = "accuracy"
"""The column of a dump with the accuracy that the run used."""
_SETTING = re.compile(r"\s+(?=[+~]*[\w.@/]+=)")
"""Where a setting begins. Spaces inside `[...]` and `{...}` are followed by no `KEY=`."""
_WIDEST = 26


@dataclass(frozen=True)
class Variant:
    """An estimator with its settings."""

    label: str
    """A short name for tables."""
    text: str
    """As the user wrote it."""
    settings: Settings
    chain: Chain

    @property
    def rewards(self) -> tuple[str, ...]:
        """The rewards in its settings; none if it works on the score."""
        return self.settings.rewards.keys or ()


def parse(arguments: Sequence[str]) -> tuple[list[Variant], Settings]:
    """The variants, grpo first, and the settings that hold for all of them."""
    shared: list[str] = []
    named: list[tuple[str, list[str], str]] = []
    for argument in arguments:
        first, *settings = _SETTING.split(argument.strip())
        if "=" in first.partition("[")[0]:
            shared += [first, *settings]
        elif first.startswith("["):
            named.append(("compose", [f"algorithm.compose.steps={first}", *settings], argument))
        else:
            named.append((first, settings, argument))
    common = _settings(shared)
    plain = Settings(norm_by_std=common.norm_by_std)
    variants = [Variant(BASELINE, BASELINE, plain, grpo(plain))]
    for at, (name, settings, text) in enumerate(named, start=1):
        if name not in (*ESTIMATORS, BASELINE):
            valid = unknown("estimator", name, (*ESTIMATORS, BASELINE))
            raise ConfigurationError(f"{valid}, or a list of steps in [...]")
        found = _settings([*shared, *settings])
        make = grpo if name == BASELINE else partial(build, name)
        chain = make(found)
        if (wrong := try_out(make, found)) is not None:
            raise ConfigurationError(f"{text!r}: {wrong}")
        _check_used(settings, [(name, found)], text)
        shown = ON_SUM if name == BASELINE and found.rewards.keys else name
        variants.append(Variant(_label(shown, settings, at), text, found, chain))
    _check_used(shared, [(name, _settings([*shared, *more])) for name, more, _ in named], None)
    labels = [variant.label for variant in variants]
    for variant in variants[1:]:
        if labels.count(variant.label) > 1:
            raise ConfigurationError(
                "grpo on the score is what all others are compared to: leave it out, or write "
                "'grpo algorithm.rewards.keys=[...]' for grpo on the sum of rewards"
                if variant.label == BASELINE
                else f"{variant.text!r} is given twice: leave one out"
            )
    return variants, common


def _settings(overrides: Sequence[str]) -> Settings:
    algorithm, mode = configured(None, overrides)
    settings = Settings.parse(algorithm, loss_agg_mode=mode)
    if settings.kl_in_reward:
        raise ConfigurationError("algorithm.use_kl_in_reward=True: rollouts hold no KL term, so remove it to compare")
    return settings


def _check_used(overrides: Sequence[str], variants: Sequence[tuple[str, Settings]], text: str | None) -> None:
    """Raise for a section that no variant reads."""
    read = {"rewards"}
    for name, settings in variants:
        section = declaration(name).section if name in ESTIMATORS else None
        base = getattr(settings.of(section), "base", None) if section is not None else None
        read |= {name, base} if base else {name}
    for override in overrides:
        path = override.lstrip("+").partition("=")[0].split(".")
        if path[0] == "algorithm" and path[1] in sections() and path[1] not in read:
            who = f"in {text!r}" if text is not None else "for the estimators that are compared"
            raise ConfigurationError(f"{override} has no effect {who}: remove it")


def _label(name: str, settings: Sequence[str], at: int) -> str:
    parts = [f"{key.split('.')[-1]}={value}" for key, _, value in (text.partition("=") for text in settings)]
    label = " ".join([name, *parts])
    return label if len(label) <= _WIDEST else f"{name} ({at})"


def wanted(settings: Sequence[Settings]) -> set[str]:
    """The rewards to read."""
    every = [each.rewards for each in settings]
    return {ACCURACY}.union(*(own.keys or () for own in every), (own.accuracy_key for own in every if own.accuracy_key))


def outcomes(variants: Sequence[Variant], rollouts: Rollouts) -> list[Outcome]:
    """Compute the advantages, batch by batch in order: an estimator may carry state from one to the next."""
    found = [Outcome(variant, rollouts) for variant in variants]
    for rows in rollouts.batches:
        groups = Groups.of(rollouts.groups.ids[rows].tolist())
        for outcome in found:
            outcome.go_on(rows, groups)
    return found


class Outcome:
    """The advantages of a variant, computed batch by batch, and what must be said about them."""

    def __init__(self, variant: Variant, rollouts: Rollouts) -> None:
        own = variant.settings.rewards
        self.variant, self.rollouts = variant, rollouts
        self.keys = own.keys or (rollouts.total,)
        if own.keys is None and variant.chain.per_reward:
            raise ConfigurationError(
                f"{variant.text!r} normalises each reward separately and needs their names: add "
                f"'algorithm.rewards.keys=[...]'; {rollouts.path} has {', '.join(map(repr, rollouts.names))}"
            )
        self.rewards = [rollouts.column(key, "algorithm.rewards.keys") for key in self.keys]
        self.accuracy = accuracy(variant.settings, rollouts)[1] if variant.chain.needs_accuracy else None
        self.state: State = variant.chain.init()
        self.advantages: Array = np.zeros(len(rollouts.step))
        self.used_lengths = False
        self.notes: dict[str, str] = {}

    def go_on(self, rows: slice, groups: Groups) -> None:
        """Compute one batch."""
        batch = Batch.of(
            np.stack([column[rows] for column in self.rewards], axis=1),
            _Labels(self.rollouts, rows),
            groups=groups,
            keys=self.keys,
            lengths=lambda: self._lengths(rows),
            accuracy=None if self.accuracy is None else self.accuracy[rows],
        )
        result = self.variant.chain(batch, self.state)
        self.state = result.state
        self.advantages[rows] = result.advantages
        self.notes |= {key: f"{self.variant.label}: {text}" for key, text in result.warnings.items()}

    def _lengths(self, rows: slice) -> Array:
        self.used_lengths = True
        lengths = self.rollouts.lengths
        return np.ones(rows.stop - rows.start) if lengths is None else lengths[rows]


class _Labels(Sequence[Any]):
    """The uids of the rows of a batch, looked up when a message names one."""

    def __init__(self, rollouts: Rollouts, rows: slice) -> None:
        self._rollouts, self._rows = rollouts, rows

    def __len__(self) -> int:
        return int(self._rows.stop - self._rows.start)

    def __getitem__(self, row: Any) -> Any:
        return self._rollouts.prompts[self._rollouts.groups.ids[self._rows.start + int(row)]]


def accuracy(settings: Settings, rollouts: Rollouts) -> tuple[str, Array]:
    """The reward that is the accuracy, and its values in [0, 1].

    As in a run it is `acc` by default, else the score; in a dump the accuracy that was dumped comes before the score.
    """
    own = settings.rewards
    names = (ACCURACY,) if rollouts.source is not None else (ACCURACY, DUMPED_ACCURACY)
    key = own.accuracy_key or next((name for name in names if name in rollouts.names), rollouts.total)
    values = rollouts.column(key, "algorithm.rewards.accuracy_key")
    labels = _Labels(rollouts, slice(0, len(values)))
    return key, unit_accuracy(values, labels, key=key, threshold=own.accuracy_threshold, where="algorithm.rewards")


def legend(results: Sequence[Outcome], rollouts: Rollouts) -> Iterator[str]:
    """What shortened labels stand for, and which numbers differ from those of a run."""
    for result in results:
        variant = result.variant
        if re.search(r"\(\d+\)$", variant.label):
            yield f"{variant.label}: {printable(variant.text)}"
        if result.used_lengths and rollouts.unit != TOKENS:
            how = f"in {rollouts.unit}" if rollouts.lengths is not None else "unknown, so 1 each"
            yield (
                f"{variant.label} is approximate: it weighs trajectories by their length in tokens, and the lengths "
                f"are {how} (--length KEY names an entry with the number of tokens)"
            )
        yield from map(printable, result.notes.values())
