"""The presets: they hold the defaults, choose their estimator, and let nothing in the user's own file be replaced."""

import dataclasses

import hydra
import pytest
from hydra.core import config_store
from hydra.core.hydra_config import HydraConfig
from omegaconf import open_dict

from tests.configs import compose
from tests.facts import NEEDED, says
from verl_ext.checks.judge import judge
from verl_ext.conf import store_presets
from verl_ext.registry import ADDED_ESTIMATORS, ESTIMATORS, load, possible_bases, sections
from verl_ext.run_config import read_settings
from verl_ext.settings import COMMON, Settings


@pytest.mark.parametrize("name", ADDED_ESTIMATORS)
def test_a_preset_holds_the_defaults_of_every_setting(name):
    config = compose(f"+verl_ext={name}")
    used = {*COMMON, name, *(possible_bases() if name == "hadw" else ())} & sections().keys() - ({*NEEDED} - {name})
    assert used == sections().keys() & config.algorithm.keys()
    if name in NEEDED:
        assert config.algorithm[name] == dict.fromkeys(NEEDED[name])
    for section in used - {*NEEDED}:
        assert config.algorithm[section] == dataclasses.asdict(sections()[section]())
    assert (config.algorithm.adv_estimator, config.verl_ext_presets) == (name, {name: True})


def test_a_preset_brings_the_loss_of_its_paper():
    config = compose("+verl_ext=drgrpo")
    actor = config.actor_rollout_ref.actor
    assert (actor.loss_agg_mode, actor.use_kl_loss) == ("seq-mean-token-sum-norm", False)
    assert actor.loss_scale_factor == config.data.max_response_length
    assert read_settings(config) == Settings(loss_agg_mode="seq-mean-token-sum-norm")
    assert judge(config).errors == []


OURS = "algorithm: {rewards: {keys: [acc, format], weights: [1, 0.5]}, dgpo: {dqw_temp: 5.0}}\n"
# The defaults of the user's file, the command line, and a fact of the error, or none.
FILES = {
    "before": ("[ppo_trainer, verl_ext: dgpo, _self_]", (), None),
    "with its values said again": (
        "[ppo_trainer, _self_]",
        ("+verl_ext=dgpo", "algorithm.rewards={keys: [a], weights: [2]}", "algorithm.dgpo.dqw_temp=2"),
        None,
    ),
    "after": ("[ppo_trainer, _self_, verl_ext: dgpo]", (), "_self_"),
    "on the command line, to a file on another": ("[theirs, _self_]", ("+verl_ext=dgpo",), "algorithm.dgpo.dqw"),
    "after a part of the file": ("[theirs, verl_ext: dgpo, _self_]", (), "algorithm.dgpo.dqw"),
    "in a list there": ("[ppo_trainer, _self_]", ("+verl_ext=[cpu,dgpo]",), "algorithm.dgpo.dqw_temp"),
    "of another estimator": ("[ppo_trainer, verl_ext: hadw, _self_]", ("algorithm.adv_estimator=dgpo",), "hadw"),
}  # fmt: skip


def judged(home, *overrides):
    """The verdict on the user's file `mine.yaml` with a command line."""
    with hydra.initialize_config_dir(str(home), version_base=None):
        given = ["actor_rollout_ref.rollout.n=8", *overrides]
        config = hydra.compose("mine", overrides=given, return_hydra_config=True)
        HydraConfig.instance().set_config(config)
        try:
            with open_dict(config):
                del config["hydra"]
            return judge(config)
        finally:
            HydraConfig.instance().cfg = None


@pytest.fixture
def clipping(monkeypatch):
    """A preset of gdpo that sets a clip ratio beside `algorithm`."""
    gdpo_that_clips = dataclasses.replace(load("gdpo"), preset={"actor_rollout_ref": {"actor": {"clip_ratio": 0.1}}})
    with monkeypatch.context() as patched:
        patched.setitem(ESTIMATORS, "gdpo", gdpo_that_clips)
        store_presets(config_store)
        yield
    store_presets(config_store)


@pytest.mark.parametrize(("preset", "lost"), [("dgpo", "use_kl_loss"), ("gdpo", "clip_ratio")])
@pytest.mark.usefixtures("clipping")
def test_a_preset_does_not_replace_the_loss_of_the_user_s_file(preset, lost, tmp_path):
    file = "defaults: [ppo_trainer, _self_]\nactor_rollout_ref: {actor: {use_kl_loss: true, clip_ratio: 0.3}}\n"
    (tmp_path / "mine.yaml").write_text(f"hydra: {{searchpath: ['pkg://verl.trainer.config']}}\n{file}")
    (error,) = judged(tmp_path, f"+verl_ext={preset}", "algorithm.rewards.keys=[acc]").errors
    assert says(error, f"actor_rollout_ref.actor.{lost}", "mine")


@pytest.mark.parametrize("place", FILES)
def test_a_preset_in_the_user_s_file(place, tmp_path):
    defaults, overrides, word = FILES[place]
    file = tmp_path / "mine.yaml"
    file.write_text(f"hydra: {{searchpath: ['pkg://verl.trainer.config']}}\ndefaults: {defaults}\n{OURS}")
    (tmp_path / "theirs.yaml").write_text("defaults: [ppo_trainer, _self_]\nalgorithm: {dgpo: {dqw: false}}\n")
    verdict = judged(tmp_path, "++algorithm.rewards.accuracy_key=acc", *overrides)
    assert verdict.name == "dgpo"
    assert bool(verdict.errors) == (word is not None), verdict.errors
    assert word is None or says(verdict.errors[0], word)
