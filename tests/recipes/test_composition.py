"""Every arm of the recipes: what it composes to, and how run.sh starts it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.recipes.launchers import ARMS, RECIPES, composed, estimator, on_the_cpu, run
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


def test_run_sh_starts_an_arm_with_absolute_paths_and_keeps_earlier_metrics(tmp_path: Path) -> None:
    (tmp_path / "data/gsm8k").mkdir(parents=True)
    (tmp_path / "data/gsm8k/train.parquet").touch()
    (tmp_path / "outputs/gsm8k/gdpo").mkdir(parents=True)
    (tmp_path / "outputs/gsm8k/gdpo/metrics.jsonl").write_text("earlier")
    done = run("gsm8k/run.sh", "gdpo", "trainer.nnodes=2", cwd=tmp_path, PYTHON="echo")
    assert done.returncode == 0, done.stderr
    assert f"--config-path {RECIPES} --config-name gsm8k/gdpo " in done.stdout
    assert f"trainer.default_local_dir={tmp_path}/outputs/gsm8k/gdpo/checkpoints" in done.stdout
    assert f"VERL_FILE_LOGGER_PATH={tmp_path}/outputs/gsm8k/gdpo/metrics.jsonl" in done.stdout
    assert done.stdout.endswith(" trainer.nnodes=2\n")
    (kept,) = (tmp_path / "outputs/gsm8k/gdpo/earlier").iterdir()
    assert kept.read_text() == "earlier"
    other = run("gsm8k/run.sh", "grpo", cwd=tmp_path, PYTHON="echo", OUTPUT_DIR="mine")
    assert f"trainer.default_local_dir={tmp_path}/mine/checkpoints" in other.stdout


@pytest.mark.parametrize(
    ("recipe", "arguments", "said"),
    [
        ("gsm8k", (), ["gdpo", "hadw"]),
        ("math", ("dgop",), ["dgpo", "hadw-dapo"]),
        ("gsm8k", ("gdpo",), ["data/gsm8k/train.parquet", "gsm8k/prepare_data.py"]),
    ],
)
def test_run_sh_says_how_to_start(recipe: str, arguments: tuple[str, ...], said: list[str], tmp_path: Path) -> None:
    done = run(f"{recipe}/run.sh", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert all(text in done.stderr for text in said), done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_check_of_a_gpu_bounds_memory_unless_an_override_says_otherwise(tmp_path: Path) -> None:
    for task in ("quickstart", "gsm8k", "math"):
        (tmp_path / "data" / task).mkdir(parents=True)
        (tmp_path / "data" / task / "train.parquet").touch()
    share = "actor_rollout_ref.rollout.gpu_memory_utilization"
    done = run("gpu_check.sh", f"{share}=0.2", cwd=tmp_path, PYTHON="echo")
    assert "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048" in done.stdout
    assert [word for word in done.stdout.split() if word.startswith(share)][-1] == f"{share}=0.2"  # the last one wins


def test_run_sh_shows_the_configuration_without_data(tmp_path: Path) -> None:
    done = run("tool_calling/run.sh", "drgrpo", "--cfg", "job", cwd=tmp_path, PYTHON="echo")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(" --cfg job\n")
    assert list(tmp_path.iterdir()) == []


def test_a_model_is_evaluated_with_the_lengths_of_its_arm(tmp_path: Path) -> None:
    (tmp_path / "data/math").mkdir(parents=True)
    (tmp_path / "data/math/train.parquet").touch()
    done = run("evaluate.sh", "math", "hadw", "merged", "a.b=1", cwd=tmp_path, PYTHON="echo", PASS_SAMPLES="2")
    assert done.returncode == 0, done.stderr
    greedy, sampled, summary = done.stdout.splitlines()
    for command in (greedy, sampled):
        assert "--config-name math/hadw " in command
        assert "data.max_prompt_length=1024" in command  # at 512 the longest problems would be left out
        assert "actor_rollout_ref.model.path=merged" in command
        assert command.endswith(" a.b=1")
    assert "val_kwargs.n=2" in sampled
    assert f"{tmp_path}/outputs/evaluation/math/hadw/merged/sampled --right accuracy" in summary
    done = run("evaluate.sh", "gsm8k", "gdpo", cwd=tmp_path)
    assert done.returncode == 2
    assert "evaluate.sh gsm8k gdpo" in done.stderr
