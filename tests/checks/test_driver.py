"""verl's own command lines: what is wrong stops them in the driver, before Ray starts."""

import pytest

from tests import fresh
from tests.facts import says


def main_ppo(folder, *arguments, program="verl.trainer.main_ppo"):
    return fresh.run(program, *arguments, module=True, folder=folder)


SEARCH = "hydra.searchpath=[pkg://verl.trainer.config]"
# With V1 see `checks/test_command`. The fully asynchronous trainer never calls verl's own check.
PROGRAMS = {
    "trainer.main_ppo": ("trainer.use_v1=False", "algorithm.adv_estimator=gdop", ("'gdop'", "did you mean 'gdpo'")),
    "experimental.one_step_off_policy.main_ppo": (SEARCH, "algorithm.adv_estimator=dgpo", ("dgpo", "separate_async")),
    "experimental.fully_async_policy.fully_async_main": (SEARCH, "+verl_ext=hadw", ("hadw", "separate_async")),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_entry_point_stops_before_ray_starts(tmp_path, program):
    *arguments, words = PROGRAMS[program]
    done = main_ppo(tmp_path, *arguments, f"+ray_kwargs.ray_init._temp_dir={tmp_path}/ray", program=f"verl.{program}")
    assert done.returncode == 1
    assert says(done.stderr, *words), done.stderr
    assert not (tmp_path / "ray").exists()
