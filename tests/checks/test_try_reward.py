"""`verl-ext check --try-reward`: what a reward function returns, before anything else is loaded."""

import asyncio
import re

import pandas
import psutil
import pytest

from tests.checks.conftest import REWARD
from tests.facts import a_line_says, says

FUNCTION = "reward.custom_reward_function"


@pytest.mark.parametrize(("function", "responses"), [("compute_score", 16), ("later", 4)])
def test_it_prints_the_type_and_the_range_of_each_component(tried, function, responses):
    status, out = tried(f"{FUNCTION}.name={function}", f"+{FUNCTION}.reward_kwargs.bonus=3")
    lines = {line.split()[0]: line for line in out.splitlines() if line.startswith("  ")}
    assert status == 0
    # The first row is scored in each template if the function is fast.
    assert a_line_says(out, responses, "responses", "2 rows of data.train_files")
    assert "0 to 1" in lines["correct:"]
    assert "3 to 3" in lines["format:"]
    assert says(lines["nothing:"], responses, "NaN")
    assert says(lines["long:"], responses, "NaN")
    assert "'correct'" in lines["components"]
    assert "'score'" not in lines["components"]


def test_it_scores_in_an_event_loop_of_its_own(tried):
    """Scoring runs in a fork, which would inherit the loop of the caller without the threads of its executor."""
    loop = asyncio.new_event_loop()
    loop.run_until_complete(loop.run_in_executor(None, int))  # starts such a thread, which then waits for work
    asyncio.set_event_loop(loop)
    try:
        status, out = tried()
    finally:
        asyncio.set_event_loop(None)
        loop.close()
    assert status == 0, out


def test_a_misspelt_key_and_an_exception_are_refused(tried, tmp_path):
    status, out = tried("--responses", str(tmp_path / "answers.jsonl"), keys="corect,format")
    assert status == 1
    assert "'corect'" in out
    assert "'correct'" in out
    assert a_line_says(out, f"row 1 of {tmp_path}/train.parquet", "response of the file", "KeyError")
    _, error = tried(f"{FUNCTION}.name=compute_scores")
    assert a_line_says(error, f"{FUNCTION}.name", "'compute_scores'", "'compute_score'")
    assert "0 errors" not in out


FILTER = "algorithm.filter_groups"
MISSPELT = "algorithm.rewards.accuracy_key=corect"
BETWEEN = (f"{FILTER}.enable=True", f"{FILTER}.metric=accuracy_between", "algorithm.rewards.accuracy_between=[0.1,0.9]")


@pytest.mark.parametrize(
    ("keys", "arguments", "words"),
    [
        ("correct,nothing", (), ("'nothing'", "missing", "None")),
        ("correct,rare", (), ("'rare'", "missing", "None")),
        ("", ("algorithm.adv_estimator=hadw", MISSPELT), ("'corect'",)),
        ("", ("algorithm.adv_estimator=hadw",), ("accuracy", "[0, 1]", "'score'")),
        (
            "correct,format",
            ("algorithm.adv_estimator=maxrl", f"+{FUNCTION}.reward_kwargs.bonus=-0.5"),
            ("-0.5", "row 0 of"),
        ),
        ("", ("algorithm.adv_estimator=grpo", *BETWEEN, MISSPELT), ("'corect'",)),
    ],
)
def test_what_would_end_the_run_is_refused(tried, keys, arguments, words):
    status, out = tried(*arguments, keys=keys)
    assert status == 1
    assert a_line_says(out, "error", *words)


def test_what_the_reward_manager_adds_is_not_missing(tried):
    cfg = "reward.reward_kwargs.overlong_buffer_cfg"
    dapo = ("reward.reward_manager.name=dapo", f"+{cfg}={{enable:True,log:True,len:4,penalty_factor:1.0}}")
    dapo += ("+reward.reward_kwargs.max_resp_len=16",)
    status, out = tried(*dapo, keys="correct,overlong_reward")
    assert status == 0, out


@pytest.mark.parametrize("score", ["null", "'1.0'", "infinity", "[1.0]", "float32", "long"])
def test_a_score_that_verl_cannot_store_is_refused(tried, score):
    status, out = tried(f"{FUNCTION}.name=returns", f"+{FUNCTION}.reward_kwargs.score={score}")
    assert status == 1
    assert "the score is" in out
    assert "0 errors" not in out


@pytest.mark.parametrize(
    ("function", "status"), [("leaves", 1), ("finds_nothing", 1), ("returns_a_coroutine", 1), ("reads_the_rollout", 0)]
)
def test_the_function_is_called_as_the_run_calls_it(tried, function, status):
    """What verl does not await or survive is refused."""
    assert tried(f"{FUNCTION}.name={function}")[0] == status


@pytest.mark.parametrize("name", ["has_other_parameters", "has_other_parameters_later"])
def test_a_function_with_other_parameters_is_reported_with_the_four_that_verl_passes(tried, name):
    status, out = tried(f"{FUNCTION}.name={name}")
    errors = [line for line in out.splitlines() if line.startswith("error")]
    assert status == 1
    assert len(errors) == 1
    assert says(errors[0], "TypeError", "data_source", "solution_str", "ground_truth", "extra_info", "row 0 of")


def test_an_exception_of_the_function_is_reported_once_with_the_last_line_of_its_file(tried, tmp_path):
    status, out = tried(f"{FUNCTION}.name=has_a_bug")
    line = next(at for at, text in enumerate(REWARD.splitlines(), start=1) if "truth.foo" in text)
    assert status == 1
    assert out.count("AttributeError") == 1
    assert a_line_says(out, "error", "AttributeError", f"line {line}", f"{tmp_path}/reward.py", "`return truth.foo`")
    assert a_line_says(out, "error", "data_source", "solution_str", "ground_truth", "extra_info")
    assert a_line_says(tried(f"{FUNCTION}.name=reads_the_level")[1], "KeyError", 'extra_info["level"]')


def test_a_result_without_a_score_is_named(tried):
    status, out = tried(f"{FUNCTION}.name=returns_no_score")
    assert status == 1
    assert a_line_says(out, "error", "without the entry `score`", "row 0 of")
    assert "KeyError" not in out


def test_different_mistakes_are_different_errors(given):
    """The function raises for a response, and returns a score that verl cannot store for others."""
    _, out = given(["1", "raise", "1"], ["x", "x", "unknown"], words=("--rows", "3"))
    errors = [line for line in out.splitlines() if line.startswith("error")]
    assert [says(line, "KeyError", "row 1 of") for line in errors] == [True]
    _, out = given(["1", "2"], words=(f"{FUNCTION}.name=returns", f"+{FUNCTION}.reward_kwargs.score=null"))
    assert len([line for line in out.splitlines() if line.startswith("error")]) == 1


@pytest.mark.parametrize("truth", ["8.0", "8 x", 8])
@pytest.mark.parametrize("named", [("algorithm.rewards.accuracy_key=correct",), ()])
def test_a_data_source_that_is_never_correct_is_found_although_its_format_is_rewarded(given, tmp_path, truth, named):
    words = (f"{FUNCTION}.name=integers", *named, "--rows", "8")
    status, out = given(["1", "2", "3", "4"], file="val", words=words)
    if isinstance(truth, int):  # a column of a Parquet file has one type
        given([truth] * 4, ["b"] * 4, file="more")
        files = f"data.train_files=[{tmp_path}/train.parquet,{tmp_path}/more.parquet]"
        status, out = given(["1", "2", "3", "4"], ["a"] * 4, words=(*words, files))
    else:
        status, out = given(["1", "2", "3", "4"] + [truth] * 4, ["a"] * 4 + ["b"] * 4, words=words)
    assert status == 0
    assert a_line_says(out, "note", "data_source b", "correct=0.0", "format=1.0")
    assert not a_line_says(out, "note", "data_source a")


def test_a_column_that_is_missing_is_named_with_those_that_exist(given):
    for column in ("data_source", "reward_model"):
        status, out = given(["1", "2"], without=[column])
        assert status == 1
        assert a_line_says(out, "error", column, "'prompt'")
        assert "KeyError" not in out
    for file in ("train", "val"):
        status, out = given(["1", "2"], renamed={"prompt": "messages"}, file=file)
        assert status == 1
        assert a_line_says(out, "error", f"data.{file}_files", "data.prompt_key=prompt", "'messages'")
        assert not a_line_says(out, "None")
        assert given(["1", "2"], file=file)[0] == 0


def test_maxrl_accepts_a_negative_component_if_the_sum_is_never_negative(tried):
    status, out = tried(f"{FUNCTION}.name=penalizes", preset="maxrl")
    assert status == 0, out
    status, out = tried(f"{FUNCTION}.name=penalizes", f"+{FUNCTION}.reward_kwargs.penalty=-2", preset="maxrl")
    assert status == 1
    assert a_line_says(out, "error", "-1", "row 0 of")


def test_no_row_or_no_function_is_no_trial(tried):
    assert tried("--rows", "0")[0] == 1
    status, out = tried(f"{FUNCTION}.path=null", "reward.reward_model.enable=True", keys="")
    assert status == 1
    assert "NotImplementedError" not in out


def test_rewards_by_turn_are_shown_and_a_plain_list_is_refused(tried, tmp_path):
    (tmp_path / "answers.jsonl").write_text('"1 0 1"\n"2 2"\n')
    given = ("algorithm.rewards.per_turn=[format]", f"{FUNCTION}.name=turns", f"--responses={tmp_path}/answers.jsonl")
    status, out = tried(*given)
    assert status == 0, out
    (line,) = (line for line in out.splitlines() if line.strip().startswith("format"))
    assert says(line, "0 to 7", "turns")
    assert "0 to 1" in line
    status, out = tried(*given, f"+{FUNCTION}.reward_kwargs.plain=True")
    assert status == 1
    assert "per_turn([...])" in out


def test_rewards_by_item_are_shown_and_what_is_wrong_with_them_is_reported(tried, tmp_path):
    given = ("algorithm.rewards.rubrics=[format]", f"{FUNCTION}.name=items")
    status, out = tried(*given)
    assert status == 0, out
    (line,) = (line for line in out.splitlines() if line.strip().startswith("format"))
    assert says(line, "2 to 2", "criteria")
    assert "0 to 1" in line
    for wrong, words in (("plain", ("rubric([...]", "'format'")), ("fewer", (f"row 0 of {tmp_path}", "'format'"))):
        status, out = tried(*given, f"+{FUNCTION}.reward_kwargs.wrong={wrong}")
        assert status == 1
        assert a_line_says(out, *words)


def test_rows_are_spread_over_the_files(given, tmp_path):
    status, out = given(["1"] * 10 + ["raise"] * 10)
    assert status == 1
    assert a_line_says(out, f"row 10 of {tmp_path}/train.parquet", "KeyError")
    assert "Row 0 of" not in out
    given(["raise"] * 3, file="more")
    files = f"data.train_files=[{tmp_path}/train.parquet,{tmp_path}/more.parquet]"
    status, out = given(["1"] * 3, words=(files,))
    assert status == 1
    assert a_line_says(out, f"row 0 of {tmp_path}/more.parquet", "KeyError")


def test_a_row_of_each_data_source_is_tried_and_more_than_asked_is_said(given, tmp_path):
    sources = ["x"] * 17 + ["unknown", "y", "x"]
    status, out = given(["1"] * 20, sources)
    assert status == 1
    assert a_line_says(out, f"row 17 of {tmp_path}/train.parquet", "KeyError")
    assert a_line_says(out, "4 rows", "data.train_files", "2 more", "--rows")


def test_with_answers_the_first_rows_are_tried(given, tmp_path):
    (tmp_path / "answers.jsonl").write_text('"2"\n"2"\n')
    words = ("--responses", str(tmp_path / "answers.jsonl"))
    assert given(["1"] * 2 + ["raise"] * 8, ["x"] * 5 + ["unknown"] * 5, words=words)[0] == 0


def test_a_null_is_found_in_any_row_by_its_file_and_row(given, tmp_path):
    user, place = {"role": "user", "content": "a"}, f"Row 13 of {tmp_path}/train.parquet"
    for truth, kind in ((None, "null"), ("", "empty")):
        status, out = given(["1"] * 13 + [truth] + ["1"] * 6)
        assert status == (truth is None)
        assert a_line_says(out, place, "reward_model.ground_truth", kind)
    for wrong in ([{"role": "system", "content": None}, user], [{"role": None, "content": "a"}], [None, user], None):
        status, out = given(["1"] * 20, contents=[[user]] * 13 + [wrong] + [[user]] * 6)
        assert status == 1
        assert a_line_says(out, place, "data.prompt_key=prompt", "None", "role", "content")
    assert a_line_says(given(["1"], contents=["2+3"])[1], "Row 0 of", "data.prompt_key=prompt", "'2+3'", "messages")
    assert given(["1"] * 5 + [None] * 5, ["x"] * 5 + ["judged"] * 5)[0] == 0  # it has a function that needs none
    called = [user, {"role": "assistant", "content": None}]
    assert given(["1"] * 20, contents=[[user]] * 13 + [called] * 7)[0] == 0


def test_rows_of_validation_fail_only_where_scoring_does(given, tmp_path):
    status, out = given(["1"] * 3)
    assert status == 0
    assert a_line_says(out, "data.val_files", f"{tmp_path}/val.parquet", "note")
    assert given(["1", "1"], ["x", "unknown"], file="val")[0] == 1
    status, out = given(["1", None, "3"], file="val")
    assert status == 0, out


def test_with_a_dataset_of_the_users_own_the_rows_of_its_file_are_no_fault(tried, tmp_path):
    pandas.DataFrame([{"question": "a"}]).to_parquet(tmp_path / "train.parquet")
    status, out = tried("data.custom_cls.path=mine.py", "data.custom_cls.name=Mine", keys="")
    assert status == 1
    assert "--rows 0" in out
    assert "--try-reward" in out


def test_a_function_that_scores_otherwise_when_asked_again_is_said(tried, tmp_path):
    status, out = tried(f"{FUNCTION}.name=random")
    assert status == 0
    assert a_line_says(out, "note", f"row 0 of {tmp_path}/train.parquet", "correct=0", "correct=27")
    assert not a_line_says(tried()[1], "note", "correct=0")


def test_named_rewards_that_are_always_equal_are_said(tried):
    assert a_line_says(tried(f"{FUNCTION}.name=copied")[1], "note", "algorithm.rewards.keys", "correct", "format")
    assert "are equal" not in tried()[1]
    assert "are equal" not in tried(f"{FUNCTION}.name=random")[1]  # constants


def test_a_slow_function_shows_how_far_it_is(tried, monkeypatch):
    clock = iter(range(0, 10_000, 6))
    monkeypatch.setattr("verl_ext.checks.scoring.time.monotonic", lambda: next(clock))
    _, out = tried("--seconds", "1000")
    assert re.search(r"^\d+ responses", out, re.M)


@pytest.mark.parametrize("function", ["hangs", "hangs_with_a_child", "ends"])
def test_a_function_that_does_not_come_back_is_ended_and_named(tried, tmp_path, function):
    (tmp_path / "answers.jsonl").write_text('"7 7"')
    status, out = tried(
        f"{FUNCTION}.name={function}", "--responses", str(tmp_path / "answers.jsonl"), "--seconds", "0.5"
    )
    assert status == 1
    assert a_line_says(out, f"row 0 of {tmp_path}/train.parquet", "response of the file", "`7 7`")
    assert a_line_says(out, "--seconds") == (function != "ends")
    if function == "hangs_with_a_child":
        child = int((tmp_path / "child").read_text())
        assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_the_form_that_the_function_reads_is_said_and_a_constant_reward(given, tmp_path):
    words = (f"{FUNCTION}.name=never",)
    _, out = given(["1", "2"], words=words)
    assert a_line_says(out, "Ground truths", "`#### 1`", "correct=1.0", "2 of 2")
    assert a_line_says(
        out, "note", "format=1.0", f"{tmp_path}/reward.py", "reward_model.ground_truth", "--answer-template"
    )
    assert not a_line_says(out, "note", "score=0.0")
    words += ("--answer-template", "It is {}", f"{FUNCTION}.name=returns", f"+{FUNCTION}.reward_kwargs.score=0")
    status, out = given(["1", "2"], words=words)
    assert a_line_says(out, "note", "correct=1.0", "`It is {}`")
    assert (status, given(["1", "2"], words=(*words, "--strict"))[0]) == (0, 1)
    assert given(["1"], words=("--answer-template", "It is"))[0] == 1


def test_a_filter_of_groups_by_what_the_function_does_not_return_is_said(tried):
    words = ("algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=")
    assert a_line_says(tried(*words[:1], f"{words[1]}seq_reward")[1], "note", "seq_reward", "'correct'")
    assert not a_line_says(tried(*words[:1], f"{words[1]}correct")[1], "note", "algorithm.filter_groups.metric")


def test_tools_that_the_agent_loop_does_not_know_are_said(tried):
    rollout = "actor_rollout_ref.rollout"
    tools = f"{rollout}.multi_turn.tool_config_path"
    assert a_line_says(tried(f"{tools}=tools.yaml")[1], "note", tools, "agent_name", "tool_agent")
    _, out = tried(f"{tools}=tools.yaml", f"{rollout}.agent.default_agent_loop=tool_agent")
    assert not a_line_says(out, "note", tools, "tool_agent")


def test_a_threshold_that_no_ground_truth_exceeds_is_said(tried):
    named = "algorithm.rewards.accuracy_key=correct"
    _, out = tried(named, "algorithm.rewards.accuracy_threshold=9")
    assert a_line_says(out, "note", "correct above 9=False")
    assert not a_line_says(tried(named, "algorithm.rewards.accuracy_threshold=0.5")[1], "note", "correct above 0.5")
