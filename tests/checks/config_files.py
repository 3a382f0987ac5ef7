"""Configurations that a user has written in a file."""

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import open_dict

from verl_ext.checks.judge import judge

SEARCHPATH = "hydra: {searchpath: ['pkg://verl.trainer.config']}"
"""The line with which a file finds verl's files."""


def write_config(folder, text, name="mine"):
    """Write a configuration file that may name verl's files in its `defaults`."""
    file = folder / f"{name}.yaml"
    file.write_text(f"{SEARCHPATH}\n{text}")
    return file


def judge_config(folder, *overrides):
    """Return the run of the file `mine.yaml` in a folder and of a command line, with its findings.

    The number of responses per prompt is 8, because verl_ext warns of verl's default of 1.
    """
    with hydra.initialize_config_dir(str(folder), version_base=None):
        responses_per_prompt = "actor_rollout_ref.rollout.n=8"
        config = hydra.compose("mine", overrides=[responses_per_prompt, *overrides], return_hydra_config=True)
        HydraConfig.instance().set_config(config)
        try:
            with open_dict(config):
                del config["hydra"]
            return judge(config)
        finally:
            HydraConfig.instance().cfg = None
