"""verl's own command line: what is wrong stops it in the driver, before Ray starts."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests import fresh
from tests.facts import says


def main_ppo(folder: Path, *arguments: str, program: str = "verl.trainer.main_ppo") -> subprocess.CompletedProcess[str]:
    return fresh.run(program, *arguments, module=True, folder=folder, timeout=180)


PROGRAMS = {
    "trainer.main_ppo": "trainer.use_v1=False",
    "experimental.one_step_off_policy.main_ppo": "hydra.searchpath=[pkg://verl.trainer.config]",
    "experimental.fully_async_policy.fully_async_main": "hydra.searchpath=[pkg://verl.trainer.config]",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_entry_point_stops_before_ray_starts(tmp_path: Path, program: str) -> None:
    """With V1 see `checks/test_command`. The fully asynchronous one never calls verl's own check."""
    done = main_ppo(
        tmp_path,
        PROGRAMS[program],
        "algorithm.adv_estimator=gdop",
        f"+ray_kwargs.ray_init._temp_dir={tmp_path}/ray",
        program=f"verl.{program}",
    )
    assert done.returncode == 1
    assert says(done.stderr, "'gdop'", "did you mean 'gdpo'")
    assert not (tmp_path / "ray").exists()
