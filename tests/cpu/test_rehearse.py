"""What is read from what the runs of a rehearsal left."""

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pandas
import pytest
from omegaconf import OmegaConf

import verl_ext
from tests.facts import facts, says
from verl_ext.cli import main
from verl_ext.cpu.rehearse import (
    FAILED,
    LOOK,
    MARKER,
    OK,
    Rehearsal,
    emptied,
    of_answers,
    of_prompt,
    of_resume,
    of_training,
    start,
)
from verl_ext.errors import ConfigurationError


def test_a_variable_of_the_run_may_be_a_number(tmp_path, monkeypatch):
    variables = {"runtime_env": {"env_vars": {"NCCL_NVLS_ENABLE": 0}}}
    config = OmegaConf.create({"trainer": {}, "ray_kwargs": {"ray_init": variables}})
    monkeypatch.setattr(sys, "executable", shutil.which("true"))
    assert start(tmp_path / "run", config, time.monotonic() + 60).status == 0


USER = OmegaConf.create(
    {
        "data": {"train_batch_size": 8, "max_prompt_length": 64, "filter_overlong_prompts": True},
        "reward": {"custom_reward_function": {"path": "mine.py"}},
        "algorithm": {"filter_groups": {"enable": True, "metric": "acc"}},
        "actor_rollout_ref": {"rollout": {"agent": {"default_agent_loop": "single_turn_agent"}}},
    }
)
LOADED = {"prompts": "100 90\n10 10\n"}
STARTED = {**LOADED, "started": "\n"}
TRAINED = {**STARTED, "checkpoints/global_step_2/data.pt": ""}
SAVED = {**TRAINED, "checkpoints/latest_checkpointed_iteration.txt": "2"}
RAISED = [
    "ERROR:2026-01-01 00:00:00,000:Error in _run_prompt for uid=1",
    "Traceback (most recent call last):",
    '  File "/venv/site-packages/verl/experimental/reward_loop/reward_loop.py", line 5, in compute_score',
    "ray.exceptions.RayTaskError(KeyError): ray::RewardLoopWorker.compute_score()",
    '  File "/venv/site-packages/verl/experimental/reward_loop/reward_loop.py", line 9, in run_single',
    '  File "/home/user/mine.py", line 12, in compute_score',
    "KeyError: 'answer'",
]


@pytest.fixture
def left(tmp_path):
    """What a run left: its files, its log as Ray writes it, and metrics of each step."""

    def write(files, lines=(), steps=(), *, name="run", status=0, **metrics):
        folder = tmp_path / name
        folder.mkdir()
        for file, text in files.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(text)
        worker = "\x1b[36m(TaskRunnerV1 pid=1)\x1b[0m "
        (folder / "log.txt").write_text("".join(f"{worker}{line}\n" for line in lines))
        rewards = {"critic/score/min": 0.0, "critic/score/mean": 0.5, "critic/score/max": 1.0}
        rewards |= {"critic/advantages/min": -1.0, "critic/advantages/max": 1.0, **metrics}
        if steps:
            records = [{"step": step, "data": {**rewards, "perf/time": step}} for step in steps]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return Rehearsal(folder, status, 1.0)

    return write


def states(findings):
    return {stage: state for stage, state, _ in findings}


def text_of(findings, stage):
    return " ".join(text for name, state, text in findings if (name, state) == (stage, FAILED))


def test_a_message_that_the_chat_template_drops_is_said(tiny, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    prompt = [{"role": "system", "content": " be terse "}, {"role": "user", "content": "2+3"}]
    rows = [{"data_source": "x", "prompt": prompt, "reward_model": {"ground_truth": "5"}}]
    pandas.DataFrame(rows).to_parquet(tmp_path / "train.parquet")
    user = OmegaConf.create({"data": {"train_files": str(tmp_path / "train.parquet"), "prompt_key": "prompt"}})
    each = "{% for message in messages %}{{ message['content'] | trim }}{% endfor %}"
    assert not [*of_prompt(user, tokenizer, each)]
    ((stage, state, text),) = of_prompt(user, tokenizer, each.replace("in messages", "in messages[1:]"))
    assert (stage, state) == ("prompt", LOOK)
    assert "system" in text
    with pytest.raises(ConfigurationError, match="chat template"):
        [*of_prompt(user, tokenizer, "{{ raise_exception('no system message') }}")]


def test_a_run_that_ends_reaches_every_stage(left):
    findings = list(of_training(left(SAVED, (), (1, 2, 3)), USER))
    assert set(states(findings).values()) == {OK}
    assert states(findings).keys() == {"data", "start", "train", "save"}


@pytest.mark.parametrize(
    ("files", "steps", "stage"),
    [
        ({}, (), "data"),
        (LOADED, (), "start"),
        (STARTED, (), "train"),
        (TRAINED, (1,), "save"),
        (SAVED, (1, 2), "train"),
    ],
)
def test_the_first_stage_that_is_not_reached_fails_with_its_error(left, files, steps, stage):
    findings = list(of_training(left(files, ["", "RuntimeError: no"], steps, status=1), USER))
    assert next(name for name, state, _ in findings if state == FAILED) == stage
    assert "RuntimeError: no" in text_of(findings, stage)


@pytest.mark.parametrize(
    ("files", "steps", "stage"), [({}, (), "Ray"), (STARTED, (), "step 1"), (SAVED, (1, 2), "3 steps")]
)
def test_a_time_out_is_told_first_with_its_stage_whatever_error_the_log_has(left, files, steps, stage):
    findings = list(of_training(left(files, ["ValueError: harmless"], steps, status=None), USER))
    (text,) = [text for _, state, text in findings if state == FAILED]
    assert re.match(f"--minutes.*{stage}", text)
    assert text.index(stage) < text.index("ValueError: harmless")
    assert findings[-1][1] == LOOK
    assert "filter_groups" in findings[-1][2]  # on in this run


def test_the_minutes_are_those_of_the_trial_and_both_runs(monkeypatch):
    ends = []
    monkeypatch.setattr("verl_ext.cpu.rehearse.check", lambda _, until: ends.append(until))
    monkeypatch.setattr("verl_ext.cpu.rehearse._stages", lambda _, until: ends.append(until) or [])
    assert main(["rehearse", "--minutes", "2"]) == 0
    assert ends[0] == ends[1] < time.monotonic() + 120


@pytest.mark.parametrize("given", [True, False])
def test_groups_without_a_difference_and_answers_that_are_all_cut_are_said(left, given):
    user = OmegaConf.merge(USER, {"data": {"max_response_length": 32}})
    dead = dict.fromkeys(("critic/advantages/min", "critic/advantages/max"), 0.0)
    for name, metrics, said in (
        ("dead", {**dead, "response_length/min": 3}, ["groups"]),
        ("live", {"response_length/min": 31}, []),
        ("cut", {"response_length/min": 32}, ["answers"] * given),
    ):
        run = left(SAVED, (), (1, 2, 3), name=name, **metrics)
        assert [stage for stage, state, _ in of_answers(run, user, given=given) if state == LOOK] == said


def test_fewer_prompts_than_a_batch_of_the_run_fail_although_the_miniature_needs_less(left):
    findings = list(of_training(left({**SAVED, "prompts": "100 7\n"}, (), (1, 2, 3)), USER))
    assert "7 of 100" in text_of(findings, "data")


def test_the_error_of_an_answer_is_said_with_the_users_line_although_verl_goes_on(left):
    findings = list(of_training(left(SAVED, [*RAISED, *RAISED], (1, 2, 3)), USER))
    text = text_of(findings, "reward")
    assert text.startswith("2 answers")
    assert "KeyError: 'answer'" in text
    assert "/home/user/mine.py:12" in text


PACKAGE = str(Path(verl_ext.__file__).parent)


@pytest.mark.parametrize(
    ("file", "shown"),
    [
        ("/home/user/mine.py", True),
        ("/home/user/verl_ext/mine.py", True),
        (f"{PACKAGE}/rewards/tags.py", False),
        ("/usr/lib64/python3.11/asyncio/tasks.py", False),
        ("<frozen runpy>", False),
        ("python/ray/_raylet.pyx", False),
    ],
)
def test_the_line_of_an_error_is_the_last_of_the_users_own(left, file, shown):
    lines = ['  File "/home/user/first.py", line 3, in f', f'  File "{file}", line 7, in <module>', "KeyError: 1"]
    expected = f"({file}:7)" if shown else "(/home/user/first.py:3)"
    assert expected in left(STARTED, lines, status=1).failure("train")


def test_the_folder_of_a_rehearsal_is_emptied_and_another_is_left_alone(tmp_path):
    with emptied(tmp_path / "new/rehearsal"):
        (tmp_path / "new/rehearsal/train").mkdir()
    (tmp_path / "new/rehearsal/notes.txt").touch()
    with emptied(tmp_path / "new/rehearsal"):
        assert {path.name for path in (tmp_path / "new/rehearsal").iterdir()} == {MARKER, "notes.txt"}
    (tmp_path / "mine/train").mkdir(parents=True)
    (tmp_path / "file").touch()
    for refused in (tmp_path / "mine", tmp_path / "file/rehearsal"):  # the second cannot be written
        with pytest.raises(ConfigurationError, match=facts("trainer.default_local_dir", refused)):
            emptied(refused)
    assert (tmp_path / "mine/train").exists()


def test_a_second_rehearsal_is_refused_and_a_killed_one_leaves_no_lock(tmp_path):
    program = "import pathlib, sys; from verl_ext.cpu.rehearse import emptied\n"
    program += "lock = emptied(pathlib.Path(sys.argv[1])); print(flush=True); input()"
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        first.stdout.readline()
        (tmp_path / "train").mkdir()
        with pytest.raises(ConfigurationError, match=facts("trainer.default_local_dir", tmp_path)):
            emptied(tmp_path)
        assert (tmp_path / "train").exists()
        first.kill()
    emptied(tmp_path).close()
    assert not (tmp_path / "train").exists()


TOOLS = {"agent": {"default_agent_loop": "tool_agent"}, "multi_turn": {"enable": True}}


@pytest.mark.parametrize(
    ("again", "settings", "state"),
    [
        ({}, {}, OK),
        ({"critic/score/mean": 0.5001}, {}, OK),
        ({"critic/score/mean": 0.6}, {}, FAILED),
        ({"critic/score/mean": float("nan")}, {}, FAILED),
        ({"actor/grad_norm": 0.0}, {}, FAILED),
        # Tools and asynchronous trainers may answer otherwise.
        ({"critic/score/mean": 0.6}, {"actor_rollout_ref": {"rollout": TOOLS}}, LOOK),
        ({"critic/score/mean": 0.6}, {"trainer": {"v1": {"trainer_mode": "colocate_async"}}}, LOOK),
    ],
)
def test_the_resumed_step_is_compared_metric_by_metric(left, again, settings, state):
    both = {"nan/in both": float("nan"), "actor/grad_norm": 1.0}
    whole = left(SAVED, (), (1, 2, 3), name="whole", **both)
    findings = of_resume(left(SAVED, (), (3,), **{**both, **again}), whole, OmegaConf.merge(USER, settings))
    assert states(findings) == {"resume": OK, "repeat": state, "validate": OK}


def test_a_step_without_a_gradient_proves_little_of_a_resumed_run(left):
    whole, again = (left(SAVED, (), steps, name=f"{steps}", **{"actor/grad_norm": 0.0}) for steps in ((1, 2, 3), (3,)))
    assert states(of_resume(again, whole, USER))["repeat"] == LOOK


def test_tools_that_fail_or_are_never_called_are_said_although_verl_goes_on(left):
    user = OmegaConf.merge(USER, {"actor_rollout_ref": {"rollout": TOOLS}})
    raised = "WARNING:2026-01-01 00:00:00,000:Error executing tool 'search': 'query'"
    run = left(SAVED, [raised, raised], (1, 2, 3), **{"num_turns/max": 4})
    looks = [(stage, text) for stage, state, text in of_training(run, user) if state == LOOK]
    assert [(stage, text[:1]) for stage, text in looks] == [("tools", "2")]
    assert "Error executing tool 'search': 'query'" in looks[0][1]
    silent = left(SAVED, (), (1, 2, 3), name="silent", **{"num_turns/max": 2})
    assert says([*of_training(silent, user)], "no answer called a tool", "agent_name", "default_agent_loop=tool_agent")
    assert not any("called a tool" in text for _, _, text in of_training(run, user))


def test_an_error_of_the_validation_is_its_own_stage(left):
    whole = left(SAVED, (), (1, 2, 3), name="whole")
    lines = [*RAISED, "INFO:Saving checkpoint to global_step_3", "ValueError: x"]
    findings = list(of_resume(left(SAVED, lines, status=1), whole, USER))
    assert states(findings) == {"resume": OK, "validate": FAILED}
    text = text_of(findings, "validate")
    assert "data.val_files" in text
    assert "ValueError: x" in text
