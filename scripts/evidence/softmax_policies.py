"""Softmax policies over a few responses per prompt, trained with exact gradients, for `simulate_policies.py`.

simulated_policies.md defines the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from verl_ext import Batch, Chain, Settings, build
from verl_ext.core.groups import Groups

PROMPTS, BATCH, STEPS, SKILLS = 60, 20, 100, 16
CALIBRATION, SIZES = range(1000, 1004), range(1000, 1032)
"""Seeds for the choice of grpo's learning rate and for the step sizes. The comparison does not use these seeds."""
SEQUENCE, TOKEN, CONSTANT = "seq-mean-token-mean", "token-mean", "seq-mean-token-sum-norm"
Transform = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Arm:
    """An estimator with its settings and its loss aggregation."""

    label: str
    estimator: str = "grpo"
    settings: Mapping[str, Any] = field(default_factory=dict)
    loss: str = TOKEN

    def chain(self) -> Chain:
        settings = Settings.parse({self.estimator: dict(self.settings)}, loss_agg_mode=self.loss)
        return build(self.estimator, settings)


@dataclass(frozen=True)
class Study:
    """A comparison. The first arm is the baseline, and the first measure is the primary measure."""

    arms: tuple[Arm, ...]
    measures: tuple[str, ...]
    answers: tuple[tuple[int, int], ...]
    """For each response, whether it is correct and whether its format is correct."""
    rollouts: int = 8
    lengths: tuple[int, ...] = (1,)
    """Each response exists with each of these lengths."""
    keys: tuple[str, ...] = ("correctness",)
    scales: tuple[float, ...] = (1.0,)


@dataclass(frozen=True)
class Condition:
    """How the policies are trained."""

    adam: bool = False
    mixed: bool = False
    """Whether Adam uses an orthogonal mixture of the parameters, to which every prompt contributes."""
    same_step: bool = False
    """Whether each arm's learning rate gives its first steps the baseline's size. Otherwise all rates are equal."""


class World:
    """The prompts, their initial policies and all random numbers of one seed, which are the same for every arm."""

    def __init__(self, study: Study, seed: int) -> None:
        draw = np.random.default_rng(seed)
        self.study, count = study, len(study.lengths)
        flags = np.repeat(np.array(study.answers), count, axis=0)
        self.right, self.formatted = flags.T.astype(float)
        self.length = np.tile(np.array(study.lengths, dtype=float), len(study.answers))
        self.rewards = flags[:, : len(study.keys)] * np.array(study.scales)
        target = np.linspace(0.02, 0.9, PROMPTS)[:, None]  # hardest first
        cell = np.where(self.right, target, 1 - target)
        if len(study.keys) > 1:
            cell = cell * np.where(self.formatted, 0.3, 0.7)
        noise = np.exp(draw.normal(size=(PROMPTS, len(study.answers)))).repeat(count, axis=1)
        same = (flags[:, None] == flags[None]).all(axis=2).astype(float)
        self.initial = np.log(cell * noise / (noise @ same))
        size = len(flags)
        parts = [draw.normal(scale=SKILLS**-0.5, size=(PROMPTS, size, SKILLS)), *self._shared(flags, count)]
        parts = [np.broadcast_to(part, (PROMPTS, size, part.shape[-1])) for part in parts]
        # If gradients agree, all other prompts together move a prompt as much as its own parameters do.
        self.features = PROMPTS**-0.5 * np.concatenate(parts, axis=2)
        epochs = STEPS * BATCH // PROMPTS + 1
        order = np.concatenate([draw.permutation(PROMPTS) for _ in range(epochs)])
        self.batches = order[: STEPS * BATCH].reshape(STEPS, BATCH)
        self.uniform = draw.random((STEPS, BATCH, study.rollouts))

    def _shared(self, flags: np.ndarray, count: int) -> list[np.ndarray]:
        """Return directions that all prompts share: correctness, format, and each length by correctness."""
        parts = [flags[:, : len(self.study.keys)].astype(float)]
        if count > 1:
            parts.append(np.kron(np.eye(2)[flags[::count, 0]], np.eye(count)))
        return parts

    @cached_property
    def groups(self) -> Groups:
        return Groups.of(np.arange(BATCH).repeat(self.study.rollouts))

    def measure(self, policy: np.ndarray) -> dict[str, float]:
        """Return all measures, computed exactly from the probabilities `[prompts, outcomes]`."""
        accuracy, third = policy @ self.right, PROMPTS // 3
        wrong = 1 - self.right
        return {
            "hardest third": accuracy[:third].mean(),
            "easiest third": accuracy[-third:].mean(),
            "all prompts": accuracy.mean(),
            "format": (policy @ self.formatted).mean(),
            "length of wrong answers": (policy @ (wrong * self.length) / (policy @ wrong)).mean(),
        }


def softmax(logits: np.ndarray) -> np.ndarray:
    odds = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return odds / odds.sum(axis=-1, keepdims=True)


def loss_weights(loss: str, length: np.ndarray, longest: float) -> np.ndarray:
    """Return the factor of each response's summed token losses."""
    if loss == TOKEN:
        return np.full(len(length), 1 / length.sum())
    divisor = length if loss == SEQUENCE else np.full(len(length), longest)
    return 1 / (len(length) * divisor)


class Policy:
    """`softmax(initial + own + features @ shared)`, with parameters of each prompt and shared parameters."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.own = np.zeros_like(world.initial)
        self.shared = np.zeros(world.features.shape[-1])
        self.size = self.own.size + self.shared.size

    def probabilities(self, prompts: Any = slice(None)) -> np.ndarray:
        world = self.world
        return softmax(world.initial[prompts] + self.own[prompts] + world.features[prompts] @ self.shared)

    def gradient(self, prompts: np.ndarray, drawn: np.ndarray, factors: np.ndarray) -> np.ndarray:
        """Return `sum factors * grad log pi(drawn)` over the responses `drawn[prompt, rollout]`, as a flat array."""
        policy = self.probabilities(prompts)
        direction = -factors.sum(axis=1, keepdims=True) * policy
        np.add.at(direction, (np.arange(len(prompts))[:, None], drawn), factors)
        own = np.zeros_like(self.own)
        own[prompts] = direction
        return np.concatenate([own.ravel(), np.einsum("pj,pjd->d", direction, self.world.features[prompts])])

    def move(self, step: np.ndarray) -> None:
        own, shared = np.split(step, [-len(self.shared)])
        self.own += own.reshape(PROMPTS, -1)
        self.shared += shared


def mixture(size: int, seed: int) -> tuple[Transform, Transform]:
    """Return an orthogonal transform and its inverse: random signs, then the self-inverse Hartley transform."""
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], size)

    def hartley(x: np.ndarray) -> np.ndarray:
        waves = np.fft.fft(x, norm="ortho")
        return waves.real - waves.imag

    return lambda x: hartley(signs * x), lambda x: signs * hartley(x)


class Learner:
    """Samples responses, computes their advantages, and returns the gradient of the arm's loss."""

    def __init__(self, world: World, arm: Arm) -> None:
        self.world, self.arm, self.policy = world, arm, Policy(world)
        self.chain, self.state = arm.chain(), None

    def gradient(self, step: int) -> np.ndarray:
        """Return the gradient of one step's batch, with responses sampled from the policy."""
        prompts = self.world.batches[step]
        edges = self.policy.probabilities(prompts).cumsum(axis=1)
        drawn = (edges[:, None, :-1] < self.world.uniform[step][:, :, None]).sum(axis=2)
        return self.gradient_of(prompts, drawn)

    def gradient_of(self, prompts: np.ndarray, drawn: np.ndarray) -> np.ndarray:
        """Return the gradient for given responses, `drawn[prompt, rollout]`."""
        world, study, rows = self.world, self.world.study, drawn.ravel()
        batch = Batch.of(
            world.rewards[rows],
            world.groups.ids,
            prompts=world.groups,
            keys=study.keys,
            lengths=world.length[rows],
            accuracy=world.right[rows],
        )
        result = self.chain(batch, self.state)
        self.state = result.state
        factors = result.advantages * loss_weights(self.arm.loss, batch.lengths, world.length.max())
        return self.policy.gradient(prompts, drawn, factors.reshape(drawn.shape))


def train(world: World, arm: Arm, rate: float, condition: Condition) -> dict[str, float]:
    """Train one run, and return each measure after the last step."""
    learner = Learner(world, arm)
    first = second = 0.0
    mix, back = mixture(learner.policy.size, seed=0) if condition.mixed else (np.asarray, np.asarray)
    for step in range(STEPS):
        gradient = learner.gradient(step)
        if condition.adam:
            gradient = mix(gradient)
            first = 0.9 * first + 0.1 * gradient
            second = 0.999 * second + 0.001 * gradient**2
            gradient = back(first / (1 - 0.9 ** (step + 1)) / (np.sqrt(second / (1 - 0.999 ** (step + 1))) + 1e-8))
        learner.policy.move(rate * gradient)
    return world.measure(learner.policy.probabilities())


def step_size(worlds: list[World], arm: Arm) -> float:
    """Return the mean |gradient| over 20 batches of the initial policy. Only the estimator's state is updated."""
    sizes = []
    for world in worlds:
        learner = Learner(world, arm)
        sizes += [np.abs(learner.gradient(step)).mean() for step in range(20)]
    return float(np.mean(sizes))


def learnt(worlds: list[World], arm: Arm, rate: float, condition: Condition) -> float:
    """Return the fraction of the gap between the initial accuracy and 1 that a run closes, from means over worlds."""
    first = np.mean([world.measure(Policy(world).probabilities())["all prompts"] for world in worlds])
    last = np.mean([train(world, arm, rate, condition)["all prompts"] for world in worlds])
    return float((last - first) / (1 - first))


def baseline_rate(worlds: list[World], arm: Arm, condition: Condition) -> float:
    """Return the learning rate at which the baseline closes half of the gap."""

    def short(rate: float) -> bool:
        return learnt(worlds, arm, rate, condition) < 0.5

    high = 2.0**-10
    while short(high):
        high *= 4
    low = high / 4
    for _ in range(6):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if short(middle) else (low, middle)
    return high


def rates(study: Study, condition: Condition) -> dict[str, float]:
    """Return the learning rate of every arm, rounded to four digits."""
    worlds = [World(study, seed) for seed in SIZES]
    rate, found = baseline_rate(worlds[: len(CALIBRATION)], study.arms[0], condition), {}
    sizes = [step_size(worlds, arm) if condition.same_step else 1.0 for arm in study.arms]
    for arm, size in zip(study.arms, sizes, strict=True):
        found[arm.label] = float(f"{rate * sizes[0] / size:.4g}")
    return found
