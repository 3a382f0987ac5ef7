"""`verl-ext check`: what a run would be told, without starting one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import fresh
from tests.facts import says
from tests.integration.test_driver import main_ppo
from verl_ext.cli import main
from verl_ext.registry import ESTIMATORS

GROUPS = "actor_rollout_ref.rollout.n=8"
GDPO = ("+verl_ext=gdpo", "algorithm.rewards.keys=[acc,format]", GROUPS)
MINE = """
hydra: {searchpath: ['pkg://verl.trainer.config']}
defaults: [ppo_trainer, verl_ext: gdpo, _self_]
algorithm:
  rewards: {keys: [acc, format], weights: [1, 0.5]}
  gdpo: {whiten: %s}
"""


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]):
    """Exit status, output and error output of one call."""

    def run(*arguments: str) -> tuple[int, str, str]:
        status = main(["check", *arguments])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


def test_a_run_that_may_start_is_said_to_with_what_was_judged(check) -> None:
    status, out, err = check(*GDPO, "algorithm.rewards.weights=[1,0.5]", "algorithm.gdpo.whiten=token")
    assert (status, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert ["estimator", "gdpo", "(centre,", "scale_by_std,", "weigh_and_sum,", "whiten)"] in lines
    assert ["rewards", "acc,", "format,", "weights", "1,", "0.5"] in lines
    assert ["whiten", "over", "token"] in lines
    assert ["loss", "vanilla,", "loss_agg_mode=token-mean,", "loss_scale_factor=None"] in lines
    assert ["0", "errors"] in lines
    assert ["0", "warnings"] in lines


def test_all_errors_and_warnings_are_printed_at_once(check) -> None:
    status, out, _ = check(
        GROUPS,
        "algorithm.adv_estimator=gdpo",
        "+algorithm.gdop.whiten=token",
        "trainer.save_freq=abc",
        "actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov",
        "++ray_kwargs.ray_init.runtime_env.env_vars.OMP_NUM_THREADS=2",
    )
    assert status == 1
    errors, _, warnings = out.partition("4 errors\n")[2].partition("1 warning\n")
    for part in (
        "did you mean algorithm.gdpo",
        "trainer.save_freq",
        "env_vars.OMP_NUM_THREADS='2'",
        "+algorithm.rewards.keys=[...]",
    ):
        assert part in errors
    assert "clip_cov" in warnings


def test_each_section_that_cannot_be_read_is_named(check) -> None:
    status, out, _ = check(
        "algorithm.adv_estimator=gdpo",
        "+algorithm.gdpo.whitten=token",
        "+algorithm.rewards.keys=acc",
        "+algorithm.dgpo=3",
        "algorithm.norm_adv_by_std_in_grpo=perhaps",
    )
    assert status == 1
    errors = out.partition("4 errors\n")[2]
    for part in ("did you mean 'whiten'", "algorithm.rewards.keys", "algorithm.dgpo", "norm_adv_by_std_in_grpo"):
        assert part in errors


@pytest.mark.parametrize(
    ("preset", "found", "meant"),
    [("gdpoo", "gdpoo", "gdpo"), ("HADW", "HADW", "hadw"), ("[cpu,dgop]", "dgop", "dgpo")],
)
def test_a_misspelt_preset_is_refused_with_the_one_that_is_meant(
    check, tmp_path: Path, preset: str, found: str, meant: str
) -> None:
    (tmp_path / "mine.yaml").write_text(MINE.replace("verl_ext: gdpo", f"verl_ext: {preset}") % "token")
    for arguments in ((f"+verl_ext={preset}",), ("--config", str(tmp_path / "mine.yaml"))):
        status, _, err = check(*arguments)
        assert status == 1
        assert says(err, repr(found), f"did you mean {meant!r}", f"+verl_ext={meant}", f"verl_ext: {meant}")


@pytest.mark.parametrize(
    ("setting", "meant"),
    [
        ("algorithm.gdpo.whitten=token", "'whiten'"),
        ("algorithm.rewards.weigths=[1,2]", "'weights'"),
        ("algorithm.verl_ext.dump_dirs=x", "'dump_dir'"),
        ("~algorithm.gdpo.epsilom", "'epsilon'"),
        ("algorithm.gdop.whiten=token", "algorithm.gdpo"),
    ],
)
def test_a_misspelt_setting_of_a_preset_is_refused_with_the_one_that_is_meant(check, setting: str, meant: str) -> None:
    status, out, err = check(*GDPO, setting)
    assert (status, out) == (1, "")
    assert says(err, setting.strip("~").split("=")[0].split(".")[2], f"did you mean {meant}")


def test_a_setting_of_verl_s_that_does_not_exist_is_not_said_to_be_ours(check) -> None:
    err = check(*GDPO, "algorithm.kl_ctrl.horizons=3")[2]
    assert says(err, "algorithm.kl_ctrl.horizons")
    assert not says(err, "did you mean")


def test_a_sweep_is_checked_run_by_run(check) -> None:
    status, _, err = check("--multirun", "+verl_ext=gdpo,dgpo")
    assert (status, says(err, "--multirun", "each choice")) == (1, True)


def test_an_estimator_of_verl_s_own_has_no_preset(check) -> None:
    assert says(check("+verl_ext=grpo")[2], "algorithm.adv_estimator=grpo", "no preset")


def test_a_broken_estimator_of_another_package_is_named(check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ESTIMATORS, "_known", {**ESTIMATORS, "mine": "no_such_module:mine"})
    status, _, err = check("+verl_ext=mine")
    assert (status, says(err, "'mine'", "no_such_module:mine")) == (1, True)


def test_a_primary_configuration_that_does_not_exist_is_refused_with_those_that_do(check) -> None:
    assert says(check("--config-name", "gdop")[2], "'gdop'", "did you mean 'gdpo'", "'ppo_trainer'")


def test_a_file_without_verl_s_search_path_is_told_where_was_looked(check, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [ppo_trainer, _self_]\n")
    assert says(check("--config", str(tmp_path / "mine.yaml"))[2], "'ppo_trainer'", "search path")


def test_a_dump_s_folder_is_tried_and_nothing_is_left_there(check, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    for folder, works in ((".", True), ("new/dump", True), ("file", False), ("file/dump", False), ("link", False)):
        dump = f"algorithm.verl_ext.dump_dir={tmp_path / folder}"
        status, out, _ = check(*GDPO, dump)
        assert status == 0  # the trainer may be on another machine
        assert says(out, dump, "algorithm.verl_ext.dump_dir=null") != works
    (tmp_path / "link").unlink()
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


@pytest.mark.parametrize("argument", ["gdpo", "mine.yaml"])
def test_what_is_no_setting_is_refused_with_how_presets_and_files_are_given(check, argument: str) -> None:
    status, out, err = check(argument)
    assert (status, out) == (1, "")
    assert all(part in err for part in (repr(argument), "KEY=VALUE", "+verl_ext=", "--config="))


@pytest.mark.parametrize("whiten", ["token", "tokens"])
def test_a_file_of_one_s_own_is_composed_as_a_run_would(check, tmp_path: Path, whiten: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(MINE % whiten)
    status, out, _ = check("--config", str(path), "algorithm.rewards.weights=[1,2]")
    assert status == (whiten == "tokens")
    assert ("over token" if whiten == "token" else "did you mean 'token'") in out
    assert "weights 1, 2" in out or whiten == "tokens"
    same = check("--config-path", str(tmp_path), "algorithm.rewards.weights=[1,2]", "--config-name", "mine")
    assert same[:2] == (status, out)


@pytest.mark.parametrize(("keys", "status"), [("[acc,format]", 0), ("null", 1)])
def test_a_whole_configuration_is_judged_as_what_it_was_printed_from(check, tmp_path: Path, keys: str, status: int):
    given = ("+verl_ext=gdpo", f"algorithm.rewards.keys={keys}", "algorithm.gdpo.whiten=none")
    printed = main_ppo(tmp_path, "--cfg", "job", *given)
    (tmp_path / "whole.yaml").write_text(printed.stdout)
    found = check("--config", str(tmp_path / "whole.yaml"))
    assert found[0] == status
    assert found == check(*given)


def test_a_preset_on_top_of_a_file_is_judged_as_a_run_judges_it(check, tmp_path: Path) -> None:
    """Hydra's own configuration must be in force for this one."""
    (tmp_path / "mine.yaml").write_text(
        MINE.replace("verl_ext: gdpo, ", "").replace("  gdpo: {whiten: %s}\n", "  dgpo: {dqw_temp: 5.0}\n")
    )
    status, out, _ = check("--config", str(tmp_path / "mine.yaml"), "+verl_ext=dgpo")
    assert status == 1
    assert "algorithm.dgpo.dqw_temp" in out
    from hydra.core.hydra_config import HydraConfig

    assert not HydraConfig.initialized()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--config", "no/such.yaml"), "no/such.yaml"),
        (("--config", "README.md"), "README.md"),
        (("--config-path", "no/such"), "no/such"),
        (("--config", "a.yaml", "--config-name", "b"), "--config-name"),
        (("+verl_ext=gdpo", "algorithm.gdpo.whitten=token"), "algorithm.gdpo.whitten"),
        (("+actor=nobody",), "actor/nobody"),
        (("algorithm.adv_estimator=gdpo,dgpo",), "gdpo,dgpo"),
        (("algorithm.adv_estimator=${nowhere}",), "algorithm.adv_estimator"),
    ],
)
def test_what_cannot_be_composed_is_an_error_of_ours(check, arguments: tuple[str, ...], named: str) -> None:
    status, out, err = check(*arguments)
    assert (status, out) == (1, "")
    assert err.startswith("ConfigurationError: ")
    assert named in err
    assert "\\" not in err


@pytest.mark.parametrize("text", ["", "a: [", "data: {train_batch_size: 8}\n", "[1, 2]\n", "algorithm: 3\n"])
def test_a_file_that_is_no_configuration_of_verl_s_is_an_error_of_ours(check, tmp_path: Path, text: str) -> None:
    (tmp_path / "odd.yaml").write_text(text)
    status, _, err = check("--config", str(tmp_path / "odd.yaml"))
    assert status == 1
    assert "odd" in err
    assert err.startswith("ConfigurationError: ")


def test_an_option_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["check", *GDPO, "--confg-name", "gdpo"])
    assert end.value.code == 2
    assert "--confg-name" in capsys.readouterr().err


def test_it_says_what_the_run_says_and_starts_no_ray(tmp_path: Path) -> None:
    given = ("+verl_ext=drgrpo", "algorithm.rewards.keys=['']", "trainer.resume_mode=always")
    ran = main_ppo(tmp_path, *given, f"+ray_kwargs.ray_init._temp_dir={tmp_path}/ray")
    judged = fresh.run("verl_ext", "check", *given, module=True, folder=tmp_path)
    assert (ran.returncode, judged.returncode) == (1, 1)
    errors = [line for line in judged.stdout.splitlines() if line.startswith("  - ")]
    assert len(errors) == 2
    assert all(line in ran.stderr for line in errors)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outputs"]  # Hydra's, of the run
    code = "import sys; from verl_ext.cli import main; main(['check', '+verl_ext=hadw']); import ray; "
    assert fresh.run(code + "sys.exit(ray.is_initialized())", folder=tmp_path).returncode == 0
