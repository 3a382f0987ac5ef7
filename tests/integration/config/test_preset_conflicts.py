"""Presets against the user's own files and command line, composed by verl's own entry point."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests import fresh
from tests.facts import says
from tests.integration.config.preset_cases import (
    AFTER,
    EARLY,
    ELSEWHERE,
    ESTIMATOR,
    INTERPOLATED,
    KEYS,
    LATE,
    LOST,
    MISSPELT,
    OTHER,
    SWEEPS,
    TWO,
)
from tests.integration.configs import compose
from tests.integration.test_driver import main_ppo
from verl_ext.errors import ConfigurationError
from verl_ext.integration.config.checks import check_run

# verl's program, with a line in place of Ray and the training. One process imports verl, reads its files and forks for
# each run.
PROGRAM = """
import json, os, sys
sys.path.insert(0, ROOT)
from tests.integration.configs import compose
from verl.trainer import main_ppo
compose()

def run_ppo(config, task_runner_class):
    keys = config.algorithm.rewards["keys"]
    print("TRAINS", config.algorithm.adv_estimator, config.trainer.default_local_dir, keys, flush=True)

main_ppo.run_ppo = run_ppo
for folder, arguments in json.load(open("runs.json")):
    if (child := os.fork()) == 0:
        os.chdir(folder)
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
        sys.argv[1:] = arguments
        status = 1
        try:
            main_ppo.main()
            status = 0
        finally:  # hydra.main has printed the error
            sys.stderr.flush()
            os._exit(status)
    with open(os.path.join(folder, "status"), "w") as file:
        file.write(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
"""


@dataclass
class Done:
    status: int
    out: str
    err: str

    def trained(self) -> list[list[str]]:
        """Estimator, folder of the checkpoints and rewards of each training."""
        assert self.status == 0, self.err
        return [line.split(maxsplit=3)[1:] for line in self.out.splitlines() if line.startswith("TRAINS")]

    def refused(self) -> str:
        """What was said instead of training."""
        assert self.status == 1, self.out
        assert "TRAINS" not in self.out
        assert "ConfigurationError" in self.err
        return self.err


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Done]:
    """How each run ended."""
    home = tmp_path_factory.mktemp("runs")
    cases = {**LATE, **EARLY, **OTHER, **TWO, **SWEEPS, **ESTIMATOR, **ELSEWHERE, **MISSPELT}
    cases |= {f"after: {name}": case for name, case in AFTER.items()} | INTERPOLATED
    runs = []
    for number, (files, line, *_) in enumerate(cases.values()):
        own = home / str(number) / "own"
        own.mkdir(parents=True)
        for name, text in files.items():
            (own / name).parent.mkdir(exist_ok=True)
            (own / name).write_text(text)
        arguments = [*line.replace("OWN", str(own)).split(), "actor_rollout_ref.actor.use_dynamic_bsz=True"]
        runs.append((str(own.parent), arguments))
    (home / "runs.json").write_text(json.dumps(runs))
    done = fresh.run(PROGRAM.replace("ROOT", repr(str(Path(__file__).parents[3]))), folder=home, timeout=1800)
    assert done.returncode == 0, done.stderr

    def read(folder: Path) -> Done:
        return Done(int((folder / "status").read_text()), (folder / "out").read_text(), (folder / "err").read_text())

    return {name: read(home / str(number)) for number, name in enumerate(cases)}


@pytest.mark.parametrize("place", LATE)
def test_a_preset_that_replaces_values_of_the_user_is_refused_wherever_it_stands(place: str, ends) -> None:
    told = ends[place].refused()
    assert all(lost in told for lost in LOST), told
    assert "algorithm.gdpo.whiten=token (by" not in told
    assert "defaults: [ppo_trainer, verl_ext: dgpo, _self_]" in told


@pytest.mark.parametrize("place", AFTER)
def test_a_preset_after_self_is_refused_even_if_it_replaces_nothing(place: str, ends) -> None:
    file, found, right = AFTER[place][2:]
    assert says(ends[f"after: {place}"].refused(), file, f"defaults: {found}", f"defaults: {right}")


def test_an_interpolation_on_the_command_line_is_read_in_the_run_s_own_configuration(ends) -> None:
    assert [run[0] for run in ends["of the run"].trained()] == ["gdpo"]
    assert says(ends["of nothing"].refused(), "algorithm.gdpo", "VERL_EXT_NO_SUCH")


@pytest.mark.parametrize("place", MISSPELT)
def test_a_preset_under_a_misspelt_name_is_refused(place: str, ends) -> None:
    group, _, chosen = MISSPELT[place][1].partition("=")
    assert says(ends[place].refused(), group.removeprefix("+"), f"did you mean +verl_ext={chosen}")


@pytest.mark.parametrize("place", EARLY)
def test_a_preset_that_replaces_nothing_is_accepted(place: str, ends) -> None:
    ((estimator, _, keys),) = ends[place].trained()
    assert (estimator, keys) == ("dgpo", "['acc', 'format']")
    assert "could not check" not in ends[place].out + ends[place].err


def test_the_estimator_of_a_file_is_replaced_by_a_preset_on_the_command_line_only(ends) -> None:
    late, chosen = (ends[name] for name in ESTIMATOR)
    assert "algorithm.adv_estimator=grpo (by gdpo)" in late.refused()
    assert [run[0] for run in chosen.trained()] == ["gdpo"]


def test_a_file_of_verls_own_holds_nothing_that_anyone_chose(tmp_path: Path) -> None:
    """The preset replaces verl's own loss_agg_mode=token-mean there."""
    arguments = ("+verl_ext=drgrpo", "async_training=null", "algorithm.drgrpo.check_loss=maybe")
    program = "verl.experimental.fully_async_policy.fully_async_main"
    done = main_ppo(tmp_path, *arguments, program=program)
    assert done.returncode == 1
    assert says(done.stderr, "algorithm.drgrpo.check_loss", "True or False", "'maybe'")
    assert "loss_agg_mode=token-mean (by" not in done.stderr
    assert "could not check" not in done.stdout + done.stderr


@pytest.mark.parametrize("place", OTHER)
def test_a_preset_of_another_estimator_than_the_one_in_force_is_refused(place: str, ends) -> None:
    told, estimator = ends[place].refused(), OTHER[place][2]
    for line in (f"algorithm.adv_estimator={estimator}", f"adv_estimator: {estimator}", "+verl_ext=gdpo"):
        assert line in told
    assert "verl_ext: gdpo" in told


@pytest.mark.parametrize("place", TWO)
def test_presets_of_two_estimators_are_refused(place: str, ends) -> None:
    told = ends[place].refused()
    assert "+verl_ext=drgrpo" in told
    assert "+verl_ext=gdpo" in told


@pytest.mark.parametrize("place", ELSEWHERE)
def test_a_preset_in_a_package_of_its_own_is_refused(place: str, ends) -> None:
    """verl would train with its own default without it."""
    told = ends[place].refused()
    assert "elsewhere.deep" in told
    assert "+verl_ext=gdpo" in told
    assert "_self_" not in told  # moving it would not help


@pytest.mark.parametrize("form", SWEEPS)
def test_a_sweep_over_presets_trains_with_each(form: str, ends) -> None:
    """Hydra first composes without what is swept over, so settings that only a swept preset brings need `++`."""
    runs = ends[form].trained()
    assert [(name, Path(folder).name, keys) for name, folder, keys in runs] == [
        (name, name, "['acc', 'format']") for name in ("gdpo", "dgpo")
    ]


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (("+verl_ext=gdpo", "algorithm.adv_estimator=grpo"), "algorithm.adv_estimator=grpo"),
        (("+verl_ext=[gdpo,drgrpo]",), "+verl_ext=gdpo"),
    ],
)
def test_the_trainer_s_process_which_has_plain_data_and_no_hydra_refuses_too(overrides, part: str) -> None:
    config = OmegaConf.create(OmegaConf.to_container(compose(*overrides, KEYS)))
    with pytest.raises(ConfigurationError, match="preset") as caught:
        check_run(config)
    assert part in str(caught.value)
