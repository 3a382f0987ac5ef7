"""The page of lists to copy: each list as it stands there, against plain loops and, where it has one, verl's code."""

import dataclasses
import math
import re
import statistics
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path

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

PAGE = (Path(__file__).parents[1] / "docs/pages/lists.md").read_text()
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
LISTS = {
    title: yaml.safe_load(re.search(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[1])["algorithm"]
    for title, text in SECTIONS.items()
}


def left_one_out(values: Sequence[float], uids: Sequence[Hashable]) -> list[float]:
    """Each value minus the mean of the others of its group."""
    out = [math.nan if math.isnan(value) else 0.0 for value in values]
    for rows in reference.groups(uids).values():
        if reference.has_variance([values[row] for row in rows]):
            for row in rows:
                others = reference.scored([values[other] for other in rows if other != row])
                out[row] = values[row] - statistics.fmean(others) if not math.isnan(values[row]) else math.nan
    return out


def over_batch_std(values: Sequence[float]) -> list[float]:
    known = reference.scored(values)
    divisor = statistics.stdev(known) + 1e-6 if reference.has_variance(known) else 1.0
    return [value / divisor for value in values]


def focal(base: Sequence[float], uids: Sequence[Hashable], accuracy: Sequence[float]) -> list[float]:
    out = list(base)
    for rows in reference.groups(uids).values():
        known = reference.scored([accuracy[row] for row in rows])
        for row in rows:
            out[row] *= (1 - statistics.fmean(known)) if known else 1.0
    return out


def gd2po(rollout: Rollout) -> list[float]:
    return reference.gd2po(rollout.columns, rollout.uids, rollout.lengths, weights=[1.0, 1.0], conflict="snr", tau=0.8)


def saw(rollout: Rollout) -> list[float]:
    min_values, variation = {"correctness": -3.0, "length": 0.0}, []
    for key, column in rollout.columns.items():
        known = [value - min_values[key] for value in reference.scored(column)]
        varies = reference.has_variance(known)
        variation.append(statistics.stdev(known) / (abs(statistics.fmean(known)) + 1e-8) if varies else 0.0)
    weights = [2 * c / (sum(variation) + 1e-8) for c in variation]
    return reference.gdpo(rollout.columns, rollout.uids, rollout.lengths, weights=weights, whiten="token")


def dara(rollout: Rollout) -> list[float]:
    every, columns = reference.groups(rollout.uids).values(), rollout.columns.values()
    varying = [sum(reference.has_variance([column[row] for row in rows]) for rows in every) for column in columns]
    weights = [min(5.0, math.sqrt(max(varying) / count)) if count else 1.0 for count in varying]
    return reference.gdpo(rollout.columns, rollout.uids, rollout.lengths, weights=weights, whiten="token")


def over_common(rollout: Rollout, divisor_of: Callable[[list[list[float]]], float]) -> list[float]:
    """The centered sum, divided by what a group's centered columns give; 0 where that is at most 1e-8."""
    columns = [reference.centered(column, rollout.uids) for column in rollout.columns.values()]
    total = reference.weighted_total(columns, [1.0] * len(columns))
    for rows in reference.groups(rollout.uids).values():
        divisor = divisor_of([[column[row] for row in rows] for column in columns])
        for row in rows:
            total[row] *= 1 / divisor if divisor > 1e-8 else 0.0
    reference.cancel(total, rollout.uids)
    return total


def common_std(columns: list[list[float]]) -> float:
    return math.fsum(statistics.pstdev(known) for column in columns if (known := reference.scored(column)))


def correlation(one: list[float], other: list[float]) -> float:
    """Of centered values; a pair that is not scored adds nothing."""
    norms = math.sqrt(math.prod(math.fsum(x * x for x in reference.scored(column)) for column in (one, other)))
    return math.fsum(reference.scored([x * y for x, y in zip(one, other, strict=True)])) / norms if norms else 0.0


def root_of_correlations(columns: list[list[float]]) -> float:
    return math.sqrt(max(0.0, math.fsum(correlation(one, other) for one in columns for other in columns)) + 1e-6)


def rvpo(rollout: Rollout) -> list[float]:
    scaled = [reference.over_std(column, rollout.uids, 1e-6) for column in rollout.columns.values()]
    soft = []
    for row in zip(*scaled, strict=True):
        known = reference.scored(row)
        soft.append(-math.log(statistics.fmean(math.exp(-value) for value in known)) if known else math.nan)
    return reference.whitened(soft, rollout.lengths, "token", 1e-6)


def shorter(rollout: Rollout, rewards: list[float]) -> list[float]:
    out = list(rewards)
    for rows in reference.groups(rollout.uids).values():
        right = [row for row in rows if rollout.accuracy[row] > 0.5 and not math.isnan(rewards[row])]
        lengths = [rollout.lengths[row] for row in right]
        for row in right if len(set(lengths)) > 1 else ():
            out[row] -= 0.5 * (rollout.lengths[row] - min(lengths)) / (max(lengths) - min(lengths))
    return reference.grpo(out, rollout.uids)


# The rewards that a list takes, and the same in plain loops.
PLAIN = {
    "RLOO": lambda it, r: left_one_out(r, it.uids),
    "Lite PPO": lambda it, r: reference.centered(over_batch_std(r), it.uids),
    "REINFORCE++-baseline": lambda it, r: reference.whitened(reference.centered(r, it.uids), it.lengths, "token", 1e-6),
    "MaxRL": lambda it, r: reference.maxrl(r, it.uids),
    "F-GRPO": lambda it, r: focal(reference.grpo(r, it.uids), it.uids, it.accuracy),
    "GD2PO": lambda it, r: gd2po(it),
    "SAW": lambda it, r: saw(it),
    "DARA": lambda it, r: dara(it),
    "DVAO": lambda it, r: over_common(it, common_std),
    "CorrGRPO": lambda it, r: over_common(it, root_of_correlations),
    "RVPO": lambda it, r: rvpo(it),
    "Shorter right answers": shorter,
}


def advantages(title: str, rollout: Rollout) -> np.ndarray:
    algorithm = LISTS[title]
    batch = rollout.batch(None if "rewards" in algorithm else 1)
    return build("compose", Settings.parse(algorithm))(batch).advantages


def test_every_list_has_a_paper_a_formula_and_plain_loops():
    assert list(LISTS) == list(PLAIN)
    for title, text in SECTIONS.items():
        assert "https://arxiv.org/abs/" in text, title
        assert text.count("```") >= 4 or "estimators/gd2po.md" in text, title


@pytest.mark.parametrize("title", LISTS)
@given(rollout=rollouts(keys=("correctness", "length"), lengths=1))
def test_a_list_is_the_plain_loop(title, rollout):
    if title in ("MaxRL", "SAW"):
        columns = {key: np.abs(column).tolist() for key, column in rollout.columns.items()}
        rollout = Rollout(rollout.uids, columns, rollout.lengths, rollout.accuracy)
    wanted = reference.learnt(PLAIN[title](rollout, rollout.columns["correctness"]))
    np.testing.assert_allclose(advantages(title, rollout), wanted, rtol=1e-8, atol=1e-8)


NAMES = {method.paper.partition(",")[0]: name for name, method in SIMPLE_METHODS.items()}


@pytest.mark.parametrize("title", sorted(LISTS.keys() & NAMES.keys()))
def test_a_list_that_has_a_name_is_that_estimator(title):
    algorithm, name = LISTS[title], NAMES[title]
    kind = SIMPLE_METHODS[name].settings
    names = set() if kind is None else {item.name for item in dataclasses.fields(kind)}
    section = {}
    for step in algorithm["compose"]["steps"]:
        if isinstance(step, dict):
            section |= {key: value for key, value in step.items() if key in names}
    assert build(name, Settings.parse(algorithm | {name: section})) == build("compose", Settings.parse(algorithm))


@pytest.mark.parametrize("title", LISTS)
def test_a_list_passes_the_check_of_a_run(title):
    algorithm = LISTS[title]
    steps = OmegaConf.to_yaml(OmegaConf.create(algorithm["compose"]["steps"]), resolve=False)
    flow = yaml.safe_dump(yaml.safe_load(steps), default_flow_style=True, width=10_000).strip()
    keys = algorithm.get("rewards", {}).get("keys")
    overrides = [f"+algorithm.rewards.keys=[{','.join(keys)}]"] if keys else []
    overrides.append(f"+algorithm.compose.steps={flow}")
    assert judge(configuration("algorithm.adv_estimator=compose", *overrides)).findings == ()


MORE_LISTS = {
    **{title: algorithm["compose"]["steps"] for title, algorithm in LISTS.items()},
    "of the message without a list": ["weighted_sum", "center", "scale_by_std"],
    "with mad": ["weighted_sum", "center", "scale_by_mad"],
    "of README": ["center", "scale_by_mad", "weighted_sum", "whiten", "weight_by_difficulty"],
}


@pytest.mark.parametrize("title", MORE_LISTS)
@pytest.mark.parametrize("count", range(1, 7))
def test_the_dry_run_sees_the_effect_of_every_step_and_of_any_number_of_weights(title, count):
    steps = [
        step | {"min_values": [0.0] * count} if isinstance(step, dict) and "min_values" in step else step
        for step in MORE_LISTS[title]
    ]
    rewards = {"keys": [f"r{number}" for number in range(count)], "weights": [1.0, 0.5, 2.0, 1.0, 0.7, 0.3][:count]}
    settings = Settings.parse({"compose": {"steps": steps}, "rewards": rewards})
    run = Run("compose", settings, build("compose", settings), config=None)
    expected = [NO_EFFECT] if title == "RVPO" and count > 1 else []
    assert [*dry_run(run)] == expected


# Whole numbers of sixteenths, at least two responses to a prompt: float32 is exact, and no group is single.
COMPARABLE = {"keys": ("correctness", "length"), "nan": False, "lengths": 1, "smallest": 2}


@pytest.mark.parametrize(
    ("title", "name"), [("RLOO", "rloo"), ("REINFORCE++-baseline", "reinforce_plus_plus_baseline")]
)
@given(rollout=rollouts(**COMPARABLE))
def test_a_list_is_verls_function_on_the_score(title, name, rollout):
    core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")
    rewards, mask = tensors(rollout.columns["correctness"], rollout.lengths, torch.float64)
    theirs, _ = core_algos.get_adv_estimator_fn(name)(
        token_level_rewards=rewards, response_mask=mask, index=object_array(rollout.uids), config=None
    )
    np.testing.assert_allclose(advantages(title, rollout), theirs[:, 0].numpy(), rtol=1e-6, atol=1e-6)
