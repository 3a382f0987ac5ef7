"""Every recipe and arm, composed by verl's own configuration, against the papers' set-ups."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from tests.facts import a_line_says, facts
from tests.recipes import launchers
from tests.recipes.launchers import RECIPES, composed
from tests.recipes.papers import ALGORITHMS, ARMS, WARNED
from verl_ext.errors import ConfigurationError
from verl_ext.integration.checks import check_run
from verl_ext.conf import MARKER, defaults
from verl_ext.registry import BUILT_IN
from verl_ext.settings import VerlExtSettings


@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_composes_to_the_papers_set_up(arm: str, caplog: pytest.LogCaptureFixture) -> None:
    recipe, variables, expected = ARMS[arm]
    config = composed(recipe, **variables)
    assert {path: found(config, path) for path in expected} == expected
    assert config.algorithm.adv_estimator == variables.get("ALGORITHM", "dgpo" if recipe == "math" else "gdpo")
    with caplog.at_level(logging.WARNING, "verl_ext"):
        check_run(config)
    messages = [record.getMessage() for record in caplog.records if record.name == "verl_ext"]
    assert len(messages) == (arm in WARNED), messages
    assert all(WARNED[arm] in message for message in messages)


def found(config: Any, path: str) -> Any:
    """An entry, resolved; an error if there is none."""
    value = OmegaConf.select(config, path, throw_on_missing=True, default="there is no such entry")
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def test_every_recipe_has_an_arm_for_every_algorithm() -> None:
    first = {"tool_calling": "gdpo", "gsm8k": "gdpo", "math": "dgpo"}
    tried = {(recipe, variables.get("ALGORITHM", first[recipe])) for recipe, variables, _ in ARMS.values()}
    assert tried == {(recipe, algorithm) for recipe in first for algorithm in ALGORITHMS}
    assert {path.parent.name for path in RECIPES.glob("*/run.sh")} == set(first)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("recipe", ["tool_calling", "gsm8k", "math"])
def test_every_arm_can_run_without_a_gpu(recipe: str, algorithm: str) -> None:
    from verl_ext.cpu.checks import check

    config = composed(recipe, ALGORITHM=algorithm, DEVICE="cpu")
    check(config)
    assert config.trainer.device == "cpu"
    assert config.actor_rollout_ref.rollout.name == "embedded"
    assert config.trainer.n_gpus_per_node == 1


def test_only_the_estimator_differs_between_the_arms_that_are_compared() -> None:
    """GSM8K's gdpo and grpo, and tool calling's gdpo and clean grpo: nothing else of verl's settings."""
    pairs = {
        "gsm8k": ({}, {"ALGORITHM": "grpo"}),
        "tool_calling": ({}, {"ALGORITHM": "grpo", "KL_IN_REWARD": "False"}),
    }
    for recipe, (left, right) in pairs.items():
        one, other = (plain(composed(recipe, EXPERIMENT_NAME="same", **given)) for given in (left, right))
        for config in (one, other):
            assert config["algorithm"].pop("adv_estimator") in ("gdpo", "grpo")
            config.pop(MARKER, None)
            config["algorithm"].pop("gdpo", None)
            # A preset has the defaults of our reports as well, which do not train.
            assert config["algorithm"].pop("verl_ext", defaults(VerlExtSettings)) == defaults(VerlExtSettings)
            rewards = config["algorithm"].pop("rewards")
            assert rewards["keys"]
        assert one == other, recipe


def plain(config: Any) -> Any:
    return OmegaConf.to_container(config, resolve=False)


def test_nodes_gpus_and_any_key_of_verl_can_be_set() -> None:
    config = composed("gsm8k", "trainer.total_epochs=3", "algorithm.gdpo.scale=mad", NNODES="2", NGPUS_PER_NODE="4")
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node, config.trainer.total_epochs) == (2, 4, 3)
    assert config.algorithm.gdpo.scale == "mad"


@pytest.mark.parametrize("algorithm", ["gdpo", "grpo"])
def test_a_further_reward_can_be_added_as_the_readme_says(algorithm: str) -> None:
    config = composed(
        "tool_calling",
        "+reward.custom_reward_function.reward_kwargs.length=fixed",
        "algorithm.rewards.keys=[correctness,format,length]",
        ALGORITHM=algorithm,
    )
    check_run(config)
    assert config.algorithm.rewards["keys"] == ["correctness", "format", "length"]
    assert config.reward.custom_reward_function.reward_kwargs == {"matching": "greedy", "length": "fixed"}


def test_another_anchor_can_be_chosen_as_the_readme_says() -> None:
    config = composed("math", "algorithm.hadw.anchor=window", ALGORITHM="hadw")
    check_run(config)
    assert config.algorithm.hadw.anchor == "window"


def test_paths_are_absolute_and_reach_the_node_that_trains(tmp_path: Any) -> None:
    config = composed("gsm8k", OUTPUT_DIR=str(tmp_path / "run"))
    assert config.trainer.default_local_dir == f"{tmp_path}/run/checkpoints"
    variables = config.ray_kwargs.ray_init.runtime_env.env_vars
    assert variables["VERL_FILE_LOGGER_PATH"] == f"{tmp_path}/run/metrics.jsonl"
    assert config.data.train_files == str(RECIPES.parent / "data/gsm8k/train.parquet")


REFUSED = {
    "an algorithm that does not exist": (
        "gsm8k",
        {"ALGORITHM": "gdop"},
        f"ALGORITHM is 'gdop', valid: grpo, {', '.join(name for name in BUILT_IN if name != 'compose')}",
    ),
    "a device that does not exist": ("math", {"DEVICE": "tpu"}, "DEVICE is 'tpu', valid: gpu, cpu"),
    "a way to read numbers": ("gsm8k", {"STRICT": "yes"}, "STRICT is 'yes', valid: corrected, reference"),
    "a switch": ("tool_calling", {"KL_IN_REWARD": "no"}, "KL_IN_REWARD is 'no', valid: True, False"),
    "a loss under dgpo": ("math", {"LOSS": "gspo"}, "LOSS=gspo is for ALGORITHM=grpo and hadw"),
    "an ablation of another method": ("math", {"ALGORITHM": "grpo", "DQW": "False"}, "are for ALGORITHM=dgpo"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_variable_is_refused_by_name(case: str) -> None:
    recipe, variables, message = REFUSED[case]
    done = launchers.run(recipe, DRY_RUN="1", **variables)
    assert done.returncode == 2
    assert message in done.stderr


def test_missing_data_are_named_with_what_makes_them(tmp_path: Any) -> None:
    done = launchers.run("gsm8k", DATA_DIR=str(tmp_path))
    assert done.returncode == 2
    assert a_line_says(done.stderr, f"{tmp_path}/train.parquet", "prepare_data.py")


def test_kl_in_the_reward_of_gdpo_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=facts("use_kl_in_reward=True", "gdpo")):
        check_run(composed("tool_calling", KL_IN_REWARD="True"))


def test_the_launcher_itself_shows_its_configuration(tmp_path: Any) -> None:
    """Through bash and verl's own entry point, as a user does; no data are needed and nothing is written."""
    done = launchers.run("tool_calling", "--cfg", "job", ALGORITHM="drgrpo", OUTPUT_DIR=str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    config = yaml.safe_load(done.stdout)
    assert config["algorithm"]["adv_estimator"] == "drgrpo"
    assert config["actor_rollout_ref"]["actor"]["loss_agg_mode"] == "seq-mean-token-sum-norm"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("arguments", [("--cfg=job",), ("-c", "job")])
def test_other_forms_of_that_option_need_no_data_and_write_nothing(arguments: tuple[str, ...], tmp_path: Any) -> None:
    done = launchers.run("tool_calling", *arguments, PYTHON="echo", OUTPUT_DIR=str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(" ".join(arguments) + "\n")
    assert not (tmp_path / "run").exists()
