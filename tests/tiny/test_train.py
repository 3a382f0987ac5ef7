from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from tests.facts import facts
from tests.signals import as_from_a_terminal, in_the_background_of_a_script, under_nohup
from tests.tiny.waiting import pids_in
from verl_ext.cpu.tiny import train as module
from verl_ext.cpu.tiny.make import Recipe, make
from verl_ext.cpu.tiny.tasks import TASKS
from verl_ext.cpu.tiny.train import ESTIMATORS, Training, TrainingError, checkpoint, overrides, train
from verl_ext.errors import ConfigurationError

TRAINING = Training("sums", "gdpo", steps=2)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("tiny") / "sums"
    make(folder, Recipe("sums", warm_up_steps=1, train_rows=4, val_rows=4))
    return folder


@pytest.fixture
def verl(tmp_path, monkeypatch):
    """Stands in for verl's entry point: a shell script whose body the test gives."""

    def become(body):
        path = tmp_path / "python"
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return become


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_overrides_compose_and_pass_every_check_that_a_run_begins_with(task, estimator, tmp_path):
    pytest.importorskip("verl")
    from tests.integration.configs import compose
    from verl_ext.cpu.checks import check
    from verl_ext.integration.checks import check_run

    config = compose(*overrides(Training(task, estimator), tmp_path, tmp_path / "run"))
    check(config)
    check_run(config)
    assert config.algorithm.adv_estimator == estimator
    assert tuple(config.algorithm.rewards["keys"]) == TASKS[task].keys


def test_seed_steps_and_ranks_reach_verl(tmp_path):
    pytest.importorskip("verl")
    from tests.integration.configs import compose

    config = compose(*overrides(Training("tools", "gdpo", 7, 5, ranks=2), tmp_path, tmp_path / "run"))
    assert (config.trainer.total_training_steps, config.trainer.save_freq) == (7, 7)
    assert config.trainer.n_gpus_per_node == 2
    assert config.data.seed == config.actor_rollout_ref.rollout.seed == 5
    assert config.actor_rollout_ref.actor.data_loader_seed == 5
    assert config.algorithm.rollout_correction.bypass_mode


@pytest.mark.parametrize(
    "folder", ["a b (1)", "it's", "x,y", "k=v", "über#~!&", "[a]{b}", "back\\slash", "a\\'b", "\\"]
)
def test_any_folder_will_do(folder, tmp_path):
    pytest.importorskip("verl")
    from tests.integration.configs import compose

    data, run = tmp_path / folder / "data", tmp_path / folder / "run"
    config = compose(*overrides(TRAINING, data, run))
    assert config.data.train_files == f"{data}/train.parquet"
    assert config.data.val_files == f"{data}/val.parquet"
    assert config.actor_rollout_ref.model.path == f"{data}/model"
    assert config.trainer.default_local_dir == f"{run}/checkpoints"


def test_a_folder_that_hydra_takes_for_a_reference_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=facts("${x}", "another folder")):
        overrides(TRAINING, tmp_path / "${x}", tmp_path / "run")


def test_progress_is_shown_the_rest_is_in_the_log_and_a_finished_run_is_not_repeated(data, tmp_path, verl):
    verl(r"echo verl starts; printf 'prefix \rTraining Progress: 1/2\rTraining Progress: 2/2\n'")
    shown = []
    assert train(TRAINING, data, tmp_path / "run", show=shown.append)
    assert shown == ["Training Progress: 1/2", "Training Progress: 2/2"]
    assert "verl starts\n" in (tmp_path / "run/log.txt").read_text()
    assert not train(TRAINING, data, tmp_path / "run")
    (tmp_path / "run/checkpoints").mkdir()  # verl would go on from there
    assert train(TRAINING, data, tmp_path / "run", more=["trainer.nnodes=1"])  # another configuration is another run
    assert not (tmp_path / "run/checkpoints").exists()


def test_a_run_of_an_earlier_version_with_other_overrides_is_another_run(data, tmp_path, verl, monkeypatch):
    verl("exit 0")
    earlier = [part for part in overrides(TRAINING, data, tmp_path / "run") if "bypass_mode" not in part]
    with monkeypatch.context() as patched:
        patched.setattr("verl_ext.cpu.tiny.train.overrides", lambda *_: earlier)
        assert train(TRAINING, data, tmp_path / "run")
    assert train(TRAINING, data, tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    assert not train(TRAINING, data, tmp_path / "moved")


def test_a_run_on_another_model_or_data_is_another_run(data, tmp_path, verl):
    verl("exit 0")
    assert train(TRAINING, data, tmp_path / "run")
    other = tmp_path / "other"
    make(other, Recipe("sums", warm_up_steps=1, train_rows=4, val_rows=4, seed=1))
    assert train(TRAINING, other, tmp_path / "run")


def test_a_folder_of_something_else_is_not_overwritten(data, tmp_path, verl):
    verl("exit 0")
    folder = tmp_path / "mine"
    folder.mkdir()
    assert train(TRAINING, data, folder)  # an empty one is as good as none
    (folder / "finished.json").unlink()
    (folder / "log.txt").write_text("")  # killed at its very start
    assert train(TRAINING, data, folder)
    for name in ("notes.txt", "log.txt"):
        other = tmp_path / name.partition(".")[0]
        other.mkdir()
        (other / name).write_text("mine\n")
        with pytest.raises(ConfigurationError, match=facts(other, "not a run")):
            train(TRAINING, data, other)
        assert (other / name).read_text() == "mine\n"


def test_a_folder_in_which_another_process_trains_is_refused(data, tmp_path, verl):
    verl("echo 'Training Progress: 1/2'")

    def second(bar):
        with pytest.raises(ConfigurationError, match=facts("another process", f"{tmp_path}/run")):
            train(TRAINING, data, tmp_path / "run")
        assert (tmp_path / "run/log.txt").read_text().count("verl.trainer.main_ppo") == 1

    assert train(TRAINING, data, tmp_path / "run", show=second)


def test_a_run_without_a_checkpoint_names_none(tmp_path):
    assert checkpoint(tmp_path) is None
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/latest_checkpointed_iteration.txt").write_text("20\n")
    assert checkpoint(tmp_path) == tmp_path / "checkpoints/global_step_20"


def test_verl_is_started_with_the_overrides_the_logs_and_a_short_folder_for_ray(data, tmp_path, verl):
    verl('echo "$@"; echo "file=$VERL_FILE_LOGGER_PATH"')
    train(TRAINING, data, tmp_path / "run", more=["a.b=c"])
    log = (tmp_path / "run/log.txt").read_text()
    assert "-u -m verl.trainer.main_ppo +verl_ext=[cpu,gdpo]" in log
    assert log.splitlines()[1].endswith(" a.b=c")
    assert f"file={tmp_path}/run/metrics.jsonl" in log


def test_a_run_that_fails_is_an_error_with_the_end_of_its_log_and_is_not_finished(data, tmp_path, verl):
    verl("echo no memory; exit 3")
    for _ in range(2):
        with pytest.raises(TrainingError, match=facts("status 3", tmp_path / "run/log.txt", "no memory")):
            train(TRAINING, data, tmp_path / "run")


@pytest.mark.parametrize(
    "body",
    [
        "sleep 300 & echo $! >pid; printf 'Training Progress: 1/2\\n'; wait",  # a background job hears no interrupt
        "trap '' INT; echo $$ >pid; printf 'Training Progress: 1/2\\n'; while true; do sleep 1; done",
    ],
)
def test_an_interruption_ends_the_process_and_its_children_also_those_that_do_not_hear_it(
    body, data, tmp_path, verl, monkeypatch
):
    monkeypatch.setattr(module, "PATIENCE", 0.5)
    verl(body)

    def interrupt(bar):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(TRAINING, data, tmp_path / "run", show=interrupt)
    (pid,) = pids_in(tmp_path / "run/pid")
    deadline = time.monotonic() + 10
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid)


def alive(pid):
    try:
        with open(f"/proc/{pid}/status") as status:
            return "State:\tZ" not in status.read()
    except FileNotFoundError:
        return False


SCRIPT = """
import sys
from pathlib import Path
from verl_ext.cpu.tiny import train
sys.executable, train.PATIENCE = sys.argv[3], 2.0
train.train(train.Training("sums", "gdpo", steps=2), Path(sys.argv[1]), Path(sys.argv[2]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_it_ends_verl_too(data, tmp_path, verl, number):
    """SIGHUP: a terminal that is closed."""
    python = sys.executable
    verl(f"echo $$ >{tmp_path}/pid; exec sleep 300")
    with training(python, data, tmp_path, as_from_a_terminal) as process:
        process.send_signal(number)
        assert process.wait(30) == 128 + number
        assert not alive(int((tmp_path / "pid").read_text()))


@contextmanager
def training(python, data, folder, signals):
    """A process that trains, in which verl has written its process's id; nothing of it is left behind."""
    command = [python, "-c", SCRIPT, data, folder / "run", sys.executable]
    process = subprocess.Popen(command, preexec_fn=signals, start_new_session=True)
    pid = folder / "pid"
    try:
        pids_in(pid, process=process)
        yield process
    finally:
        process.kill()
        process.wait()
        if pid.exists() and alive(int(pid.read_text())):
            os.killpg(int(pid.read_text()), signal.SIGKILL)


def test_a_run_under_nohup_outlives_its_terminal(data, tmp_path, verl):
    python = sys.executable
    verl(f"echo $$ >{tmp_path}/pid; while [[ ! -e {tmp_path}/closed ]]; do sleep 0.05; done; sleep 0.5")
    with training(python, data, tmp_path, under_nohup) as process:
        for pid in (process.pid, int((tmp_path / "pid").read_text())):
            os.killpg(pid, signal.SIGHUP)
        (tmp_path / "closed").touch()
        assert process.wait(30) == 0
    assert (tmp_path / "run/finished.json").exists()


def test_verl_is_interrupted_where_an_interrupt_is_ignored(data, tmp_path, verl):
    """A shell cannot trap what it inherits as ignored, nor does Python hear it."""
    python = sys.executable
    verl(f"trap 'touch {tmp_path}/heard; exit 130' INT; echo $$ >{tmp_path}/pid; while true; do sleep 0.05; done")
    with training(python, data, tmp_path, in_the_background_of_a_script) as process:
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
    assert (tmp_path / "heard").exists()


@pytest.mark.parametrize("task", ["tools", "sums"])
def test_a_folder_without_the_task_is_refused_with_the_command_that_makes_it(data, tmp_path, task):
    folder = tmp_path if task == "sums" else data
    with pytest.raises(ConfigurationError, match=facts(f"scripts/make_tiny_task.py {task} --folder {folder}")):
        train(Training(task, "grpo"), folder, tmp_path / "run")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"task": "tool"}, ("'tool'", "did you mean 'tools'")),
        ({"estimator": "gdop"}, ("'gdop'", "did you mean 'gdpo'")),
        ({"rollout": "vlm"}, ("'vlm'", "did you mean 'vllm'")),
        ({"steps": 0}, ("steps", "at least 1", "found 0")),
        ({"ranks": 0}, ("ranks", "at least 1", "found 0")),
    ],
)
def test_wrong_settings_are_refused(settings, told):
    with pytest.raises(ConfigurationError, match=facts(*told)):
        Training(**{"task": "tools", "estimator": "gdpo", **settings})
