"""Presets set the defaults and select their estimator. They replace nothing in the file of the user."""

import dataclasses

import pytest
from hydra.core import config_store

from tests.checks.config_files import judge_config, write_config
from tests.configs import compose
from tests.facts import NEEDED, says
from verl_ext.checks.judge import judge
from verl_ext.conf import store_presets
from verl_ext.registry import ADDED_ESTIMATORS, ESTIMATORS, load, possible_bases, sections
from verl_ext.run_config import read_settings
from verl_ext.settings import COMMON, Settings


def sections_of_preset(name):
    """Return the sections of `algorithm` that a preset sets. A section with a required setting is only its own."""
    names = {*COMMON, name}
    if name == "hadw":
        names |= set(possible_bases())
    of_other_estimators = set(NEEDED) - {name}
    return names & sections().keys() - of_other_estimators


@pytest.mark.parametrize("name", ADDED_ESTIMATORS)
def test_preset_selects_its_estimator_and_sets_every_default(name):
    config = compose(f"+verl_ext={name}")
    assert config.algorithm.adv_estimator == name
    assert config.verl_ext_presets == {name: True}
    expected_sections = sections_of_preset(name)
    assert sections().keys() & config.algorithm.keys() == expected_sections
    for section in expected_sections:
        if section in NEEDED:
            assert config.algorithm[section] == dict.fromkeys(NEEDED[section])
        else:
            assert config.algorithm[section] == dataclasses.asdict(sections()[section]())


def test_preset_of_drgrpo_sets_the_loss_of_its_paper():
    config = compose("+verl_ext=drgrpo")
    actor = config.actor_rollout_ref.actor
    assert (actor.loss_agg_mode, actor.use_kl_loss) == ("seq-mean-token-sum-norm", False)
    assert actor.loss_scale_factor == config.data.max_response_length
    assert read_settings(config) == Settings(loss_agg_mode="seq-mean-token-sum-norm")
    assert judge(config).errors == []


@pytest.fixture
def clipping(monkeypatch):
    """Replace the preset of gdpo by one that sets a clip ratio in addition to `algorithm`."""
    gdpo_that_clips = dataclasses.replace(load("gdpo"), preset={"actor_rollout_ref": {"actor": {"clip_ratio": 0.1}}})
    with monkeypatch.context() as patched:
        patched.setitem(ESTIMATORS, "gdpo", gdpo_that_clips)
        store_presets(config_store)
        yield
    store_presets(config_store)


@pytest.mark.parametrize(("preset", "setting"), [("dgpo", "use_kl_loss"), ("gdpo", "clip_ratio")])
@pytest.mark.usefixtures("clipping")
def test_preset_does_not_replace_the_loss_of_the_file(preset, setting, tmp_path):
    loss = "actor_rollout_ref: {actor: {use_kl_loss: true, clip_ratio: 0.3}}"
    write_config(tmp_path, f"defaults: [ppo_trainer, _self_]\n{loss}\n")
    (error,) = judge_config(tmp_path, f"+verl_ext={preset}", "algorithm.rewards.keys=[acc]").errors
    assert says(error, f"actor_rollout_ref.actor.{setting}", "mine")


@dataclasses.dataclass(frozen=True)
class PresetPlace:
    """Where a run selects the preset dgpo, and a fact of the error, if it is one.

    `theirs` is a file that sets algorithm.dgpo.dqw, and `mine`, with these `defaults`, sets algorithm.dgpo.dqw_temp.
    """

    defaults: str
    overrides: tuple[str, ...] = ()
    error: str | None = None


PLACES = {
    "before the file": PresetPlace("[ppo_trainer, verl_ext: dgpo, _self_]"),
    "on the command line, with the values of the file": PresetPlace(
        "[ppo_trainer, _self_]",
        ("+verl_ext=dgpo", "algorithm.rewards={keys: [a], weights: [2]}", "algorithm.dgpo.dqw_temp=2"),
    ),
    "after the file": PresetPlace("[ppo_trainer, _self_, verl_ext: dgpo]", error="_self_"),
    "on the command line, for a file on another one": PresetPlace(
        "[theirs, _self_]", ("+verl_ext=dgpo",), error="algorithm.dgpo.dqw"
    ),
    "after another file": PresetPlace("[theirs, verl_ext: dgpo, _self_]", error="algorithm.dgpo.dqw"),
    "in a list on the command line": PresetPlace(
        "[ppo_trainer, _self_]", ("+verl_ext=[cpu,dgpo]",), error="algorithm.dgpo.dqw_temp"
    ),
    "of another estimator": PresetPlace(
        "[ppo_trainer, verl_ext: hadw, _self_]", ("algorithm.adv_estimator=dgpo",), error="hadw"
    ),
}
VALUES_OF_THE_FILE = "algorithm: {rewards: {keys: [acc, format], weights: [1, 0.5]}, dgpo: {dqw_temp: 5.0}}\n"


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_preset_is_an_error_where_it_would_replace_values_of_the_file(place, tmp_path):
    write_config(tmp_path, f"defaults: {place.defaults}\n{VALUES_OF_THE_FILE}")
    (tmp_path / "theirs.yaml").write_text("defaults: [ppo_trainer, _self_]\nalgorithm: {dgpo: {dqw: false}}\n")
    run = judge_config(tmp_path, "++algorithm.rewards.accuracy_key=acc", *place.overrides)
    assert run.name == "dgpo"
    if place.error is None:
        assert run.errors == []
    else:
        assert says(run.errors[0], place.error)
