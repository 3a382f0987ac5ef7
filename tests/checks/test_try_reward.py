"""`verl-ext check --try-reward`: what a reward function returns, before anything else is loaded."""

import asyncio
import re

import pandas
import psutil
import pytest

from tests.checks.conftest import REWARD_FUNCTIONS, rows_of
from tests.facts import a_line_says, says

FUNCTION = "reward.custom_reward_function"
KWARGS = f"+{FUNCTION}.reward_kwargs"
ACCURACY_KEY = "algorithm.rewards.accuracy_key"
FILTER = "algorithm.filter_groups"


def lines_of(output, severity):
    """Return the lines of the findings with a severity: error, warning or note."""
    return [line for line in output.splitlines() if line.startswith(severity)]


def component_line(output, name):
    """Return the line of the summary about a component of the reward."""
    (line,) = [line for line in output.splitlines() if line.strip().startswith(name)]
    return line


# The summary of the scored responses


@pytest.mark.parametrize(("function", "responses"), [("compute_score", 16), ("is_asynchronous", 4)])
def test_range_of_each_component_is_printed(try_reward, function, responses):
    status, output = try_reward(f"{FUNCTION}.name={function}", f"{KWARGS}.bonus=3")
    assert status == 0
    # A synchronous function is fast, so that the first row is scored in each template.
    assert a_line_says(output, responses, "responses", "2 rows of data.train_files")
    assert "0 to 1" in component_line(output, "correct:")
    assert "3 to 3" in component_line(output, "format:")
    assert says(component_line(output, "nothing:"), responses, "NaN")
    assert says(component_line(output, "long:"), responses, "NaN")
    components = component_line(output, "components")
    assert "'correct'" in components
    assert "'score'" not in components


def test_per_turn_rewards_are_summarized(try_reward, tmp_path):
    responses = tmp_path / "responses.jsonl"
    responses.write_text('"1 0 1"\n"2 2"\n')
    run = ("algorithm.rewards.per_turn=[format]", f"{FUNCTION}.name=returns_per_turn_rewards")
    status, output = try_reward(*run, f"--responses={responses}")
    assert status == 0, output
    line = component_line(output, "format")
    assert says(line, "0 to 7", "turns")
    assert "0 to 1" in line


def test_per_turn_reward_that_is_a_plain_list_is_an_error(try_reward):
    run = ("algorithm.rewards.per_turn=[format]", f"{FUNCTION}.name=returns_per_turn_rewards", f"{KWARGS}.plain=True")
    status, output = try_reward(*run)
    assert status == 1
    assert "per_turn([...])" in output


RUBRICS = ("algorithm.rewards.rubrics=[format]", f"{FUNCTION}.name=returns_a_rubric")


def test_rubrics_are_summarized(try_reward):
    status, output = try_reward(*RUBRICS)
    assert status == 0, output
    line = component_line(output, "format")
    assert says(line, "2 to 2", "criteria")
    assert "0 to 1" in line


def test_rubric_that_is_a_plain_list_is_an_error(try_reward):
    status, output = try_reward(*RUBRICS, f"{KWARGS}.mistake='a list'")
    assert status == 1
    assert a_line_says(output, "rubric([...]", "'format'")


def test_rubric_with_other_criteria_for_the_same_row_is_an_error(try_reward, tmp_path):
    status, output = try_reward(*RUBRICS, f"{KWARGS}.mistake='fewer criteria'")
    assert status == 1
    assert a_line_says(output, f"row 0 of {tmp_path}", "'format'")


def test_slow_function_shows_its_progress(try_reward, monkeypatch):
    clock = iter(range(0, 10_000, 6))
    monkeypatch.setattr("verl_ext.checks.scoring.time.monotonic", lambda: next(clock))
    _, output = try_reward("--seconds", "1000")
    assert re.search(r"^\d+ responses", output, re.M)


# Mistakes in the function


def test_scoring_uses_its_own_event_loop(try_reward):
    """Scoring runs in a fork, which would inherit the loop of the caller without the threads of its executor."""
    loop = asyncio.new_event_loop()
    loop.run_until_complete(loop.run_in_executor(None, int))  # starts such a thread, which then waits for work
    asyncio.set_event_loop(loop)
    try:
        status, output = try_reward()
    finally:
        asyncio.set_event_loop(None)
        loop.close()
    assert status == 0, output


def test_misspelled_key_and_an_exception_are_both_reported(try_reward, tmp_path):
    status, output = try_reward("--responses", str(tmp_path / "responses.jsonl"), keys="corect,format")
    assert status == 1
    assert says(output, "'corect'", "'correct'")
    assert "0 errors" not in output
    assert a_line_says(output, f"row 1 of {tmp_path}/train.parquet", "response of the file", "KeyError")


def test_misspelled_function_is_an_error_with_the_nearest_name(try_reward):
    _, output = try_reward(f"{FUNCTION}.name=compute_scores")
    assert a_line_says(output, f"{FUNCTION}.name", "'compute_scores'", "'compute_score'")
    assert "0 errors" not in output


HADW = "algorithm.adv_estimator=hadw"
MAXRL = "algorithm.adv_estimator=maxrl"
MISSPELLED = f"{ACCURACY_KEY}=corect"
ACCURACY_FILTER = (
    "algorithm.adv_estimator=grpo",
    f"{FILTER}.enable=True",
    f"{FILTER}.metric=accuracy_between",
    "algorithm.rewards.accuracy_between=[0.1,0.9]",
)


@pytest.mark.parametrize(
    ("keys", "arguments", "words"),
    [
        ("correct,nothing", (), ("'nothing'", "missing", "None")),
        ("correct,rare", (), ("'rare'", "missing", "None")),
        ("", (HADW, MISSPELLED), ("'corect'",)),
        ("", (HADW,), ("accuracy", "[0, 1]", "'score'")),
        ("correct,format", (MAXRL, f"{KWARGS}.bonus=-0.5"), ("-0.5", "row 0 of")),
        ("", (*ACCURACY_FILTER, MISSPELLED), ("'corect'",)),
    ],
    ids=[
        "a component that is None",
        "a component that some rows lack",
        "a misspelled accuracy",
        "a score that is no accuracy",
        "a negative reward for maxrl",
        "a misspelled accuracy of a filter",
    ],
)
def test_result_that_would_end_the_run_is_an_error(try_reward, keys, arguments, words):
    status, output = try_reward(*arguments, keys=keys)
    assert status == 1
    assert a_line_says(output, "error", *words)


def test_component_that_the_reward_manager_adds_is_not_missing(try_reward):
    dapo = (
        "reward.reward_manager.name=dapo",
        "+reward.reward_kwargs.overlong_buffer_cfg={enable:True,log:True,len:4,penalty_factor:1.0}",
        "+reward.reward_kwargs.max_resp_len=16",
    )
    status, output = try_reward(*dapo, keys="correct,overlong_reward")
    assert status == 0, output


@pytest.mark.parametrize("score", ["null", "'1.0'", "infinity", "[1.0]", "float32", "long"])
def test_score_that_verl_cannot_store_is_an_error(try_reward, score):
    status, output = try_reward(f"{FUNCTION}.name=returns_this_score", f"{KWARGS}.score={score}")
    assert status == 1
    assert "the score is" in output
    assert "0 errors" not in output


@pytest.mark.parametrize("function", ["exits", "raises_stop_iteration", "returns_a_coroutine"])
def test_function_that_verl_does_not_await_or_survive_is_an_error(try_reward, function):
    status, _ = try_reward(f"{FUNCTION}.name={function}")
    assert status == 1


def test_function_receives_the_fields_of_a_rollout(try_reward):
    status, output = try_reward(f"{FUNCTION}.name=reads_the_rollout")
    assert status == 0, output


@pytest.mark.parametrize("name", ["has_other_parameters", "is_asynchronous_with_other_parameters"])
def test_function_with_other_parameters_is_reported_once_with_the_right_ones(try_reward, name):
    status, output = try_reward(f"{FUNCTION}.name={name}")
    assert status == 1
    (error,) = lines_of(output, "error")
    assert says(error, "TypeError", "data_source", "solution_str", "ground_truth", "extra_info", "row 0 of")


def test_exception_is_reported_once_with_the_line_of_the_users_file(try_reward, tmp_path):
    status, output = try_reward(f"{FUNCTION}.name=has_a_bug")
    assert status == 1
    assert output.count("AttributeError") == 1
    lines = REWARD_FUNCTIONS.read_text().splitlines()
    statement = "return truth.no_such_attribute"
    number = lines.index(f"    {statement}") + 1
    place = (f"line {number}", f"{tmp_path}/reward.py")
    assert a_line_says(output, "error", "AttributeError", *place, f"`{statement}`")
    assert a_line_says(output, "error", "data_source", "solution_str", "ground_truth", "extra_info")


def test_missing_entry_of_extra_info_is_named(try_reward):
    _, output = try_reward(f"{FUNCTION}.name=reads_the_level")
    assert a_line_says(output, "KeyError", 'extra_info["level"]')


def test_result_without_a_score_is_an_error(try_reward):
    status, output = try_reward(f"{FUNCTION}.name=returns_no_score")
    assert status == 1
    assert a_line_says(output, "error", "without the entry `score`", "row 0 of")
    assert "KeyError" not in output


def test_same_exception_for_two_rows_is_one_error(try_rows):
    _, output = try_rows(rows_of(["1", "raise", "1"], ["x", "x", "unknown"]), "--rows", "3")
    (error,) = lines_of(output, "error")
    assert says(error, "KeyError", "row 1 of")


def test_same_unusable_score_for_two_rows_is_one_error(try_rows):
    _, output = try_rows(rows_of(["1", "2"]), f"{FUNCTION}.name=returns_this_score", f"{KWARGS}.score=null")
    assert len(lines_of(output, "error")) == 1


PENALTY = f"{FUNCTION}.name=penalizes_empty_responses"


def test_maxrl_accepts_a_negative_component_if_the_sum_is_never_negative(try_reward):
    status, output = try_reward(PENALTY, preset="maxrl")
    assert status == 0, output


def test_maxrl_rejects_a_negative_sum(try_reward):
    status, output = try_reward(PENALTY, f"{KWARGS}.penalty=-2", preset="maxrl")
    assert status == 1
    assert a_line_says(output, "error", "-1", "row 0 of")


@pytest.mark.parametrize("function", ["hangs", "hangs_with_a_child", "ends_its_process"])
def test_function_that_does_not_return_is_ended_and_named(try_reward, tmp_path, function):
    responses = tmp_path / "responses.jsonl"
    responses.write_text('"7 7"')
    status, output = try_reward(f"{FUNCTION}.name={function}", "--responses", str(responses), "--seconds", "0.5")
    assert status == 1
    assert a_line_says(output, f"row 0 of {tmp_path}/train.parquet", "response of the file", "`7 7`")
    assert a_line_says(output, "--seconds") == function.startswith("hangs")
    if function == "hangs_with_a_child":
        child = int((tmp_path / "child").read_text())
        assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


# Notes


def test_function_that_differs_when_repeated_is_reported(try_reward, tmp_path):
    status, output = try_reward(f"{FUNCTION}.name=differs_when_repeated")
    assert status == 0
    assert a_line_says(output, "note", f"row 0 of {tmp_path}/train.parquet", "correct=0", "correct=27")


def test_function_that_repeats_its_result_is_not_reported(try_reward):
    _, output = try_reward()
    assert not a_line_says(output, "note", "correct=0")


def test_equal_rewards_are_reported(try_reward):
    _, output = try_reward(f"{FUNCTION}.name=returns_equal_rewards")
    assert a_line_says(output, "note", "algorithm.rewards.keys", "correct", "format")
    assert "are equal" in output


@pytest.mark.parametrize("function", ["compute_score", "differs_when_repeated"])
def test_different_and_constant_rewards_are_not_called_equal(try_reward, function):
    _, output = try_reward(f"{FUNCTION}.name={function}")
    assert "are equal" not in output


def test_filter_metric_that_the_function_does_not_return_is_reported(try_reward):
    _, output = try_reward(f"{FILTER}.enable=True", f"{FILTER}.metric=seq_reward")
    assert a_line_says(output, "note", "seq_reward", "'correct'")


def test_filter_metric_that_the_function_returns_is_not_reported(try_reward):
    _, output = try_reward(f"{FILTER}.enable=True", f"{FILTER}.metric=correct")
    assert not a_line_says(output, "note", f"{FILTER}.metric")


TOOLS = "actor_rollout_ref.rollout.multi_turn.tool_config_path"


def test_tools_that_the_agent_loop_does_not_use_are_reported(try_reward):
    _, output = try_reward(f"{TOOLS}=tools.yaml")
    assert a_line_says(output, "note", TOOLS, "agent_name", "tool_agent")


def test_tools_that_the_agent_loop_uses_are_not_reported(try_reward):
    _, output = try_reward(f"{TOOLS}=tools.yaml", "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent")
    assert not a_line_says(output, "note", TOOLS, "tool_agent")


@pytest.mark.parametrize(("threshold", "is_reported"), [("9", True), ("0.5", False)])
def test_accuracy_threshold_that_no_ground_truth_exceeds_is_reported(try_reward, threshold, is_reported):
    _, output = try_reward(f"{ACCURACY_KEY}=correct", f"algorithm.rewards.accuracy_threshold={threshold}")
    assert a_line_says(output, "note", f"correct above {threshold}") == is_reported


def test_rewarded_template_and_a_constant_reward_are_reported(try_rows, tmp_path):
    _, output = try_rows(rows_of(["1", "2"]), f"{FUNCTION}.name=reads_one_template")
    assert a_line_says(output, "Ground truths", "`#### 1`", "correct=1.0", "2 of 2")
    advice = (f"{tmp_path}/reward.py", "reward_model.ground_truth", "--answer-template")
    assert a_line_says(output, "note", "format=1.0", *advice)
    assert not a_line_says(output, "note", "score=0.0")


UNREWARDED = ("--answer-template", "It is {}", f"{FUNCTION}.name=returns_this_score", f"{KWARGS}.score=0")


def test_note_names_the_custom_template(try_rows):
    status, output = try_rows(rows_of(["1", "2"]), *UNREWARDED)
    assert status == 0
    assert a_line_says(output, "note", "correct=1.0", "`It is {}`")


def test_strict_makes_a_note_an_error(try_rows):
    status, _ = try_rows(rows_of(["1", "2"]), *UNREWARDED, "--strict")
    assert status == 1


def test_custom_template_without_braces_is_an_error(try_rows):
    status, _ = try_rows(rows_of(["1"]), "--answer-template", "It is")
    assert status == 1


# A data source b whose ground truths are no integers: in the same file, or in a second file with another column type.
NOT_INTEGERS = ["8.0", "8 x", 8]


@pytest.mark.parametrize("truth", NOT_INTEGERS)
@pytest.mark.parametrize("accuracy", [(f"{ACCURACY_KEY}=correct",), ()], ids=["named", "default"])
def test_data_source_that_is_never_correct_is_reported(try_rows, save_rows, tmp_path, truth, accuracy):
    run = (f"{FUNCTION}.name=rewards_integers", *accuracy, "--rows", "8")
    integers = rows_of(["1", "2", "3", "4"], ["a"] * 4)
    others = rows_of([truth] * 4, ["b"] * 4)
    save_rows(rows_of(["1", "2", "3", "4"]), "val")
    if isinstance(truth, str):
        status, output = try_rows(pandas.concat([integers, others]), *run)
    else:
        save_rows(others, "more")
        files = f"data.train_files=[{tmp_path}/train.parquet,{tmp_path}/more.parquet]"
        status, output = try_rows(integers, *run, files)
    assert status == 0
    assert a_line_says(output, "note", "data_source b", "correct=0.0", "format=1.0")
    assert not a_line_says(output, "note", "data_source a")


# Mistakes in the data


@pytest.mark.parametrize("column", ["data_source", "reward_model"])
def test_missing_column_is_an_error_with_the_existing_columns(try_rows, column):
    rows = rows_of(["1", "2"]).drop(columns=[column])
    status, output = try_rows(rows)
    assert status == 1
    assert a_line_says(output, "error", column, "'prompt'")
    assert "KeyError" not in output


@pytest.mark.parametrize("file", ["train", "val"])
def test_missing_column_of_prompts_is_an_error(try_reward, save_rows, tmp_path, file):
    save_rows(rows_of(["1", "2"]), "train")
    save_rows(rows_of(["1", "2"]), "val")
    files = f"data.val_files={tmp_path}/val.parquet"
    status, _ = try_reward(files)
    assert status == 0

    save_rows(rows_of(["1", "2"]).rename(columns={"prompt": "messages"}), file)
    status, output = try_reward(files)
    assert status == 1
    assert a_line_says(output, "error", f"data.{file}_files", "data.prompt_key=prompt", "'messages'")
    assert not a_line_says(output, "None")


def test_zero_rows_are_an_error(try_reward):
    status, _ = try_reward("--rows", "0")
    assert status == 1


def test_run_without_a_reward_function_is_an_error(try_reward):
    status, output = try_reward(f"{FUNCTION}.path=null", "reward.reward_model.enable=True", keys="")
    assert status == 1
    assert "NotImplementedError" not in output


def test_custom_dataset_is_an_error_that_names_the_options_to_remove(try_reward, tmp_path):
    pandas.DataFrame([{"question": "a"}]).to_parquet(tmp_path / "train.parquet")
    status, output = try_reward("data.custom_cls.path=mine.py", "data.custom_cls.name=Mine", keys="")
    assert status == 1
    assert "--rows 0" in output
    assert "--try-reward" in output


ROW_13 = 13


def with_row_13(usual, value):
    """Return 20 values that are equal except for row 13."""
    values = [usual] * 20
    values[ROW_13] = value
    return values


@pytest.mark.parametrize(("truth", "kind", "expected_status"), [(None, "null", 1), ("", "empty", 0)])
def test_missing_ground_truth_is_found_in_any_row(try_rows, tmp_path, truth, kind, expected_status):
    status, output = try_rows(rows_of(with_row_13("1", truth)))
    assert status == expected_status
    assert a_line_says(output, f"Row 13 of {tmp_path}/train.parquet", "reward_model.ground_truth", kind)


USER = {"role": "user", "content": "a"}
INVALID_PROMPTS = {
    "null content": [{"role": "system", "content": None}, USER],
    "null role": [{"role": None, "content": "a"}],
    "null message": [None, USER],
    "null": None,
}


@pytest.mark.parametrize("prompt", INVALID_PROMPTS.values(), ids=INVALID_PROMPTS)
def test_null_in_a_prompt_is_found_in_any_row(try_rows, tmp_path, prompt):
    rows = rows_of(["1"] * 20, prompts=with_row_13([USER], prompt))
    status, output = try_rows(rows)
    assert status == 1
    place = f"Row 13 of {tmp_path}/train.parquet"
    assert a_line_says(output, place, "data.prompt_key=prompt", "None", "role", "content")


def test_prompt_that_is_a_text_is_an_error(try_rows):
    _, output = try_rows(rows_of(["1"], prompts=["2+3"]))
    assert a_line_says(output, "Row 0 of", "data.prompt_key=prompt", "'2+3'", "messages")


def test_data_source_without_any_ground_truth_is_accepted(try_rows):
    """Its reward function may need none."""
    status, output = try_rows(rows_of(["1"] * 5 + [None] * 5, ["x"] * 5 + ["judged"] * 5))
    assert status == 0, output


def test_null_content_of_an_assistant_is_accepted(try_rows):
    """A message that only calls tools has no content."""
    tool_call = [USER, {"role": "assistant", "content": None}]
    status, output = try_rows(rows_of(["1"] * 20, prompts=[[USER]] * 13 + [tool_call] * 7))
    assert status == 0, output


def test_missing_file_of_validation_is_a_note(try_rows, tmp_path):
    status, output = try_rows(rows_of(["1"] * 3))
    assert status == 0
    assert a_line_says(output, "data.val_files", f"{tmp_path}/val.parquet", "note")


VALIDATION_ROWS = {
    "scoring raises an exception": (rows_of(["1", "1"], ["x", "unknown"]), 1),
    "a ground truth is null": (rows_of(["1", None, "3"]), 0),
}


@pytest.mark.parametrize(("rows", "expected_status"), VALIDATION_ROWS.values(), ids=VALIDATION_ROWS)
def test_row_of_validation_is_an_error_only_if_scoring_fails(try_reward, save_rows, tmp_path, rows, expected_status):
    save_rows(rows, "val")
    status, output = try_reward(f"data.val_files={tmp_path}/val.parquet")
    assert status == expected_status, output


# Which rows are tried


def test_rows_are_evenly_sampled_from_a_file(try_rows, tmp_path):
    status, output = try_rows(rows_of(["1"] * 10 + ["raise"] * 10))
    assert status == 1
    assert a_line_says(output, f"row 10 of {tmp_path}/train.parquet", "KeyError")
    assert "Row 0 of" not in output


def test_rows_of_each_file_are_tried(try_rows, save_rows, tmp_path):
    save_rows(rows_of(["raise"] * 3), "more")
    files = f"data.train_files=[{tmp_path}/train.parquet,{tmp_path}/more.parquet]"
    status, output = try_rows(rows_of(["1"] * 3), files)
    assert status == 1
    assert a_line_says(output, f"row 0 of {tmp_path}/more.parquet", "KeyError")


def test_row_of_each_data_source_is_tried_and_additional_rows_are_counted(try_rows, tmp_path):
    sources = ["x"] * 17 + ["unknown", "y", "x"]
    status, output = try_rows(rows_of(["1"] * 20, sources))
    assert status == 1
    assert a_line_says(output, f"row 17 of {tmp_path}/train.parquet", "KeyError")
    assert a_line_says(output, "4 rows", "data.train_files", "2 more", "--rows")


def test_first_rows_are_tried_with_responses_of_a_file(try_rows, tmp_path):
    responses = tmp_path / "responses.jsonl"
    responses.write_text('"2"\n"2"\n')
    rows = rows_of(["1"] * 2 + ["raise"] * 8, ["x"] * 5 + ["unknown"] * 5)
    status, output = try_rows(rows, "--responses", str(responses))
    assert status == 0, output
