"""Presets against the user's own files and command line, composed by verl's own entry point."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests import fresh
from tests.facts import says
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
KEYS = "algorithm.rewards.keys=[acc,format]"
PRIMARY = "hydra: {searchpath: ['pkg://verl.trainer.config']}\ndefaults: %s\n"
IN_A_GROUP = "# @package _global_\ndefaults: %s\n"
OURS = """
algorithm:
  rewards: {keys: [acc, format], weights: [1, 0.5]}
  dgpo: {dqw_temp: 5.0, dqw: false}
  gdpo: {whiten: token}
actor_rollout_ref: {actor: {loss_agg_mode: seq-mean-token-mean}}
"""
# Of these the preset of dgpo sets all but gdpo's.
LOST = (
    "algorithm.rewards.keys=['acc', 'format'] (by None)",
    "algorithm.rewards.weights=[1, 0.5] (by None)",
    "algorithm.dgpo.dqw_temp=5.0 (by 2.0)",
    "algorithm.dgpo.dqw=False (by True)",
    "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean (by token-mean)",
)
NO_PRESET = {"mine.yaml": PRIMARY % "[ppo_trainer, _self_]" + OURS}
GRPO = "algorithm: {adv_estimator: grpo, rewards: {keys: [acc, format]}}"
MINE = "--config-path OWN --config-name mine"

# The user's files, in the folder OWN, and the command line.
LATE = {
    "on the command line": (NO_PRESET, f"{MINE} +verl_ext=dgpo"),
    "on the command line with a package": (NO_PRESET, f"{MINE} +verl_ext@_global_=dgpo"),
    "on the command line in a list": (NO_PRESET, f"{MINE} +verl_ext=[cpu,dgpo]"),
    "on the command line of a sweep": (NO_PRESET, f"{MINE} --multirun +verl_ext=dgpo,hadw"),
    "after _self_": ({"mine.yaml": PRIMARY % "[ppo_trainer, _self_, verl_ext: dgpo]" + OURS}, MINE),
    "after _self_ in a list": ({"mine.yaml": PRIMARY % "[ppo_trainer, _self_, verl_ext: [cpu, dgpo]]" + OURS}, MINE),
    "after another file of the user's": (
        {
            "mine.yaml": PRIMARY % "[base, verl_ext: dgpo, _self_]",
            "base.yaml": "defaults: [ppo_trainer, _self_]" + OURS,
        },
        MINE,
    ),
    "within another file of the user's": (
        {
            "mine.yaml": PRIMARY % "[base, _self_]",
            "base.yaml": "defaults: [ppo_trainer, _self_, verl_ext: dgpo]" + OURS,
        },
        MINE,
    ),
    "in a group of the user's": (
        {"experiment/mine.yaml": IN_A_GROUP % "[_self_, /verl_ext: dgpo]" + OURS},
        "--config-dir OWN +experiment=mine",
    ),
    "in a group on the search path": (
        {"experiment/mine.yaml": IN_A_GROUP % "[_self_, '/verl_ext@_global_': [dgpo]]" + OURS},
        "hydra.searchpath=[file://OWN] +experiment=mine",
    ),
}
EARLY = {
    "before _self_": ({"mine.yaml": PRIMARY % "[ppo_trainer, verl_ext: dgpo, _self_]" + OURS}, MINE),
    "within another file of the user's, before": (
        {
            "mine.yaml": PRIMARY % "[base, _self_]",
            "base.yaml": "defaults: [ppo_trainer, 'verl_ext@_global_': [dgpo], _self_]" + OURS,
        },
        MINE,
    ),
    "in a group of the user's, before": (
        {"experiment/mine.yaml": IN_A_GROUP % "[/verl_ext: dgpo, _self_]" + OURS},
        "--config-dir OWN +experiment=mine",
    ),
    "as the file's base": ({"mine.yaml": PRIMARY % "[dgpo, _self_]" + OURS}, MINE),
    # One of them as the preset has it: the user says so now.
    "repeated on the command line": (
        NO_PRESET,
        f"{MINE} +verl_ext=dgpo {KEYS} algorithm.rewards.weights=[1,0.5] algorithm.dgpo.dqw_temp=5 "
        "algorithm.dgpo.dqw=True actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
    ),
    "deleted on the command line": (
        {"mine.yaml": PRIMARY % "[ppo_trainer, _self_]" + "algorithm: {dgpo: {dqw_temp: 5.0}}"},
        f"{MINE} +verl_ext=dgpo {KEYS} ~algorithm.dgpo.dqw_temp",
    ),
}
OTHER = {
    "further down in the file": (
        {"mine.yaml": PRIMARY % "[ppo_trainer, verl_ext: gdpo, _self_]" + GRPO},
        MINE,
        "grpo",
    ),
    "further down than the file's base": ({"mine.yaml": PRIMARY % "[gdpo, _self_]" + GRPO}, MINE, "grpo"),
    "verl's own, which the preset stands before": (
        {"mine.yaml": PRIMARY % "[verl_ext: gdpo, ppo_trainer, _self_]"},
        f"{MINE} +{KEYS}",
        "gae",
    ),
    "estimator on the command line": (
        {"mine.yaml": PRIMARY % "[ppo_trainer, verl_ext: gdpo, _self_]"},
        f"{MINE} {KEYS} algorithm.adv_estimator=dgpo",
        "dgpo",
    ),
    "both on the command line": ({}, f"+verl_ext=[cpu,gdpo] {KEYS} algorithm.adv_estimator=rloo", "rloo"),
    "both, with a package": ({}, f"+verl_ext@_global_=gdpo {KEYS} algorithm.adv_estimator=grpo", "grpo"),
    "beside the primary configuration": ({}, f"--config-name gdpo {KEYS} algorithm.adv_estimator=grpo", "grpo"),
}
TWO = {
    "two in a list": ({}, f"+verl_ext=[drgrpo,gdpo] {KEYS}"),
    "two in two packages": ({}, f"+verl_ext=drgrpo +verl_ext@_global_=gdpo {KEYS}"),
    "two in two files": ({"mine.yaml": PRIMARY % "[drgrpo, verl_ext: gdpo, _self_]"}, f"{MINE} {KEYS}"),
}
SWEEP = "--multirun +verl_ext=gdpo,dgpo trainer.experiment_name=${algorithm.adv_estimator}"
SWEEPS = {
    "of names": ({}, f"{SWEEP} ++{KEYS} ++algorithm.verl_ext.check_nodes=False"),
    "of lists": ({}, f"{SWEEP.replace('gdpo,dgpo', '[cpu,gdpo],[cpu,dgpo]')} ++{KEYS}"),
    "of a file's preset": (
        {"mine.yaml": PRIMARY % "[ppo_trainer, verl_ext: gdpo, _self_]"},
        f"{MINE} {SWEEP.replace('+', '')} {KEYS}",
    ),
}
ESTIMATOR = {
    "the file's, then the preset": (
        {"mine.yaml": PRIMARY % "[ppo_trainer, _self_, verl_ext: gdpo]" + "algorithm: {adv_estimator: grpo}"},
        f"{MINE} {KEYS}",
    ),
    "the file's, and a preset on the command line": (
        {"mine.yaml": PRIMARY % "[ppo_trainer, _self_]" + "algorithm: {adv_estimator: grpo}"},
        f"{MINE} +verl_ext=gdpo {KEYS}",
    ),
}
ELSEWHERE = {"in a package of its own": ({}, "+verl_ext@elsewhere.deep=gdpo")}


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
    cases = {**LATE, **EARLY, **OTHER, **TWO, **SWEEPS, **ESTIMATOR, **ELSEWHERE}
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


def test_a_preset_in_a_package_of_its_own_is_refused(ends) -> None:
    """verl would train with its own default without it."""
    told = ends["in a package of its own"].refused()
    assert "elsewhere.deep" in told
    assert "+verl_ext=gdpo" in told


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
