"""The quickstart's options and its environment, with scripts in the place of Python."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.facts import a_line_says, says
from tests.signals import as_from_a_terminal, under_nohup
from tests.tiny.waiting import pids_in
from verl_ext.registry import BUILT_IN

ROOT = Path(__file__).parents[2]


def script(path, body, beside="true", free=16):
    """A program that stands for Python.

    The import beside the task, where that is not made yet, does `beside`. Asked for the free memory, it says `free`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    others = f'[[ $* != "-c import verl."* ]] || exec {beside}\n[[ $* != *free_bytes* ]] || exec echo {free}'
    path.write_text(f"#!/bin/bash\n{others}\n{body}\n")
    path.chmod(0o755)
    return path


def quickstart(folder, *options, **environment):
    return subprocess.run(
        [ROOT / "scripts/quickstart.sh", *options],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--steps"], ("--steps", "value")),
        (["--steps=3"], ("unknown", "--steps=3")),
        (["--steps", "0"], ("--steps", "'0'", "integer from 1")),
        (["--steps", "08"], ("--steps", "'08'")),
        (["--ranks", "0"], ("--ranks", "'0'", "integer from 1")),
        (["--seed", "-1"], ("--seed", "'-1'", "integer from 0")),
        (["--seed", "99999999999"], ("--seed", "'99999999999'")),
        (["--task", "sum"], ("--task", "'sum'", "tools, sums")),
        (["--estimator", "ppo"], ("--estimator", "'ppo'", *sorted({"grpo", *BUILT_IN} - {"compose"}))),
        (["--rollout", "sglang"], ("--rollout", "'sglang'", "embedded, vllm")),
        (["--bogus"], ("unknown", "--bogus")),
    ],
)
def test_a_wrong_option_is_refused_before_anything_starts(options, told, tmp_path):
    done = quickstart(tmp_path, *options)
    assert done.returncode == 2
    assert a_line_says(done.stderr, "quickstart:", *told)
    assert done.stdout == ""


def test_the_name_of_an_estimator_may_have_digits_and_underscores(tmp_path):
    """In a copy of the project whose list has one more line."""
    for name in ("scripts/quickstart.sh", "scripts/environment.sh", "recipes/common/launch.sh", "verl_ext/registry.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    with (tmp_path / "verl_ext/registry.py").open("a") as registry:
        registry.write('    "top_2": "verl_ext.estimators.top_2:top_2",\n')
    script(tmp_path / "python", f'printf "%s|" "$@" >>"{tmp_path}/calls"', beside="touch imported")
    run = script(tmp_path / "recipes/mine/run.sh", 'source "$(dirname "$0")/../common/launch.sh"; echo "$ALGORITHM"')
    for command in ([tmp_path / "scripts/quickstart.sh", "--estimator", "top_2", "--python", "./python"], [run]):
        environment = {**os.environ, "ALGORITHM": "top_2"}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
    assert done.stdout == "top_2\n"
    assert "|tools|top_2|" in (tmp_path / "calls").read_text()
    assert (tmp_path / "imported").exists()  # while the task is made, which this copy has not


def test_paths_are_meant_from_where_it_is_called(tmp_path):
    # One write per call: both trainings run at once.
    script(tmp_path / "a b/python", f'printf "%s\\n" "$(printf "%s|" "$@")" >>"{tmp_path}/calls"')
    done = quickstart(tmp_path, "--python", "a b/python", "--output", "my runs", "--steps", "3", "--", "a.b=c d")
    assert done.returncode == 0, done.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 4  # the task, two trainings in any order, the report
    run = f"{tmp_path}/my runs/tools-gdpo-3-steps-seed-1-1-ranks-embedded"
    assert (
        f"scripts/train_tiny.py|tools|gdpo|--run|{run}|--steps|3|--seed|1|--ranks|1|--rollout|embedded|a.b=c d|"
    ) in calls[1:3]
    assert f"--plot|{tmp_path}/my runs/tools.png|" in calls[3]
    assert a_line_says(done.stdout, "gdpo", "none", f"{run}/checkpoints")
    tracker = Path(run, "checkpoints/latest_checkpointed_iteration.txt")
    tracker.parent.mkdir(parents=True)
    tracker.write_text("2")  # an override's word, not that of --steps
    done = quickstart(tmp_path, "--python", "a b/python", "--output", "my runs", "--steps", "3")
    assert a_line_says(done.stdout, "gdpo", f"{run}/checkpoints/global_step_2")


@pytest.mark.parametrize(
    ("options", "told"),
    [(["--steps", "0"], ("steps", "at least 1", "found 0")), (["--sed", "3"], ("unknown", "--sed"))],
)
def test_training_refuses_a_wrong_option_in_a_line(options, told, tmp_path):
    command = [sys.executable, ROOT / "scripts/train_tiny.py", "sums", "gdpo", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert says(done.stderr.splitlines()[-1], "error:", *told)


WAITING = """echo $$ >>pids
[[ $1 != *train* ]] || until [[ -e release ]]; do sleep 0.05; done"""


@pytest.fixture
def waiting(tmp_path):
    """Starts the quickstart on a machine with some free memory; its trainings wait until `release` is there."""
    started = []

    def begin(free, *options):
        script(tmp_path / "python", f"cd {tmp_path}\n{WAITING}", free=free)
        command = [ROOT / "scripts/quickstart.sh", "--python", tmp_path / "python", "--output", tmp_path / "runs"]
        process = subprocess.Popen([*command, *options], preexec_fn=as_from_a_terminal, start_new_session=True)
        started.append(process)
        return process

    yield begin
    (tmp_path / "release").touch()
    started[0].wait(60)


def test_both_trainings_run_at_once_and_end_together(waiting, tmp_path):
    process = waiting(10)
    _, *trainings = pids_in(tmp_path / "pids", 3)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(60) == 143
    for pid in trainings:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(("free", "options"), [(9, []), (0, []), (64, ["--ranks", "2"]), (64, ["--rollout", "vllm"])])
def test_without_room_for_two_one_training_follows_the_other(waiting, tmp_path, free, options):
    process = waiting(free, *options)
    pids_in(tmp_path / "pids", 2)
    time.sleep(0.5)
    assert len(pids_in(tmp_path / "pids", 2)) == 2
    (tmp_path / "release").touch()
    assert process.wait(60) == 0
    assert len(pids_in(tmp_path / "pids", 4)) == 4


@pytest.mark.parametrize(("failing", "next_one"), [("tools", "train_tiny"), ("grpo", "report")])
def test_a_part_that_fails_ends_it_with_its_status_before_the_next(failing, next_one, tmp_path):
    script(tmp_path / "python", f'echo "$*" >>{tmp_path}/calls; [[ $2 != {failing} && $3 != {failing} ]] || exit 7')
    assert quickstart(tmp_path, "--python", "./python").returncode == 7
    assert next_one not in (tmp_path / "calls").read_text()


@pytest.mark.parametrize(("signals", "status"), [(under_nohup, 0), (as_from_a_terminal, 129)])
def test_under_nohup_it_outlives_its_terminal(signals, status, tmp_path):
    """Each part waits until the terminal is closed: the script and the part are told so."""
    body = f"echo $$ >>{tmp_path}/pids; while [[ ! -e {tmp_path}/closed ]]; do sleep 0.05; done; sleep 0.3"
    script(tmp_path / "python", body)
    command = [ROOT / "scripts/quickstart.sh", "--python", tmp_path / "python", "--output", tmp_path / "runs"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=signals, start_new_session=True
    )
    pids = tmp_path / "pids"
    try:
        for group in (process.pid, *pids_in(pids)):
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGHUP)
        (tmp_path / "closed").touch()
        process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == status
    assert len(pids.read_text().split()) == (4 if status == 0 else 1)  # the task, two trainings, the report


def test_a_task_that_is_there_shows_no_bar(tmp_path):
    command = [sys.executable, ROOT / "scripts/make_tiny_task.py", "sums", "--folder", "sums", "--warm-up-steps", "2"]
    first, second = (
        subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True).stdout
        for _ in range(2)
    )
    assert "Warm-up: 100%" in first
    assert a_line_says(first, "sums", "made")
    assert "Warm-up" not in second
    assert a_line_says(second, "sums", "already")


FAKE = """case "$*" in
  *version_info\\[:2\\]\\)) echo 3.11 && exit ;;
esac
echo "$@" >>"$CALLS"
case "$1 $2" in
  "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
esac"""


@pytest.fixture
def environment(tmp_path):
    """Calls `make_environment` in a project of its own; what was asked of the fake Python."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/environment.sh").write_text((ROOT / "scripts/environment.sh").read_text())
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "constraints.txt").write_text("torch==1.2.3\n")
    script(tmp_path / "fake", FAKE)

    def call(extras="cpu", python=None):
        (tmp_path / "calls").write_text("")
        done = subprocess.run(
            ["bash", "-euc", f"source scripts/environment.sh; make_environment .env {extras} constraints.txt"],
            cwd=tmp_path,
            env={**os.environ, "PYTHON": str(python or tmp_path / "fake"), "CALLS": str(tmp_path / "calls")},
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done, (tmp_path / "calls").read_text()

    return call


def test_an_environment_is_made_once_and_again_for_another_extra(environment, tmp_path):
    done, calls = environment()
    assert done.returncode == 0, done.stderr
    assert "-m venv .env\n" in calls
    assert "torch==1.2.3\n" in calls
    assert "--editable .[cpu]\n" in calls
    assert environment()[1] == ""
    assert "--editable .[cpu,plot]\n" in environment("cpu,plot")[1]
    assert environment("plot")[1] == ""
    (tmp_path / "pyproject.toml").write_text("changed")
    assert "--editable .[cpu]\n" in environment()[1]


def test_an_interrupted_venv_is_made_again(environment, tmp_path):
    script(tmp_path / ".env/bin/python", 'echo "No module named pip" >&2; exit 1')
    done, calls = environment()
    assert done.returncode == 0, done.stderr
    assert "-m venv .env\n" in calls
    assert (tmp_path / ".env/installed").exists()


def test_an_interrupted_installation_is_not_taken_for_a_finished_one(environment, tmp_path):
    script(tmp_path / "fake", FAKE + "\n[[ $* != *--editable* ]]")
    assert environment()[0].returncode != 0
    assert not (tmp_path / ".env/installed").exists()


def test_a_python_that_is_not_there_is_named(environment):
    done, _ = environment(python="/no/python")
    assert done.returncode == 1
    assert all(part in done.stderr for part in ("/no/python", "3.10, 3.11 or 3.12", "set PYTHON\n"))
    assert done.stderr.count("\n") == 1
    environment()
    assert "/no/python" in environment(python="/no/python")[0].stderr


def test_a_python_that_is_too_old_or_too_new_is_refused(environment, tmp_path):
    for version in ("3.9", "3.13", "3.1", "2.7"):
        script(tmp_path / "fake", FAKE.replace("3.11", version))
        done, calls = environment()
        assert (done.returncode, calls) == (1, "")
        assert "3.10, 3.11 or 3.12" in done.stderr
        assert f"{tmp_path}/fake" in done.stderr


def test_an_environment_of_another_python_is_refused(environment, tmp_path):
    environment()
    script(tmp_path / "other", FAKE.replace("3.11", "3.12"))
    done, calls = environment(python=tmp_path / "other")
    assert (done.returncode, calls) == (1, "")
    assert ".env has Python 3.11" in done.stderr
    assert environment()[0].returncode == 0
