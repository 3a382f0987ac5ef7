"""The report of a rehearsal, from the files of its runs."""

import json
from pathlib import Path

import pandas
import pytest
from omegaconf import OmegaConf

import verl_ext
from tests.facts import facts, says
from verl_ext.cpu.report import (
    ERROR,
    NOTE,
    OK,
    FinishedRun,
    report_prompt,
    report_responses,
    report_resumed_run,
    report_settings,
    report_tools,
    report_training,
)
from verl_ext.errors import ConfigurationError

USER = OmegaConf.create(
    {
        "data": {
            "train_batch_size": 8,
            "max_prompt_length": 64,
            "max_response_length": 32,
            "filter_overlong_prompts": True,
        },
        "reward": {"custom_reward_function": {"path": "mine.py"}},
        "algorithm": {"filter_groups": {"enable": True, "metric": "acc"}},
        "actor_rollout_ref": {"rollout": {"agent": {"default_agent_loop": "single_turn_agent"}}},
    }
)
TOOLS = {"agent": {"default_agent_loop": "tool_agent"}, "multi_turn": {"enable": True}}
USER_WITH_TOOLS = OmegaConf.merge(USER, {"actor_rollout_ref": {"rollout": TOOLS}})

# The files of a run that has read its data, started, trained two steps, and saved the second. The files are
# cumulative, because a run reaches the stages in this order.
LOADED = {"prompts": "100 90\n10 10\n"}
STARTED = {**LOADED, "started": "\n"}
TRAINED = {**STARTED, "checkpoints/global_step_2/data.pt": ""}
SAVED = {**TRAINED, "checkpoints/latest_checkpointed_iteration.txt": "2"}
ALL_STEPS = (1, 2, 3)
METRICS = {
    "critic/score/min": 0.0,
    "critic/score/mean": 0.5,
    "critic/score/max": 1.0,
    "critic/advantages/min": -1.0,
    "critic/advantages/max": 1.0,
    "response_length/min": 3,
    "actor/grad_norm": 1.0,
}
FAILED_RESPONSE = [
    "ERROR:2026-01-01 00:00:00,000:Error in _run_prompt for uid=1",
    "Traceback (most recent call last):",
    '  File "/venv/site-packages/verl/experimental/reward_loop/reward_loop.py", line 5, in compute_score',
    "ray.exceptions.RayTaskError(KeyError): ray::RewardLoopWorker.compute_score()",
    '  File "/venv/site-packages/verl/experimental/reward_loop/reward_loop.py", line 9, in run_single',
    '  File "/home/user/mine.py", line 12, in compute_score',
    "KeyError: 'answer'",
]


@pytest.fixture
def finished_run(tmp_path):
    """Return a function that writes the files, the log and the metrics of a run, as verl and Ray do."""

    def write(files=SAVED, log=(), steps=ALL_STEPS, *, name="run", status=0, **metrics):
        folder = tmp_path / name
        folder.mkdir()
        for file, text in files.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(text)
        prefix = "\x1b[36m(TaskRunnerV1 pid=1)\x1b[0m "
        (folder / "log.txt").write_text("".join(f"{prefix}{line}\n" for line in log))
        if steps:
            records = [{"step": step, "data": {**METRICS, **metrics, "perf/time": step}} for step in steps]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return FinishedRun(folder, status, seconds=1.0)

    return write


def states_of(lines):
    """The state of each stage."""
    return {stage: state for stage, state, _ in lines}


def errors_of(lines):
    """The stages that failed, with their texts."""
    return [(stage, text) for stage, state, text in lines if state == ERROR]


def notes_of(lines):
    """The stages with a note, and the texts of the notes."""
    return [(stage, text) for stage, state, text in lines if state == NOTE]


def test_settings_that_the_rehearsal_leaves_out_are_notes():
    ((stage, text),) = notes_of(report_settings(USER, ["actor_rollout_ref.model.lora_rank=8"]))
    assert stage == "settings"
    assert says(text, "actor_rollout_ref.model.lora_rank=8")


def test_a_note_says_that_colocate_async_runs_instead_of_separate_async():
    user = OmegaConf.merge(USER, {"trainer": {"v1": {"trainer_mode": "separate_async"}}})
    ((stage, text),) = notes_of(report_settings(user, []))
    assert stage == "settings"
    assert says(text, "trainer.v1.trainer_mode=colocate_async", "separate_async")


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_other_trainer_modes_need_no_note(mode):
    user = OmegaConf.merge(USER, {"trainer": {"v1": {"trainer_mode": mode}}})
    assert list(report_settings(user, [])) == []


READS_TOOLS = "{% if tools %}{{ tools }}{% endif %}"


@pytest.mark.parametrize(
    ("user", "template", "has_responses", "facts_of_notes"),
    [
        pytest.param(USER, "", False, [], id="no tools"),
        pytest.param(USER_WITH_TOOLS, READS_TOOLS, True, [], id="tools and responses"),
        pytest.param(USER_WITH_TOOLS, READS_TOOLS, False, ["--responses"], id="no responses"),
        pytest.param(
            USER_WITH_TOOLS,
            "{{ messages }}",
            True,
            ["actor_rollout_ref.model.custom_chat_template"],
            id="a template that does not read tools",
        ),
    ],
)
def test_notes_say_why_no_response_can_call_a_tool(user, template, has_responses, facts_of_notes):
    notes = notes_of(report_tools(user, template, has_responses=has_responses))
    assert len(notes) == len(facts_of_notes)
    for (stage, text), fact in zip(notes, facts_of_notes, strict=True):
        assert stage == "tools"
        assert says(text, fact)


EACH_MESSAGE = "{% for message in messages %}{{ message['content'] | trim }}{% endfor %}"
ALL_BUT_FIRST_MESSAGE = EACH_MESSAGE.replace("in messages", "in messages[1:]")


@pytest.fixture
def tokenizer(tiny):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny / "model")


@pytest.fixture
def user_with_system_message(tmp_path):
    """A configuration whose first prompt has a system message."""
    prompt = [{"role": "system", "content": " be terse "}, {"role": "user", "content": "2+3"}]
    rows = [{"data_source": "x", "prompt": prompt, "reward_model": {"ground_truth": "5"}}]
    pandas.DataFrame(rows).to_parquet(tmp_path / "train.parquet")
    return OmegaConf.create({"data": {"train_files": str(tmp_path / "train.parquet"), "prompt_key": "prompt"}})


def test_a_message_that_the_chat_template_drops_is_a_note(user_with_system_message, tokenizer):
    assert list(report_prompt(user_with_system_message, tokenizer, EACH_MESSAGE)) == []
    ((stage, text),) = notes_of(report_prompt(user_with_system_message, tokenizer, ALL_BUT_FIRST_MESSAGE))
    assert stage == "prompt"
    assert says(text, "'system'", "actor_rollout_ref.model.custom_chat_template")


def test_a_chat_template_that_raises_is_rejected_with_the_data(user_with_system_message, tokenizer):
    template = "{{ raise_exception('no system message') }}"
    with pytest.raises(ConfigurationError, match=facts("no system message", "data.train_files")):
        list(report_prompt(user_with_system_message, tokenizer, template))


def test_a_complete_run_reaches_every_stage(finished_run):
    states = states_of(report_training(finished_run(), USER))
    assert states == dict.fromkeys(("data", "start", "train", "save"), OK)


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
def test_the_first_stage_that_is_not_reached_fails_with_the_error(finished_run, files, steps, stage):
    run = finished_run(files, ["", "RuntimeError: no"], steps, status=1)
    ((failed_stage, text),) = errors_of(report_training(run, USER))
    assert failed_stage == stage
    assert "RuntimeError: no" in text


@pytest.mark.parametrize(
    ("files", "steps", "stage"), [({}, (), "Ray"), (STARTED, (), "step 1"), (SAVED, (1, 2), "3 steps")]
)
def test_the_time_limit_and_its_stage_come_before_errors_of_the_log(finished_run, files, steps, stage):
    run = finished_run(files, ["ValueError: harmless"], steps, status=None)
    ((_, text),) = errors_of(report_training(run, USER))
    assert text.index("--minutes") < text.index(stage) < text.index("ValueError: harmless")


def test_after_the_time_limit_a_note_names_the_group_filter(finished_run):
    run = finished_run(STARTED, steps=(), status=None)
    *_, (_, state, text) = report_training(run, USER)
    assert state == NOTE
    assert says(text, "algorithm.filter_groups.enable=True", "--responses")


ZERO_ADVANTAGES = {"critic/advantages/min": 0.0, "critic/advantages/max": 0.0}


@pytest.mark.parametrize("has_responses", [True, False])
def test_groups_with_zero_variance_are_a_note(finished_run, has_responses):
    run = finished_run(**ZERO_ADVANTAGES)
    ((stage, _),) = notes_of(report_responses(run, USER, has_responses=has_responses))
    assert stage == "groups"


@pytest.mark.parametrize(
    ("shortest", "has_responses", "stages"),
    [(31, True, []), (32, True, ["responses"]), (32, False, [])],
    ids=["not truncated", "truncated", "truncated samples of a random model"],
)
def test_given_responses_that_are_all_truncated_are_a_note(finished_run, shortest, has_responses, stages):
    run = finished_run(**{"response_length/min": shortest})
    notes = notes_of(report_responses(run, USER, has_responses=has_responses))
    assert [stage for stage, _ in notes] == stages


def test_fewer_prompts_than_a_batch_of_the_run_fail_although_the_rehearsal_needs_less(finished_run):
    run = finished_run({**SAVED, "prompts": "100 7\n"})
    ((stage, text),) = errors_of(report_training(run, USER))
    assert stage == "data"
    assert "7 of 100" in text


def test_the_error_of_a_response_names_the_users_line_although_verl_continues(finished_run):
    run = finished_run(log=[*FAILED_RESPONSE, *FAILED_RESPONSE])
    ((stage, text),) = errors_of(report_training(run, USER))
    assert stage == "reward"
    assert says(text, "2", "KeyError: 'answer'", "/home/user/mine.py:12", "log.txt")


PACKAGE = str(Path(verl_ext.__file__).parent)


@pytest.mark.parametrize(
    ("file", "is_users"),
    [
        ("/home/user/mine.py", True),
        ("/home/user/verl_ext/mine.py", True),
        (f"{PACKAGE}/rewards/tags.py", False),
        ("/usr/lib64/python3.11/asyncio/tasks.py", False),
        ("<frozen runpy>", False),
        ("python/ray/_raylet.pyx", False),
    ],
)
def test_the_line_of_an_error_is_the_last_one_of_the_users_code(finished_run, file, is_users):
    log = ['  File "/home/user/first.py", line 3, in f', f'  File "{file}", line 7, in <module>', "KeyError: 1"]
    expected = f"({file}:7)" if is_users else "(/home/user/first.py:3)"
    assert expected in finished_run(STARTED, log, steps=(), status=1).failure("train")


def test_tool_calls_that_failed_are_a_note_although_verl_continues(finished_run):
    error = "WARNING:2026-01-01 00:00:00,000:Error executing tool 'search': 'query'"
    run = finished_run(log=[error, error], **{"num_turns/max": 4})
    ((stage, text),) = notes_of(report_training(run, USER_WITH_TOOLS))
    assert stage == "tools"
    assert says(text, "2", "Error executing tool 'search': 'query'")
    assert list(report_responses(run, USER_WITH_TOOLS, has_responses=True)) == []


def test_given_responses_that_call_no_tool_are_a_note(finished_run):
    run = finished_run(**{"num_turns/max": 2})
    ((stage, text),) = notes_of(report_responses(run, USER_WITH_TOOLS, has_responses=True))
    assert stage == "tools"
    assert says(text, "default_agent_loop=tool_agent", "agent_name", "--responses")
    # Otherwise a note before the run says that the model calls no tools.
    assert list(report_responses(run, USER_WITH_TOOLS, has_responses=False)) == []


COLOCATE_ASYNC = OmegaConf.merge(USER, {"trainer": {"v1": {"trainer_mode": "colocate_async"}}})


@pytest.mark.parametrize(
    ("changes", "user", "state"),
    [
        pytest.param({}, USER, OK, id="equal"),
        pytest.param({"critic/score/mean": 0.5001}, USER, OK, id="nearly equal"),
        pytest.param({"critic/score/mean": 0.6}, USER, ERROR, id="different"),
        pytest.param({"critic/score/mean": float("nan")}, USER, ERROR, id="NaN in one run"),
        pytest.param({"actor/grad_norm": 0.0}, USER, ERROR, id="no gradient in one run"),
        pytest.param({"critic/score/mean": 0.6}, USER_WITH_TOOLS, NOTE, id="tools may return something else"),
        pytest.param({"critic/score/mean": 0.6}, COLOCATE_ASYNC, NOTE, id="prompts of a step may differ"),
    ],
)
def test_the_resumed_step_is_compared_metric_by_metric(finished_run, changes, user, state):
    metrics = {"nan in both": float("nan")}
    uninterrupted = finished_run(name="uninterrupted", **metrics)
    resumed = finished_run(name="resumed", steps=(3,), **{**metrics, **changes})
    lines = report_resumed_run(resumed, uninterrupted, user)
    assert states_of(lines) == {"resume": OK, "repeat": state, "validate": OK}


def test_an_equal_step_without_a_gradient_is_a_note(finished_run):
    uninterrupted = finished_run(name="uninterrupted", **{"actor/grad_norm": 0.0})
    resumed = finished_run(name="resumed", steps=(3,), **{"actor/grad_norm": 0.0})
    assert states_of(report_resumed_run(resumed, uninterrupted, USER))["repeat"] == NOTE


def test_an_error_of_the_validation_is_reported_as_its_own_stage(finished_run):
    log = [*FAILED_RESPONSE, "INFO:Saving checkpoint to global_step_3", "ValueError: x"]
    resumed = finished_run(SAVED, log, steps=(), name="resumed", status=1)
    lines = list(report_resumed_run(resumed, finished_run(name="uninterrupted"), USER))
    assert states_of(lines) == {"resume": OK, "validate": ERROR}
    ((_, text),) = errors_of(lines)
    assert says(text, "data.val_files", "ValueError: x")
