"""Every config of the recipes: what it composes to. The parts of the recipe of per-turn rewards."""

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

# Published as they are: several updates a step, and a filter of groups below HA-DW.
WARNED = ("tool_calling/dgpo", "math/hadw-dapo")


def values_of(config):
    """Path to value, before interpolations are resolved."""
    return dict(leaves(OmegaConf.to_container(config, resolve=False)))


@pytest.mark.parametrize(
    ("name", "cpu"),
    # A variant differs from the config that it varies in nothing that the CPU changes.
    [*((name, False) for name in CONFIGS), *((name, True) for name in CONFIGS if "-" not in name)],
)
def test_every_config_is_named_like_its_file_and_passes_the_check(name, cpu, capsys, monkeypatch):
    judged = []
    monkeypatch.setattr(check_command, "judge", lambda config: judged.append(config) or judge(config))
    status = main(["check", "--config-path", str(RECIPES), "--config-name", name, *([on_the_cpu(name)] if cpu else [])])
    shown = capsys.readouterr().out
    assert status == 0, shown
    assert name in WARNED or not re.search(r"[1-9]\d* warning", shown), shown
    (config,) = judged
    assert f"{config.trainer.project_name}/{config.trainer.experiment_name}" == name
    assert config.trainer.default_local_dir == f"outputs/{name}/checkpoints"
    assert config.algorithm.adv_estimator == estimator(name)
    assert config.trainer.max_actor_ckpt_to_keep == 2  # a checkpoint takes 18 GB and more
    if cpu:  # it loses what needs a GPU
        assert (config.trainer.device, config.actor_rollout_ref.rollout.name) == ("cpu", "embedded")
        assert not config.actor_rollout_ref.model.use_remove_padding
        assert config.trainer.n_gpus_per_node == 1


RUNS = re.findall(r"^\|[^|]*\| `([\w-]+) (.*=.*)` \|$", (RECIPES / "math/README.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize(("name", "settings"), RUNS)
def test_the_runs_of_the_readme_of_math_pass_the_check(name, settings):
    assert len(RUNS) == 7
    assert main(["check", "--config-path", str(RECIPES), "--config-name", f"math/{name}", *settings.split()]) == 0


@pytest.mark.parametrize(
    ("one", "other"), [("gsm8k/gdpo", "gsm8k/grpo"), ("tool_calling/gdpo", "tool_calling/grpo-clean")]
)
def test_the_configs_that_are_compared_differ_in_nothing_but_the_estimator(one, other):
    left, right = values_of(composed(one)), values_of(composed(other))
    different = {name for name in left.keys() | right.keys() if left.get(name) != right.get(name)}
    ours = ("algorithm.gdpo.", "algorithm.rewards.", "algorithm.verl_ext.", "verl_ext_presets")
    others = {name for name in different if not name.startswith(ours)}
    assert others == {"algorithm.adv_estimator", "trainer.experiment_name"}


PAGE = RECIPES.parent / "docs/pages/turns.md"


@pytest.mark.parametrize("name", ["per_turn", "outcome"])
def test_a_config_passes_the_check(name, capsys):
    status = main(["check", "--config-path", str(RECIPES), "--config-name", f"turns/{name}"])
    out = capsys.readouterr().out
    assert status == 0, out
    assert a_line_says(out, "rewards", "right") == (name == "per_turn")


def test_the_model_is_warmed_up_on_what_the_reward_function_and_the_tool_read():
    from recipes.turns import prepare_data, reward

    rng = random.Random(0)
    for _ in range(50):
        parts = prepare_data.session(rng)
        text = "".join(re.sub("</?s>", "", part) for part, _ in parts[1:])  # as verl decodes a response
        turns = [part for part, own in parts if own]
        asked = [re.sub(r"</?s>|\s", "", part) for part, own in parts if not own]
        found = reward.compute_score("keys", text, asked[0], {"num_turns": 2 * len(turns)})
        entries = [float(turn[0] == letter) for turn, letter in zip(turns, asked, strict=False)]
        assert json.loads(found["right"]) == entries
        assert found["score"] == sum(entries)


def test_the_function_to_copy_returns_an_entry_for_each_turn():
    block = re.search(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert block is not None
    space = {}
    exec(block[1], space)
    call, answer = '<tool_call>{"name": "a"}</tool_call>', "\nuser\n<tool_response>7</tool_response>\nassistant\n"
    for number in (7, 17):
        text = f"{call}{answer}<tool_call>{{</tool_call>{answer}it is {number}"
        found = space["compute_score"]("x", text, "7", {"num_turns": 6})
        assert json.loads(found["call_ok"]) == [1.0, 0.0, 0.0]
        assert found["score"] == found["right"] == float(number == 7)
