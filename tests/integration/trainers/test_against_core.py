"""A trainer gives what the core gives, on drawn batches with padding; on the default one outputs make up sessions."""

from importlib import import_module

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import reference
from tests.integration.conftest import has_default_trainer
from tests.integration.trainers.drawn import CASES, batches, check, config_for

TRAINERS = ["ray", *["default"] * has_default_trainer()]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("trainer", TRAINERS)
@settings(max_examples=15)
@given(data=st.data())
def test_the_trainer_gives_what_the_core_gives(trainer: str, case: str, data: st.DataObject) -> None:
    """Also where a hook masks a group, which counts as rejected."""
    runs = import_module(f"tests.integration.trainers.{trainer}_runs")
    run = data.draw(st.lists(batches(sessions=runs.SESSIONS), min_size=2, max_size=2))
    check(runs, case, run, hooked=data.draw(st.integers(0, 2)) == 0)


@pytest.mark.parametrize("trainer", TRAINERS)
@settings(max_examples=10)
@given(data=st.data(), norm=st.booleans())
def test_the_shares_of_named_rewards_in_verls_own_grpo_are_those_of_its_advantages(
    trainer: str, data: st.DataObject, norm: bool
) -> None:
    runs = import_module(f"tests.integration.trainers.{trainer}_runs")
    drawn = data.draw(batches(sessions=runs.SESSIONS))
    algorithm = {"rewards": {"keys": ["a", "b"]}, "norm_adv_by_std_in_grpo": norm}
    metrics = runs.step(runs.made(config_for("grpo", algorithm)), drawn, hooked=False)[1]
    rows = [rows[-1] for rows in drawn.trajectories]
    uids, scores = [drawn.uids[row] for row in rows], [float(drawn.score[row]) for row in rows]
    parts = np.nan_to_num(np.stack([drawn.columns[key][rows] for key in "ab"], axis=1)).tolist()
    wanted = reference.shares(parts, scores, reference.grpo(scores, uids, norm_by_std=norm), uids)
    found = {
        key.rpartition("/")[2]: value for key, value in metrics.items() if key.startswith("advantage/contribution/")
    }
    assert found == pytest.approx(dict(zip(("a", "b", "rest"), wanted, strict=False)), abs=1e-5, rel=1e-5)
