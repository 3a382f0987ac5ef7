"""Whatever stands under `algorithm:`, it is read, or refused by an error that names the setting."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tests.facts import facts
from tests.fuzz.rubbish import Draw, draws, many, scalar, section, sometimes, tree
from verl_ext import Settings, build
from verl_ext.errors import ConfigurationError, VerlExtError
from verl_ext.estimators import ESTIMATORS
from verl_ext.integration.config.read import read_settings
from verl_ext.settings import VERL_NAMES


def read(make: Callable[[], Settings], algorithm: dict[Any, Any], *more: str) -> Settings | None:
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
    assert named & given or any(path in said for path in more), said
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
def test_the_actors_loss_is_read_where_it_stands(draw: Draw) -> None:
    algorithm, mode = section(draw), sometimes(draw, 0.5, tree, "token-mean")
    actor = sometimes(draw, 0.2, tree, {"loss_agg_mode": mode})
    config = as_configuration({"algorithm": algorithm, "actor_rollout_ref": {"actor": actor}})
    found = read(lambda: read_settings(config.algorithm), algorithm, "actor_rollout_ref.actor.loss_agg_mode")
    assert found is None or isinstance(found.loss_agg_mode, str)


@many
@given(draws)
def test_the_checks_before_ray_starts(draw: Draw) -> None:
    pytest.importorskip("verl")
    from verl_ext.integration.config.checks import check_run

    actor = {name: tree(draw) for name in ("loss_agg_mode", "loss_scale_factor", "use_kl_loss") if draw.random() < 0.3}
    actor["ppo_mini_batch_size"] = sometimes(draw, 0.2, scalar, 8)
    actor["policy_loss"] = sometimes(draw, 0.2, tree, {"loss_mode": sometimes(draw, 0.3, scalar, "vanilla")})
    config = as_configuration(
        {
            "algorithm": {
                **section(draw),
                "adv_estimator": sometimes(draw, 0.1, tree, draw.choice(sorted(ESTIMATORS))),
            },
            "actor_rollout_ref": {"actor": actor},
            "data": {name: sometimes(draw, 0.2, tree, 16) for name in ("train_batch_size", "max_response_length")},
            "reward": {"custom_reward_function": sometimes(draw, 0.3, reward_function, {"path": None, "name": None})},
            "trainer": {"use_v1": sometimes(draw, 0.1, tree, True)},
        }
    )
    level = logging.getLogger("verl_ext").level
    logging.getLogger("verl_ext").setLevel(logging.CRITICAL)
    try:
        check_run(config)
    except VerlExtError as error:
        said = str(error)
    else:
        return
    finally:
        logging.getLogger("verl_ext").setLevel(level)
    assert re.search(r"\b(algorithm|actor_rollout_ref|data|reward|trainer)\.\w", said), said


def reward_function(draw: Draw) -> Any:
    package = "pkg://verl_ext.rewards."
    return {
        "path": sometimes(
            draw, 0.3, tree, package + draw.choice(("gsm8k", "tool_calling", "nothing", "../x", "a\x00b"))
        ),
        "name": sometimes(draw, 0.2, tree, "compute_score"),
        "reward_kwargs": tree(draw),
    }


@pytest.mark.parametrize("step", ["Argument", "Raises", "NoName", "Hints", "Checks"])
def test_a_broken_step_of_the_users_is_named(step: str) -> None:
    item: Any = f"tests.fuzz.own_steps:{step}"
    settings = Settings.parse(
        {"compose": {"steps": ["weigh_and_sum", {"step": item, "limit": 2} if step == "Checks" else item]}}
    )
    with pytest.raises(ConfigurationError, match=facts("algorithm.compose.steps[1]", item)):
        build("compose", settings)
