"""The configs of the recipes, and the recipe with per-turn rewards."""

import json
import random
import re

import pytest
from omegaconf import OmegaConf

from tests.facts import a_line_says
from tests.recipes.launchers import CONFIGS, RECIPES, composed, estimator, on_the_cpu
from verl_ext.checks import command as check_command
from verl_ext.checks.judge import judge
from verl_ext.checks.unread import leaves
from verl_ext.cli import main

# With the settings of their papers: several updates per step, and a filter of groups with hadw.
CONFIGS_WITH_WARNINGS = ("tool_calling/dgpo", "math/hadw-dapo")
# A variant such as `grpo-clean` changes nothing that the preset cpu sets.
CONFIGS_WITHOUT_VARIANTS = [name for name in CONFIGS if "-" not in name]


def values_of(config):
    """Return the values by their paths, before interpolations are resolved."""
    return dict(leaves(OmegaConf.to_container(config, resolve=False)))


@pytest.fixture
def check_config(capsys, monkeypatch):
    """Return a function that runs `check` for a config, and returns its status, its output and the configuration."""
    judged_configs = []

    def record_and_judge(config):
        judged_configs.append(config)
        return judge(config)

    monkeypatch.setattr(check_command, "judge", record_and_judge)

    def check(name, *overrides):
        status = main(["check", "--config-path", str(RECIPES), "--config-name", name, *overrides])
        (config,) = judged_configs
        return status, capsys.readouterr().out, config

    return check


def assert_is_valid(name, status, output, config):
    """Assert that a config has no findings, and that its folders and its estimator are those of its name."""
    assert status == 0, output
    if name not in CONFIGS_WITH_WARNINGS:
        assert not re.search(r"[1-9]\d* warning", output), output
    assert f"{config.trainer.project_name}/{config.trainer.experiment_name}" == name
    assert config.trainer.default_local_dir == f"outputs/{name}/checkpoints"
    assert config.trainer.max_actor_ckpt_to_keep == 2  # a checkpoint takes 18 GB and more
    assert config.algorithm.adv_estimator == estimator(name)


@pytest.mark.parametrize("name", CONFIGS)
def test_config_passes_the_check(name, check_config):
    status, output, config = check_config(name)
    assert_is_valid(name, status, output, config)


@pytest.mark.parametrize("name", CONFIGS_WITHOUT_VARIANTS)
def test_config_with_the_preset_cpu_needs_no_gpu(name, check_config):
    status, output, config = check_config(name, on_the_cpu(name))
    assert_is_valid(name, status, output, config)
    assert config.trainer.device == "cpu"
    assert config.actor_rollout_ref.rollout.name == "embedded"
    assert not config.actor_rollout_ref.model.use_remove_padding
    assert config.trainer.n_gpus_per_node == 1


README_OF_MATH = (RECIPES / "math/README.md").read_text()
RUNS = re.findall(r"^\|[^|]*\| `([\w-]+) (.*=.*)` \|$", README_OF_MATH, re.MULTILINE)


def test_readme_of_math_has_eight_runs():
    assert len(RUNS) == 8


@pytest.mark.parametrize(("name", "settings"), RUNS)
def test_run_of_the_readme_of_math_passes_the_check(name, settings):
    assert main(["check", "--config-path", str(RECIPES), "--config-name", f"math/{name}", *settings.split()]) == 0


SECTIONS_OF_VERL_EXT = ("algorithm.gdpo.", "algorithm.rewards.", "algorithm.verl_ext.", "verl_ext_presets")


@pytest.mark.parametrize(
    ("gdpo", "grpo"), [("gsm8k/gdpo", "gsm8k/grpo"), ("tool_calling/gdpo", "tool_calling/grpo-clean")]
)
def test_compared_configs_differ_only_in_the_estimator(gdpo, grpo):
    values_of_gdpo = values_of(composed(gdpo))
    values_of_grpo = values_of(composed(grpo))
    different = set()
    for path in values_of_gdpo.keys() | values_of_grpo.keys():
        if values_of_gdpo.get(path) != values_of_grpo.get(path) and not path.startswith(SECTIONS_OF_VERL_EXT):
            different.add(path)
    assert different == {"algorithm.adv_estimator", "trainer.experiment_name"}


PAGE = RECIPES.parent / "docs/pages/per_turn.md"


@pytest.mark.parametrize("name", ["per_turn", "outcome"])
def test_config_of_turns_passes_the_check(name, capsys):
    status = main(["check", "--config-path", str(RECIPES), "--config-name", f"turns/{name}"])
    output = capsys.readouterr().out
    assert status == 0, output
    assert a_line_says(output, "rewards", "right") == (name == "per_turn")


def test_warm_up_sessions_get_the_rewards_of_their_turns():
    """A session is a list of texts, each with whether the model has written it. The first text is the prompt."""
    from recipes.turns import prepare_data, reward

    rng = random.Random(0)
    for _ in range(50):
        session = prepare_data.session(rng)
        turns = [text for text, is_of_model in session if is_of_model]
        requested_letters = [re.sub(r"</?s>|\s", "", text) for text, is_of_model in session if not is_of_model]
        expected = [float(turn[0] == letter) for turn, letter in zip(turns, requested_letters, strict=False)]

        response = "".join(re.sub("</?s>", "", text) for text, _ in session[1:])  # as verl decodes a response
        result = reward.compute_score("keys", response, requested_letters[0], {"num_turns": 2 * len(turns)})
        assert json.loads(result["right"]) == expected
        assert result["score"] == sum(expected)


@pytest.fixture
def reward_function_of_the_page():
    """Return the function of the first Python block of docs/pages/per_turn.md."""
    block = re.search(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert block is not None
    module = {}
    exec(block[1], module)
    return module["compute_score"]


@pytest.mark.parametrize(("number", "is_correct"), [(7, 1.0), (17, 0.0)])
def test_reward_function_of_the_page_returns_an_entry_for_each_turn(reward_function_of_the_page, number, is_correct):
    """The first turn is a valid call, the second an invalid one, and the third an answer."""
    result_of_tool = "\nuser\n<tool_response>7</tool_response>\nassistant\n"
    valid_call = '<tool_call>{"name": "a"}</tool_call>'
    invalid_call = "<tool_call>{</tool_call>"
    response = f"{valid_call}{result_of_tool}{invalid_call}{result_of_tool}it is {number}"
    result = reward_function_of_the_page("x", response, "7", {"num_turns": 6})
    assert json.loads(result["call_ok"]) == [1.0, 0.0, 0.0]
    assert result["correct"] == is_correct
    assert result["score"] == is_correct
