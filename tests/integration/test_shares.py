"""`advantage/contribution/<key>`: which reward decides."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import reference
from tests.batches import rollouts
from tests.calls import metrics_of
from verl_ext import Settings, Step, build
from verl_ext.core.metrics import contribution_metrics

WEIGHTS = (2.0, -0.5)
LARGE, SMALL, GROUP = [3.0, 3.0, -3.0, -3.0], [1.0, 0.0, 1.0, 0.0], ["g"] * 4


@given(rollout=rollouts(), norm=st.booleans(), kl=st.booleans())
def test_the_shares_are_those_of_plain_loops_and_add_up_to_1(rollout, norm, kl):
    uids, added = rollout.uids, [kl * length / 64 for length in rollout.lengths]
    batch = rollout.batch(kl_reward=added if kl else None)
    given = {"rewards": {"keys": ["a", "b"], "weights": WEIGHTS}, "norm_adv_by_std_in_grpo": norm}
    result = build("grpo", Settings.parse(given))(batch)
    found = contribution_metrics(
        batch.keys, batch.groups, result.contributions, result.total, result.advantages, rest=kl
    )
    parts = [[0 if math.isnan(x) else w * x for w, x in zip(WEIGHTS, row, strict=True)] for row in rollout.rewards]
    totals = reference.weighted_total([*rollout.columns.values()], WEIGHTS)
    totals = [total + kl for total, kl in zip(totals, added, strict=True)]
    wanted = reference.shares(parts, totals, reference.grpo(totals, uids, norm_by_std=norm), uids)
    named = dict(zip(["a", "b", *["rest"] * kl], wanted, strict=False))
    assert found == pytest.approx({f"advantage/contribution/{name}": share for name, share in named.items()}, abs=1e-9)
    assert sum(found.values()) == pytest.approx(1 if wanted else 0)


def shares(name, components, uids=GROUP, **config):
    """What a run with these rewards logs."""
    config["rewards"] = {"keys": list(components)}
    found = metrics_of(name, [0.0] * len(uids), uids, components=components, config=config)
    return {key.rpartition("/")[2]: value for key, value in found.items() if key.startswith("advantage/contribution/")}


def test_on_the_sum_the_large_reward_decides_and_under_gdpo_both_do():
    both = {"large": LARGE, "small": SMALL}
    assert shares("drgrpo", both) == pytest.approx({"large": 36 / 37, "small": 1 / 37})
    assert shares("gdpo", both) == pytest.approx({"large": 0.5, "small": 0.5})


class Smallest(Step):
    name = "smallest"
    sums = True

    def apply(self, values, batch):
        return values.min(axis=1, keepdims=True)


def test_nothing_is_logged_where_no_sum_varies_or_has_parts_and_where_one_reward_has_all():
    assert not shares("gdpo", {"a": LARGE, "b": [-x for x in LARGE]})
    assert not shares("compose", {"a": LARGE, "b": SMALL}, compose={"steps": [f"{__name__}:Smallest", "center"]})
    assert not shares("drgrpo", {"a": LARGE})
