"""Every arm of the recipes: what it composes to."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.recipes.launchers import ARMS, RECIPES, composed, estimator, on_the_cpu
from verl_ext.cli import main
from verl_ext.integration.checks import command as check_command
from verl_ext.integration.checks import judge

# Published as they are: several updates a step, and a filter of groups below HA-DW.
WARNED = ("tool_calling/dgpo", "math/hadw-dapo")


def flat(config: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def values_of(config: Any) -> dict[str, Any]:
    """Path to value, before interpolations are resolved."""
    return dict(flat(OmegaConf.to_container(config, resolve=False)))


@pytest.mark.parametrize(
    ("arm", "cpu"),
    # A variant differs from the arm that it varies in nothing that the CPU changes.
    [*((arm, False) for arm in ARMS), *((arm, True) for arm in ARMS if "-" not in arm)],
)
def test_every_arm_is_named_like_its_file_and_passes_the_check(
    arm: str, cpu: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[Any] = []
    monkeypatch.setattr(check_command, "judge", lambda config: judged.append(config) or judge(config))
    status = main(["check", "--config-path", str(RECIPES), "--config-name", arm, *([on_the_cpu(arm)] if cpu else [])])
    shown = capsys.readouterr().out
    assert status == 0, shown
    assert arm in WARNED or not re.search(r"[1-9]\d* warning", shown), shown
    (config,) = judged
    assert f"{config.trainer.project_name}/{config.trainer.experiment_name}" == arm
    assert config.trainer.default_local_dir == f"outputs/{arm}/checkpoints"
    assert config.algorithm.adv_estimator == estimator(arm)
    assert config.trainer.max_actor_ckpt_to_keep == 2  # a checkpoint takes 18 GB and more
    if cpu:  # it loses what needs a GPU
        assert (config.trainer.device, config.actor_rollout_ref.rollout.name) == ("cpu", "embedded")
        assert not config.actor_rollout_ref.model.use_remove_padding
        assert config.trainer.n_gpus_per_node == 1


RUNS = re.findall(r"^\|[^|]*\| `([\w-]+) (.*=.*)` \|$", (RECIPES / "math/README.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize(("arm", "settings"), RUNS)
def test_the_runs_of_the_readme_of_math_pass_the_check(arm: str, settings: str) -> None:
    assert len(RUNS) == 7
    assert main(["check", "--config-path", str(RECIPES), "--config-name", f"math/{arm}", *settings.split()]) == 0


@pytest.mark.parametrize(
    ("one", "other"), [("gsm8k/gdpo", "gsm8k/grpo"), ("tool_calling/gdpo", "tool_calling/grpo-clean")]
)
def test_the_arms_that_are_compared_differ_in_nothing_but_the_estimator(one: str, other: str) -> None:
    left, right = values_of(composed(one)), values_of(composed(other))
    different = {name for name in left.keys() | right.keys() if left.get(name) != right.get(name)}
    ours = ("algorithm.gdpo.", "algorithm.rewards.", "algorithm.verl_ext.", "verl_ext_presets")
    assert {name for name in different if not name.startswith(ours)} == {
        "algorithm.adv_estimator",
        "trainer.experiment_name",
    }
