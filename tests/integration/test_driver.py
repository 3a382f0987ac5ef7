"""verl's own command line: what is wrong stops it in the driver, before Ray starts."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests import fresh
from tests.facts import says


def main_ppo(folder: Path, *arguments: str, program: str = "verl.trainer.main_ppo") -> subprocess.CompletedProcess[str]:
    return fresh.run(program, *arguments, module=True, folder=folder, timeout=180)


@pytest.mark.parametrize("use_v1", [True, False], ids=["v1", "legacy"])
def test_a_misspelt_estimator_stops_before_ray_starts(tmp_path: Path, use_v1: bool) -> None:
    done = main_ppo(
        tmp_path,
        "algorithm.adv_estimator=gdop",
        f"trainer.use_v1={use_v1}",
        f"+ray_kwargs.ray_init._temp_dir={tmp_path}/ray",
    )
    assert done.returncode == 1
    assert says(done.stderr, "'gdop'", "did you mean 'gdpo'", "'compose', 'dgpo', 'drgrpo'")
    assert not (tmp_path / "ray").exists()
    assert "Started a local Ray instance" not in done.stdout + done.stderr


@pytest.mark.parametrize("mode", ["one_step_off_policy.main_ppo", "fully_async_policy.fully_async_main"])
def test_the_experimental_entry_points_stop_before_ray_starts(tmp_path: Path, mode: str) -> None:
    """The fully asynchronous one never calls verl's own check, the other in a Ray actor."""
    done = main_ppo(
        tmp_path,
        "hydra.searchpath=[pkg://verl.trainer.config]",
        "algorithm.adv_estimator=gdop",
        f"+ray_kwargs.ray_init._temp_dir={tmp_path}/ray",
        program=f"verl.experimental.{mode}",
    )
    assert done.returncode == 1
    assert says(done.stderr, "'gdop'", "did you mean 'gdpo'")
    assert not (tmp_path / "ray").exists()
