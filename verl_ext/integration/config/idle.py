"""Warnings about settings and groups of responses that have no effect with the other settings."""

from __future__ import annotations

from collections.abc import Iterator

from verl_ext.core.history import WeighByHistory
from verl_ext.core.steps import Centre, ScaleByMad, ScaleByStd, WeighAndSum, Whiten
from verl_ext.estimators import ESTIMATORS
from verl_ext.estimators.dgpo import DgpoSettings
from verl_ext.estimators.gdpo import GdpoSettings, whitening_of
from verl_ext.integration.config.run_config import RunConfig


def idle_settings(run: RunConfig) -> Iterator[str]:
    """Settings of the chosen estimator that have no effect because of another one."""
    used, dgpo, gdpo = run.used, run.settings.of(DgpoSettings), run.settings.of(GdpoSettings)
    if "dgpo" in used and not dgpo.dqw and dgpo.dqw_temp != type(dgpo).dqw_temp:
        yield f"algorithm.dgpo.dqw_temp={dgpo.dqw_temp:g} has no effect with algorithm.dgpo.dqw=False"
    over, undivided = whitening_of(run.settings), gdpo.scale == "none" or not run.settings.norm_by_std
    if "gdpo" in used and gdpo.epsilon != type(gdpo).epsilon and undivided and over != "sequence":
        why = "algorithm.gdpo.scale=none" if gdpo.scale == "none" else "algorithm.norm_adv_by_std_in_grpo=False"
        yield f"algorithm.gdpo.epsilon={gdpo.epsilon:g} has no effect with {why} and algorithm.gdpo.whiten={over}"


def idle_accuracy(run: RunConfig) -> Iterator[str]:
    """An accuracy that no step uses."""
    ours = run.name in ESTIMATORS
    if ours and (run.chain is None or run.chain.needs_accuracy):
        return
    who = "no step of this estimator uses it" if ours else f"verl's {run.name} does not use it"
    for name in ("accuracy_key", "accuracy_threshold"):
        value = getattr(run.settings.rewards, name)
        if value is not None:
            yield (
                f"algorithm.rewards.{name}={value} has no effect: {who} (weigh_by_difficulty and "
                "weigh_by_history do); remove it"
            )


def idle_history(run: RunConfig) -> Iterator[str]:
    """Settings of the history that have no effect because of another one, in hadw or in a user's list."""
    steps = run.chain.steps if run.chain is not None else ()
    for at, step in enumerate(steps):
        if not isinstance(step, WeighByHistory):
            continue
        where = "algorithm.hadw." if run.name == "hadw" else "weigh_by_history: "
        if step.lambda_scale != WeighByHistory.lambda_scale and any(isinstance(one, Whiten) for one in steps[at:]):
            yield f"{where}lambda_scale={step.lambda_scale:g} has no effect before whiten, which divides by the std"
        if step.anchor != "soft":
            continue
        if step.eta_min == 1 and step.eta != WeighByHistory.eta:
            yield f"{where}eta={step.eta:g} has no effect with {where}eta_min=1: the step eta_t is at most 1"
        if step.history_window != WeighByHistory.history_window and (step.eta == 0 or step.eta_min == 1):
            other = "eta=0" if step.eta == 0 else "eta_min=1"
            yield f"{where}history_window={step.history_window} has no effect with {where}{other}"
        if step.eta == step.eta_min == 0:
            yield (
                f"{where}eta=0 and {where}eta_min=0: the anchor stays at the first batch's accuracy; set {where}"
                "eta_min=0.05, or use anchor=fixed"
            )


def idle_weights(run: RunConfig) -> Iterator[str]:
    """A weight of the only reward that a later division takes out, and weights so small that nothing is left."""
    steps, weights = run.chain.steps if run.chain is not None else (), run.settings.rewards.weights or ()
    names = [step.name for step in steps]
    summed = steps[names.index(WeighAndSum.name) :] if WeighAndSum.name in names else ()
    divided = any(isinstance(step, ScaleByStd | ScaleByMad | Whiten) for step in summed)
    if divided and not run.settings.kl_in_reward and len(weights) == 1 and weights[0] >= 1e-3 and weights[0] != 1:
        yield (
            f"'algorithm.rewards.weights=[{weights[0]:g}]' has no effect: {run.name} divides by the spread of its only "
            "reward; remove it"
        )
    largest = max(map(abs, weights), default=0.0)
    if steps and 0 < largest < 1e-3:
        yield (
            f"algorithm.rewards.weights={list(weights)} are small: a group whose total varies by at most 1e-6 counts "
            "as constant, and its advantage is 0; if your rewards are not large, divide all weights by "
            f"{largest:g}, which keeps their ratios"
        )


def idle_groups(run: RunConfig) -> Iterator[str]:
    """Groups of one response, in which centring leaves 0; a KL term may come after it."""
    centred = run.chain is not None and any(isinstance(step, Centre) for step in run.chain.steps)
    where = "actor_rollout_ref.rollout.n"
    if centred and not run.settings.kl_in_reward and run.select(where) == 1:
        yield (
            f"{where}=1: a prompt's only response has nothing to be compared with, so every advantage is 0 and the "
            f"model learns nothing; set {where}=8, for example"
        )
