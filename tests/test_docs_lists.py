"""The lists of steps in docs/pages/methods, compared with plain loops and, where verl has the method, with its code."""

import dataclasses
import math
import re
import statistics
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from omegaconf import OmegaConf

from tests import reference
from tests.batches import Rollout, rollouts
from tests.calls import object_array, tensors
from tests.configs import compose as configuration
from verl_ext import Settings, build
from verl_ext.checks.dry_run import NO_EFFECT, dry_run
from verl_ext.checks.judge import judge
from verl_ext.methods.simple import SIMPLE_METHODS
from verl_ext.run import Run

PAGES = Path(__file__).parents[1] / "docs/pages/methods"
MORE = (PAGES / "more.md").read_text(encoding="utf-8")
SECTIONS = {
    **dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", MORE, re.MULTILINE | re.DOTALL)),
    "GD2PO": (PAGES / "gd2po.md").read_text(encoding="utf-8"),
    "MaxRL": (PAGES / "maxrl.md").read_text(encoding="utf-8"),
}
"""The texts that have a list of steps, by the name of the method: the sections of a page, and two whole pages."""


def algorithm_of(section: str) -> dict[str, Any]:
    """Return the settings `algorithm` of the only YAML block of a section."""
    (block,) = re.findall(r"^```yaml\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    return yaml.safe_load(block)["algorithm"]


LISTS = {title: algorithm_of(section) for title, section in SECTIONS.items()}

# The methods in plain loops. `reference` has the statistics; NaN means that a reward is not scored.


def rloo(rewards: Sequence[float], uids: Sequence[Hashable]) -> list[float]:
    """Return each reward minus the mean of the other rewards of its group."""
    advantages = [math.nan if math.isnan(reward) else 0.0 for reward in rewards]
    for rows in reference.groups(uids).values():
        if not reference.has_variance([rewards[row] for row in rows]):
            continue
        for row in rows:
            others = [rewards[other] for other in rows if other != row]
            if not math.isnan(rewards[row]):
                advantages[row] = rewards[row] - statistics.fmean(reference.scored(others))
    return advantages


def divided_by_batch_std(values: Sequence[float]) -> list[float]:
    """Return the values divided by the standard deviation of the batch."""
    scored = reference.scored(values)
    if not reference.has_variance(scored):
        return list(values)
    std = statistics.stdev(scored)
    return [value / (std + 1e-6) for value in values]


def focal(advantages: Sequence[float], uids: Sequence[Hashable], accuracy: Sequence[float]) -> list[float]:
    """Return the advantages times one minus the accuracy of their group."""
    weighted = list(advantages)
    for rows in reference.groups(uids).values():
        scored = reference.scored([accuracy[row] for row in rows])
        weight = 1 - statistics.fmean(scored) if scored else 1.0
        for row in rows:
            weighted[row] *= weight
    return weighted


def weighted_grpo(rollout: Rollout) -> list[float]:
    """Return GRPO's advantages of the weighted sum, with the weights of the page."""
    total = reference.weighted_total(list(rollout.columns.values()), [1.0, 0.5])
    return reference.grpo(total, rollout.uids)


def gd2po(rollout: Rollout) -> list[float]:
    return reference.gd2po(rollout.columns, rollout.uids, rollout.lengths, weights=[1.0, 1.0], conflict="snr", tau=0.8)


SAW_MIN_VALUES = {"correctness": -3.0, "length": 0.0}


def coefficient_of_variation(values: Sequence[float]) -> float:
    """Return the standard deviation over the absolute value of the mean."""
    if not reference.has_variance(values):
        return 0.0
    return statistics.stdev(values) / (abs(statistics.fmean(values)) + 1e-8)


def saw(rollout: Rollout) -> list[float]:
    """Return gdpo's advantages. Each reward is weighted by its coefficient of variation above its minimum."""
    variations = []
    for key, column in rollout.columns.items():
        above_min = [value - SAW_MIN_VALUES[key] for value in reference.scored(column)]
        variations.append(coefficient_of_variation(above_min))
    weights = [2 * variation / (sum(variations) + 1e-8) for variation in variations]
    return reference.gdpo(rollout.columns, rollout.uids, rollout.lengths, weights=weights, whiten="token")


def groups_with_variance(values: Sequence[float], uids: Sequence[Hashable]) -> int:
    """Return the number of groups in which the values differ."""
    count = 0
    for rows in reference.groups(uids).values():
        if reference.has_variance([values[row] for row in rows]):
            count += 1
    return count


def dara(rollout: Rollout) -> list[float]:
    """Return gdpo's advantages. A reward that varies in few groups has a larger weight, at most 5."""
    counts = [groups_with_variance(column, rollout.uids) for column in rollout.columns.values()]
    largest = max(counts)
    weights = []
    for count in counts:
        density_weight = math.sqrt(largest / count) if count else 1.0
        weights.append(min(5.0, density_weight))
    return reference.gdpo(rollout.columns, rollout.uids, rollout.lengths, weights=weights, whiten="token")


def divided_sum(rollout: Rollout, divisor_of: Callable[[list[list[float]]], float]) -> list[float]:
    """Return the sum of the centered rewards, divided by a divisor that is computed from the columns of a group.

    The result is 0 in groups whose divisor is at most 1e-8.
    """
    columns = [reference.centered(column, rollout.uids) for column in rollout.columns.values()]
    total = reference.weighted_total(columns, [1.0] * len(columns))
    for rows in reference.groups(rollout.uids).values():
        columns_of_group = [[column[row] for row in rows] for column in columns]
        divisor = divisor_of(columns_of_group)
        factor = 1 / divisor if divisor > 1e-8 else 0.0
        for row in rows:
            total[row] *= factor
    reference.cancel(total, rollout.uids)
    return total


def sum_of_stds(columns: list[list[float]]) -> float:
    """Return the sum of the columns' standard deviations."""
    scored_columns = [reference.scored(column) for column in columns]
    return math.fsum(statistics.pstdev(scored) for scored in scored_columns if scored)


def norm(column: list[float]) -> float:
    return math.sqrt(math.fsum(value * value for value in reference.scored(column)))


def correlation(one: list[float], other: list[float]) -> float:
    """Return the correlation of two centered columns. A pair that is not scored adds nothing."""
    products = [x * y for x, y in zip(one, other, strict=True)]
    covariance = math.fsum(reference.scored(products))
    divisor = norm(one) * norm(other)
    return covariance / divisor if divisor else 0.0


def root_of_correlations(columns: list[list[float]]) -> float:
    """Return the square root of the sum of all correlations, those of a column with itself included."""
    total = math.fsum(correlation(one, other) for one in columns for other in columns)
    return math.sqrt(max(0.0, total) + 1e-6)


def soft_min(values: Sequence[float]) -> float:
    """Return `-log(mean(exp(-value)))`."""
    scored = reference.scored(values)
    if not scored:
        return math.nan
    return -math.log(statistics.fmean(math.exp(-value) for value in scored))


def rvpo(rollout: Rollout) -> list[float]:
    """Return the whitened soft minimum of the scaled rewards."""
    scaled_columns = [reference.over_std(column, rollout.uids, 1e-6) for column in rollout.columns.values()]
    soft_minima = [soft_min(row) for row in zip(*scaled_columns, strict=True)]
    return reference.whitened(soft_minima, rollout.lengths, "token", 1e-6)


def grpo_with_length_penalty(rollout: Rollout, rewards: list[float]) -> list[float]:
    """Return GRPO's advantages. The longest correct response of a group loses 0.5, and the shortest loses nothing."""
    penalized = list(rewards)
    for rows in reference.groups(rollout.uids).values():
        correct = [row for row in rows if rollout.accuracy[row] > 0.5 and not math.isnan(rewards[row])]
        lengths = [rollout.lengths[row] for row in correct]
        if len(set(lengths)) < 2:
            continue
        for row in correct:
            excess = rollout.lengths[row] - min(lengths)
            penalized[row] -= 0.5 * excess / (max(lengths) - min(lengths))
    return reference.grpo(penalized, rollout.uids)


PLAIN_LOOPS = {
    "DARA": lambda rollout, _: dara(rollout),
    "DVAO": lambda rollout, _: divided_sum(rollout, sum_of_stds),
    "CorrGRPO": lambda rollout, _: divided_sum(rollout, root_of_correlations),
    "RVPO": lambda rollout, _: rvpo(rollout),
    "SAW": lambda rollout, _: saw(rollout),
    "Weighted GRPO": lambda rollout, _: weighted_grpo(rollout),
    "Lite PPO": lambda rollout, rewards: reference.centered(divided_by_batch_std(rewards), rollout.uids),
    "F-GRPO": lambda rollout, rewards: focal(reference.grpo(rewards, rollout.uids), rollout.uids, rollout.accuracy),
    "RLOO": lambda rollout, rewards: rloo(rewards, rollout.uids),
    "REINFORCE++-baseline": lambda rollout, rewards: reference.whitened(
        reference.centered(rewards, rollout.uids), rollout.lengths, "token", 1e-6
    ),
    "Length penalty among correct responses": grpo_with_length_penalty,
    "GD2PO": lambda rollout, _: gd2po(rollout),
    "MaxRL": lambda rollout, rewards: reference.maxrl(rewards, rollout.uids),
}
"""For each list, its advantages from a rollout and the rewards of the key that a list for a single reward reads."""


def advantages_of_list(title: str, rollout: Rollout) -> np.ndarray:
    """Return what the list computes. A list without reward keys sees the first reward only."""
    algorithm = LISTS[title]
    batch = rollout.batch(None if "rewards" in algorithm else 1)
    chain = build("compose", Settings.parse(algorithm))
    return chain(batch).advantages


def test_each_list_has_a_paper_a_formula_and_plain_loops():
    assert list(LISTS) == list(PLAIN_LOOPS)
    for title, section in SECTIONS.items():
        assert "https://arxiv.org/abs/" in section, title
        assert "```math\n" in section, title


@pytest.mark.parametrize("title", LISTS)
@given(rollout=rollouts(keys=("correctness", "length"), lengths=1))
def test_list_computes_the_same_as_plain_loops(title, rollout):
    if title in ("MaxRL", "SAW"):  # for rewards that are not negative
        columns = {key: np.abs(column).tolist() for key, column in rollout.columns.items()}
        rollout = dataclasses.replace(rollout, columns=columns)
    values = PLAIN_LOOPS[title](rollout, rollout.columns["correctness"])
    expected = reference.learnt(values)
    np.testing.assert_allclose(advantages_of_list(title, rollout), expected, rtol=1e-8, atol=1e-8)


ESTIMATOR_OF_LIST = {method.paper.partition(",")[0]: name for name, method in SIMPLE_METHODS.items()}
ESTIMATOR_OF_LIST["Weighted GRPO"] = ESTIMATOR_OF_LIST.pop("GRPO")


def test_every_simple_method_has_a_list():
    assert {ESTIMATOR_OF_LIST[title] for title in LISTS.keys() & ESTIMATOR_OF_LIST.keys()} | {"grpo"} == {
        *SIMPLE_METHODS
    }


def field_names(settings_class: type | None) -> set[str]:
    if settings_class is None:
        return set()
    return {field.name for field in dataclasses.fields(settings_class)}


@pytest.mark.parametrize("title", sorted(LISTS.keys() & ESTIMATOR_OF_LIST.keys()))
def test_list_of_a_named_estimator_has_the_same_steps(title):
    algorithm = LISTS[title]
    name = ESTIMATOR_OF_LIST[title]
    names_of_settings = field_names(SIMPLE_METHODS[name].settings)
    section = {}
    for step in algorithm["compose"]["steps"]:
        if isinstance(step, dict):
            section |= {key: value for key, value in step.items() if key in names_of_settings}
    estimator = build(name, Settings.parse({**algorithm, name: section}))
    assert estimator == build("compose", Settings.parse(algorithm))


def in_one_line(steps: list[Any]) -> str:
    """Return a list of steps in the YAML of a command line. Interpolations stay as they are."""
    as_yaml = OmegaConf.to_yaml(OmegaConf.create(steps), resolve=False)
    return yaml.safe_dump(yaml.safe_load(as_yaml), default_flow_style=True, width=10_000).strip()


@pytest.mark.parametrize("title", LISTS)
def test_run_with_the_list_has_no_findings(title):
    algorithm = LISTS[title]
    overrides = [
        "algorithm.adv_estimator=compose",
        f"+algorithm.compose.steps={in_one_line(algorithm['compose']['steps'])}",
    ]
    for setting, entries in algorithm.get("rewards", {}).items():
        overrides.append(f"+algorithm.rewards.{setting}=[{','.join(map(str, entries))}]")
    assert judge(configuration(*overrides)).findings == ()


STEPS_BY_NAME = {
    **{title: algorithm["compose"]["steps"] for title, algorithm in LISTS.items()},
    "of the message without a list": ["weighted_sum", "center", "scale_by_std"],
    "with mad": ["weighted_sum", "center", "scale_by_mad"],
    "of README": ["center", "scale_by_mad", "weighted_sum", "whiten", "weight_by_difficulty"],
}


def with_min_values(step: str | dict[str, Any], count: int) -> str | dict[str, Any]:
    """Return the step with one minimum for each reward, if it has this setting."""
    if isinstance(step, dict) and "min_values" in step:
        return {**step, "min_values": [0.0] * count}
    return step


@pytest.mark.parametrize("title", STEPS_BY_NAME)
@pytest.mark.parametrize("count", range(1, 7))
def test_dry_run_finds_an_effect_of_every_step_and_of_the_weights(title, count):
    steps = [with_min_values(step, count) for step in STEPS_BY_NAME[title]]
    keys = [f"r{number}" for number in range(count)]
    weights = [1.0, 0.5, 2.0, 1.0, 0.7, 0.3][:count]
    settings = Settings.parse({"compose": {"steps": steps}, "rewards": {"keys": keys, "weights": weights}})
    run = Run("compose", settings, build("compose", settings), config=None)
    findings = list(dry_run(run))
    if title == "RVPO" and count > 1:
        assert findings == [NO_EFFECT]  # a soft minimum does not apply weights
    else:
        assert findings == []


EXACT_ROLLOUTS = rollouts(keys=("correctness", "length"), nan=False, lengths=1, smallest=2)
"""Rewards are multiples of 1/64, so that float32 is exact. Each prompt has at least two responses."""


@pytest.mark.parametrize(
    ("title", "name"), [("RLOO", "rloo"), ("REINFORCE++-baseline", "reinforce_plus_plus_baseline")]
)
@given(rollout=EXACT_ROLLOUTS)
def test_list_computes_the_same_as_the_estimator_of_verl(title, name, rollout):
    core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")
    rewards, mask = tensors(rollout.columns["correctness"], rollout.lengths, torch.float64)
    estimator_of_verl = core_algos.get_adv_estimator_fn(name)
    advantages, _ = estimator_of_verl(
        token_level_rewards=rewards, response_mask=mask, index=object_array(rollout.uids), config=None
    )
    of_first_token = advantages[:, 0].numpy()
    np.testing.assert_allclose(advantages_of_list(title, rollout), of_first_token, rtol=1e-6, atol=1e-6)
