"""What `rehearse` reads from the files of its runs."""

import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pandas
import pytest
from omegaconf import OmegaConf

import verl_ext
from tests.facts import facts, says
from verl_ext.checks.samples import sample
from verl_ext.cli import main
from verl_ext.cpu.rehearse import (
    ERROR,
    MARKER,
    NOTE,
    OK,
    Rehearsal,
    emptied,
    of_prompt,
    of_responses,
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
    return " ".join(text for name, state, text in findings if (name, state) == (stage, ERROR))


SCORES = """
import json
from pathlib import Path

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    with Path(__file__).with_name("calls.jsonl").open("a") as file:
        print(json.dumps([data_source, int(ground_truth), solution_str]), file=file)
    return {"score": float(solution_str == ground_truth)}
"""
ALTERNATING = ["x", "y", "z"]


@pytest.fixture
def alternating(tmp_path):
    """A configuration whose training data has three sources in turn; the ground truth of a row is its number."""
    rows = [
        {
            "data_source": ALTERNATING[number % 3],
            "prompt": [{"role": "user", "content": "a"}],
            "reward_model": {"ground_truth": str(number)},
        }
        for number in range(300)
    ]
    pandas.DataFrame(rows).to_parquet(tmp_path / "train.parquet", row_group_size=70)
    return OmegaConf.create({"data": {"train_files": str(tmp_path / "train.parquet"), "prompt_key": "prompt"}})


@pytest.mark.parametrize("count", [3, 10, 100, 150, 300, 1000])
def test_the_reward_is_tried_on_rows_of_each_data_source_in_proportion(alternating, count):
    rows = sample(alternating, "data.train_files", count).rows
    assert rows == sample(alternating, "data.train_files", count).rows  # drawn by a seed
    assert len(rows) == min(count, 300)
    counts = Counter(row["data_source"] for row in rows.values())
    assert counts.keys() == {*ALTERNATING}
    assert max(counts.values()) - min(counts.values()) <= 1


@pytest.mark.parametrize("responses", [0, 6])
def test_rehearse_tries_rows_of_each_source_and_pairs_responses_with_the_first_rows(
    alternating, responses, tmp_path, monkeypatch
):
    monkeypatch.setattr("verl_ext.cpu.rehearse._stages", lambda _, until: [])
    (tmp_path / "reward.py").write_text(SCORES)
    (tmp_path / "responses.jsonl").write_text("".join(f'"given {number}"\n' for number in range(responses)))
    words = [
        *("+verl_ext=drgrpo", "actor_rollout_ref.rollout.n=8", "actor_rollout_ref.actor.use_dynamic_bsz=True"),
        f"data.train_files={alternating.data.train_files}",
        f"reward.custom_reward_function.path={tmp_path}/reward.py",
        *("--rows", "6"),
    ]
    if responses:
        words += ["--responses", str(tmp_path / "responses.jsonl")]
    assert main(["rehearse", *words]) == 0
    calls = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    numbers = {number for _, number, _ in calls}
    assert {source for source, _, _ in calls} == {*ALTERNATING}
    assert len(numbers) == 6
    paired = [(number, text) for _, number, text in calls if text.startswith("given")]
    assert {*paired} == {(number, f"given {number}") for number in range(responses)}
    if responses:
        assert numbers == {*range(6)}


def test_a_message_that_the_chat_template_drops_is_a_note(tiny, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    prompt = [{"role": "system", "content": " be terse "}, {"role": "user", "content": "2+3"}]
    rows = [{"data_source": "x", "prompt": prompt, "reward_model": {"ground_truth": "5"}}]
    pandas.DataFrame(rows).to_parquet(tmp_path / "train.parquet")
    user = OmegaConf.create({"data": {"train_files": str(tmp_path / "train.parquet"), "prompt_key": "prompt"}})
    each = "{% for message in messages %}{{ message['content'] | trim }}{% endfor %}"
    assert not [*of_prompt(user, tokenizer, each)]
    ((stage, state, text),) = of_prompt(user, tokenizer, each.replace("in messages", "in messages[1:]"))
    assert (stage, state) == ("prompt", NOTE)
    assert says(text, "'system'", "actor_rollout_ref.model.custom_chat_template")
    with pytest.raises(ConfigurationError, match=facts("no system message", "data.train_files")):
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
    assert next(name for name, state, _ in findings if state == ERROR) == stage
    assert "RuntimeError: no" in text_of(findings, stage)


@pytest.mark.parametrize(
    ("files", "steps", "stage"), [({}, (), "Ray"), (STARTED, (), "step 1"), (SAVED, (1, 2), "3 steps")]
)
def test_the_time_limit_comes_first_with_its_stage_whatever_error_the_log_has(left, files, steps, stage):
    findings = list(of_training(left(files, ["ValueError: harmless"], steps, status=None), USER))
    (text,) = [text for _, state, text in findings if state == ERROR]
    assert text.index("--minutes") < text.index(stage) < text.index("ValueError: harmless")
    assert findings[-1][1] == NOTE
    assert says(findings[-1][2], "algorithm.filter_groups.enable=True", "--responses")  # on in this run


def test_the_minutes_are_those_of_the_trial_and_both_runs(monkeypatch):
    ends = []
    monkeypatch.setattr("verl_ext.cpu.rehearse.check", lambda _, deadline: ends.append(deadline))
    monkeypatch.setattr("verl_ext.cpu.rehearse._stages", lambda _, until: ends.append(until) or [])
    assert main(["rehearse", "--minutes", "2"]) == 0
    assert ends[0] == ends[1] < time.monotonic() + 120


@pytest.mark.parametrize("given", [True, False])
def test_zero_variance_groups_and_truncated_responses_are_notes(left, given):
    user = OmegaConf.merge(USER, {"data": {"max_response_length": 32}})
    zero = dict.fromkeys(("critic/advantages/min", "critic/advantages/max"), 0.0)
    for name, metrics, stages in (
        ("zero", {**zero, "response_length/min": 3}, ["groups"]),
        ("varying", {"response_length/min": 31}, []),
        ("truncated", {"response_length/min": 32}, ["responses"] * given),
    ):
        run = left(SAVED, (), (1, 2, 3), name=name, **metrics)
        assert [stage for stage, state, _ in of_responses(run, user, given=given) if state == NOTE] == stages


def test_fewer_prompts_than_a_batch_of_the_run_fail_although_the_miniature_needs_less(left):
    findings = list(of_training(left({**SAVED, "prompts": "100 7\n"}, (), (1, 2, 3)), USER))
    assert "7 of 100" in text_of(findings, "data")


def test_the_error_of_a_response_names_the_users_line_although_verl_continues(left):
    findings = list(of_training(left(SAVED, [*RAISED, *RAISED], (1, 2, 3)), USER))
    text = text_of(findings, "reward")
    assert says(text, "2", "KeyError: 'answer'", "/home/user/mine.py:12", "log.txt")


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
        ({"critic/score/mean": 0.6}, {}, ERROR),
        ({"critic/score/mean": float("nan")}, {}, ERROR),
        ({"actor/grad_norm": 0.0}, {}, ERROR),
        # Tools and asynchronous trainers may answer otherwise.
        ({"critic/score/mean": 0.6}, {"actor_rollout_ref": {"rollout": TOOLS}}, NOTE),
        ({"critic/score/mean": 0.6}, {"trainer": {"v1": {"trainer_mode": "colocate_async"}}}, NOTE),
    ],
)
def test_the_resumed_step_is_compared_metric_by_metric(left, again, settings, state):
    both = {"nan/in both": float("nan"), "actor/grad_norm": 1.0}
    whole = left(SAVED, (), (1, 2, 3), name="whole", **both)
    findings = of_resume(left(SAVED, (), (3,), **{**both, **again}), whole, OmegaConf.merge(USER, settings))
    assert states(findings) == {"resume": OK, "repeat": state, "validate": OK}


def test_a_step_without_a_gradient_proves_little_of_a_resumed_run(left):
    whole, again = (left(SAVED, (), steps, name=f"{steps}", **{"actor/grad_norm": 0.0}) for steps in ((1, 2, 3), (3,)))
    assert states(of_resume(again, whole, USER))["repeat"] == NOTE


def test_tools_that_fail_or_are_never_called_are_notes_although_verl_continues(left):
    user = OmegaConf.merge(USER, {"data": {"max_response_length": 32}, "actor_rollout_ref": {"rollout": TOOLS}})
    raised = "WARNING:2026-01-01 00:00:00,000:Error executing tool 'search': 'query'"
    run = left(SAVED, [raised, raised], (1, 2, 3), **{"num_turns/max": 4, "response_length/min": 3})
    ((stage, text),) = [(stage, text) for stage, state, text in of_training(run, user) if state == NOTE]
    assert stage == "tools"
    assert says(text, "2", "Error executing tool 'search': 'query'")
    assert not [*of_responses(run, user, given=True)]
    silent = left(SAVED, (), (1, 2, 3), name="silent", **{"num_turns/max": 2, "response_length/min": 3})
    ((stage, state, text),) = of_responses(silent, user, given=True)
    assert (stage, state) == ("tools", NOTE)
    assert says(text, "default_agent_loop=tool_agent", "agent_name", "--responses")
    assert not [*of_responses(silent, user, given=False)]  # a note before the run says that the model calls none


def test_an_error_of_the_validation_is_its_own_stage(left):
    whole = left(SAVED, (), (1, 2, 3), name="whole")
    lines = [*RAISED, "INFO:Saving checkpoint to global_step_3", "ValueError: x"]
    findings = list(of_resume(left(SAVED, lines, status=1), whole, USER))
    assert states(findings) == {"resume": OK, "validate": ERROR}
    text = text_of(findings, "validate")
    assert "data.val_files" in text
    assert "ValueError: x" in text


def test_each_line_begins_with_its_state_and_the_last_counts_the_notes(monkeypatch, capsys):
    lines = [("data", OK, "a"), ("tools", NOTE, "b"), ("groups", NOTE, "c")]
    monkeypatch.setattr("verl_ext.cpu.rehearse.check", lambda _, deadline: 0)
    for more, status, result in (([], 0, "passed"), ([("save", ERROR, "d")], 1, "failed")):
        monkeypatch.setattr("verl_ext.cpu.rehearse._stages", lambda _, until, more=more: [*lines, *more])
        assert main(["rehearse"]) == status
        *printed, last = capsys.readouterr().out.splitlines()
        assert [line.split(maxsplit=2) for line in printed] == [[s, f"{stage}:", t] for stage, s, t in [*lines, *more]]
        assert says(last, result, "2")
