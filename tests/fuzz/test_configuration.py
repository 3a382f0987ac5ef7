"""Whatever stands under `algorithm:`, it is read, or refused by an error that names the setting."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from hypothesis import assume, given
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tests.fuzz.rubbish import Draw, draws, many, section, sometimes, tree
from verl_ext import Settings, build
from verl_ext.errors import ConfigurationError, VerlExtError
from verl_ext.integration.checks.read import read_settings
from verl_ext.registry import ESTIMATORS
from verl_ext.settings import VERL_NAMES


def read(make: Callable[[], Settings], algorithm: dict[Any, Any]) -> Settings | None:
    """Settings, or None where they are refused as they should be: by one of our errors, which names an entry."""
    try:
        found = make()
    except VerlExtError as error:
        said = str(error)
    else:
        assert isinstance(found, Settings)
        return found
    named = set(re.findall(r"algorithm\.(\w+)", said))
    given = {str(key) for key in algorithm}
    if given & set(VERL_NAMES.values()):  # they mean the same
        given.add("rewards")
    assert named & given, said
    return None


def built(draw: Draw, settings: Settings | None) -> None:
    """An estimator of these settings is built, or refused by naming a setting."""
    if settings is None:
        return
    try:
        build(draw.choice(sorted(ESTIMATORS)), settings)
    except ConfigurationError as error:
        said = str(error)
    else:
        return
    assert "algorithm." in said, said


def as_configuration(data: Any) -> Any:
    try:
        return OmegaConf.create(data)
    except (OmegaConfBaseException, ValueError, OverflowError):  # refused by OmegaConf itself, before us
        assume(False)


@many
@given(draws)
def test_plain_data(draw: Draw) -> None:
    algorithm = section(draw)
    built(draw, read(lambda: Settings.parse(algorithm), algorithm))


@many
@given(draws)
def test_a_configuration_of_omegaconfs(draw: Draw) -> None:
    algorithm = section(draw)
    config = as_configuration({"algorithm": algorithm})
    built(draw, read(lambda: read_settings(config.algorithm), algorithm))


@many
@given(draws)
def test_the_checks_before_ray_starts(draw: Draw) -> None:
    """With anything under `algorithm` and as arguments of a scorer; the rest is verl's to check."""
    pytest.importorskip("verl")
    from verl_ext.integration import hooks
    from verl_ext.integration.checks import judge

    name, loss = draw.choice(sorted(ESTIMATORS)), draw.choice(("token-mean", "seq-mean-token-sum-norm", None))
    function = {"path": f"pkg://verl_ext.rewards.{draw.choice(('gsm8k', 'nothing'))}", "name": "compute_score"}
    config = as_configuration(
        {
            "algorithm": {**section(draw), "adv_estimator": sometimes(draw, 0.1, tree, name)},
            "actor_rollout_ref": {"actor": {"loss_agg_mode": loss, "loss_scale_factor": sometimes(draw, 0.5, tree, 9)}},
            "reward": {"custom_reward_function": {**function, "reward_kwargs": sometimes(draw, 0.5, tree, None)}},
        }
    )
    with mock.patch.object(hooks, "RULES", []):
        try:
            errors = judge(config).errors
        except ConfigurationError as error:  # the estimator's name cannot be read
            errors = (str(error),)
    for text in errors:
        assert re.search(r"\b(algorithm|actor_rollout_ref|reward|preset|top)\b", text), text
