"""The quickstart's options, with a script in the place of Python."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.facts import a_line_says

ROOT = Path(__file__).parents[2]
BAR = r'printf "\rTraining Progress: 100%%\n"'


def script(path, body):
    """Write a program that stands for Python and does nothing but `body`; asked for the free memory, it says 16 GB."""
    path.write_text(
        f'#!/bin/bash\n[[ $* != "-c import verl."* ]] || exit 0\n[[ $* != *virtual_memory* ]] || exec echo 16\n{body}\n'
    )
    path.chmod(0o755)
    return path


@pytest.fixture
def quickstart(tmp_path):
    """Runs the quickstart with the scripted Python; its status and what it printed."""

    def run(*options):
        command = [ROOT / "scripts/quickstart.sh", "--python", "./python", "--output", "my runs", *options]
        look = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(command, cwd=tmp_path, timeout=600, **look)
        return done.returncode, done.stdout

    return run


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--steps"], ("--steps", "value")),
        (["--steps", "0"], ("--steps", "'0'", "integer from 1")),
        (["--bogus"], ("unknown", "--bogus")),
    ],
)
def test_a_wrong_option_is_refused_before_anything_starts(options, told, quickstart):
    code, output = quickstart(*options)
    assert code == 2
    assert a_line_says(output, "quickstart:", *told)
    assert "==" not in output


TRAIN = "data.train_files=x"  # so that run.sh does not look for the data


def test_both_arms_train_with_the_options_and_paths_are_relative_to_the_caller(quickstart, tmp_path):
    # One write per call: both trainings run at once.
    script(tmp_path / "python", f'printf "%s\\n" "$(printf "%s|" "$@")" >>"{tmp_path}/calls"; {BAR}')
    code, output = quickstart("--steps", "3", "--", "a.b=c d", TRAIN)
    assert code == 0, output
    prepare, *trainings, report, _, comparison = (tmp_path / "calls").read_text().splitlines()
    assert prepare.startswith("recipes/quickstart/prepare_data.py|")
    assert len(trainings) == 2
    for arm in ("grpo", "gdpo"):
        (call,) = (call for call in trainings if f"|quickstart/{arm}|" in call)
        for part in ("trainer.total_training_steps=3", "data.seed=1", "a.b=c d", f"{tmp_path}/my runs/{arm}/"):
            assert part in call
        assert f"{arm} Training Progress: 100%" in output
        assert f"{arm}={tmp_path}/my runs/{arm}|" in report
    assert f"--plot|{tmp_path}/my runs/rewards.png|" in report
    assert f"compare|{tmp_path}/my runs/grpo/dump|" in comparison


def test_a_part_that_fails_ends_it_with_its_status_before_the_next(quickstart, tmp_path):
    failing, next_part = "quickstart/grpo", "report"
    script(tmp_path / "python", f'echo "$*" | tee -a {tmp_path}/calls; [[ $* != *{failing}* ]] || exit 7')
    code, output = quickstart("--", TRAIN)
    assert code == 7
    assert next_part not in (tmp_path / "calls").read_text()
    assert failing in output  # the end of its log
