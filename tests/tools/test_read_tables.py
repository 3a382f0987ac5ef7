"""`compare` reads the JSON lines of verl and any table with one row per response."""

import numpy as np
import pandas as pd
import pyarrow
import pyarrow.parquet
import pytest

from tests.facts import a_line_says, says
from tests.tools.expected import advantages_of
from tests.tools.run_files import (
    ACCURACY_KEY,
    CORRECT,
    FORMAT,
    KEYS,
    LENGTHS,
    PROMPT_OF_ROW,
    UIDS,
    rollout_lines,
    without,
    write_json_lines,
    write_log,
    write_rollouts,
)
from verl_ext import rubric

RUBRIC_SETTINGS = f"algorithm.rewards.keys=[correct,rubric] algorithm.rewards.rubrics=[rubric] {ACCURACY_KEY}"


def scored_table(**columns):
    """Return a table with two rewards and more columns."""
    return pd.DataFrame({**columns, "correct": CORRECT, "format": FORMAT})


def write_table(table, file):
    """Write a table in the format of the file's suffix, and return the file."""
    match file.suffix.lower():
        case ".parquet":
            table.to_parquet(file)
        case ".csv":
            table.to_csv(file, index=False)
        case _:
            table.to_json(file, orient="records", lines=True)
    return file


def assert_gdpo_advantages(output):
    """Assert that the output of `compare` has the advantages of gdpo on both rewards."""
    expected = advantages_of("gdpo", ("correct", "format"))
    np.testing.assert_allclose(output["advantage/gdpo"], expected, atol=1e-12)


def lines_with_rubrics():
    """Return lines with a rubric of three criteria for the first prompt, and of two for the others."""
    lines = rollout_lines()
    for line in lines:
        criteria = [line["correct"], line["format"]]
        weights = [1, -3]
        if line["gts"] == "0":
            criteria.append(0.5)
            weights.append(2)
        line["rubric"] = rubric(criteria, weights)
    return lines


def test_a_rubric_is_read_from_the_text_of_json_lines(compared_advantages, tmp_path):
    folder = write_rollouts(tmp_path / "rollouts", lines_with_rubrics())
    output = compared_advantages(folder, f"drgrpo {RUBRIC_SETTINGS}")
    totals = []
    for correct, format_reward, prompt in zip(CORRECT, FORMAT, PROMPT_OF_ROW, strict=True):
        weighted_sum = correct - 3 * format_reward
        rubric_value = (weighted_sum + 2 * 0.5) / 6 if prompt == 0 else weighted_sum / 4
        totals.append(correct + rubric_value)
    by_prompt = np.reshape(totals, (3, 4))
    centered = by_prompt - by_prompt.mean(axis=1, keepdims=True)
    np.testing.assert_allclose(output[f"advantage/drgrpo {RUBRIC_SETTINGS}"], centered.ravel(), atol=1e-12)


def test_a_rubric_that_is_not_named_as_one_is_rejected(compare, tmp_path):
    folder = write_rollouts(tmp_path / "rollouts", lines_with_rubrics())
    settings = RUBRIC_SETTINGS.replace("rubrics=[rubric]", "rubrics=[]")
    assert "'rubric'" in compare(folder, settings, "drgrpo", status=1)


def test_a_rubric_with_other_weights_than_its_prompt_is_rejected(compare, tmp_path):
    lines = lines_with_rubrics()
    lines[0]["rubric"] = rubric([1])
    folder = write_rollouts(tmp_path / "rollouts", lines)
    assert says(compare(folder, RUBRIC_SETTINGS, "drgrpo", status=1), "'rubric'", "p0-1")


def test_a_trajectory_with_several_outputs_counts_once_with_all_its_tokens(compared_advantages, tmp_path):
    last_outputs = rollout_lines()
    earlier_outputs = []
    for line in last_outputs[:3]:
        earlier_outputs.append(line | {"tokens": 2, "score": 0.0, "correct": 0.0, "format": 0.0})
        line["uid"] = line["uid"].removesuffix("_0") + "_1"
    folder = write_rollouts(tmp_path / "rollouts", last_outputs + earlier_outputs)
    output = compared_advantages(folder, "grpo", KEYS)
    tokens_of_first_three = [length + 2 for length in LENGTHS[:3]]
    assert output["tokens"].tolist() == [*tokens_of_first_three, *LENGTHS[3:]]
    expected = advantages_of("grpo", ("correct", "format"))
    np.testing.assert_allclose(output["advantage/grpo (sum)"], expected, atol=1e-12)


PROMPT_COLUMNS = {
    "uids that are not the trainer's keys": [
        line | {"uid": f"q_{prompt}_7"} for line, prompt in zip(rollout_lines(), PROMPT_OF_ROW, strict=True)
    ],
    "texts": without(rollout_lines(), "uid", "step"),
}


@pytest.mark.parametrize("lines", PROMPT_COLUMNS.values(), ids=PROMPT_COLUMNS)
def test_groups_are_prompts_whatever_identifies_them(lines, compared_advantages, tmp_path):
    with_keys = compared_advantages(write_rollouts(tmp_path / "keys", rollout_lines()), "dgpo")
    output = compared_advantages(write_rollouts(tmp_path / "other", lines, name="1"), "dgpo")
    np.testing.assert_array_equal(output["advantage/dgpo"], with_keys["advantage/dgpo"])


def test_steps_are_in_their_order_whatever_the_files_are_called(compared_advantages, tmp_path):
    """10.jsonl comes before 2.jsonl by name; one file may hold several steps, in any order."""
    first, second, tenth = rollout_lines(1), rollout_lines(2, acc=0.75), rollout_lines(10)
    three_files = write_rollouts(tmp_path / "apart", first, second, tenth)
    one_file = write_rollouts(tmp_path / "mixed", tenth + first + second, name="all")
    apart = compared_advantages(three_files, "hadw")
    mixed = compared_advantages(one_file, "hadw")
    assert apart["step"].tolist() == [1] * 12 + [2] * 12 + [10] * 12
    np.testing.assert_array_equal(mixed["advantage/hadw"], apart["advantage/hadw"])
    # The history of hadw makes its advantages differ from step to step, unlike those of grpo.
    different_advantages = apart[["advantage/grpo", "advantage/hadw"]].round(6).nunique()
    assert different_advantages["advantage/hadw"] > different_advantages["advantage/grpo"]


@pytest.mark.parametrize("step", [1.1, np.inf, None, "1"])
def test_a_step_that_is_not_a_whole_number_is_rejected(step, compare, tmp_path):
    lines = rollout_lines(step=1)
    lines[3]["step"] = step
    folder = write_rollouts(tmp_path / "rollouts", lines)
    assert a_line_says(compare(folder, "gdpo", status=1), "1 of 12 rows", "whole number", "'step'")


FILE_NAMES = ["scored.parquet", "scored.jsonl", "scored.csv", "SCORED.CSV"]


@pytest.mark.parametrize("name", FILE_NAMES)
def test_any_table_of_scored_responses_is_compared(name, compare, compared_advantages, tmp_path):
    """The table has one column per reward, any name for the prompt, and no step."""
    file = write_table(scored_table(question=UIDS, text=["a"] * 12), tmp_path / name)
    output = compared_advantages(file, "gdpo", KEYS, ACCURACY_KEY, "--prompt", "question")
    assert_gdpo_advantages(output)
    assert says(compare(file, "gdpo", KEYS, status=1), "--prompt", "question")
    misspelled = compare(file, "gdpo", KEYS, "--prompt", "questions", status=1)
    assert says(misspelled, "--prompt", "'question'")


@pytest.mark.parametrize("name", FILE_NAMES)
def test_a_group_of_a_table_has_one_prompt_and_one_step(name, compare, tmp_path):
    table = scored_table(question=UIDS)
    two_steps = pd.concat([table.assign(step=1), table.assign(step=2)])
    file = write_table(two_steps, tmp_path / name)
    assert says(compare(file, "gdpo", KEYS, ACCURACY_KEY, "--prompt", "question"), "6 groups of 4")


def test_a_folder_with_csv_files_is_read(compare, tmp_path):
    folder = tmp_path / "rollouts"
    folder.mkdir()
    for step in (1, 2):
        write_table(pd.DataFrame(rollout_lines(step)), folder / f"{step}.csv")
    text = compare(folder, "gdpo", KEYS, ACCURACY_KEY)
    assert says(text, "24 trajectories in 6 groups of 4, steps 1 to 2, 2 batches")


def test_the_error_about_a_folder_without_rollouts_names_its_subfolders_that_have_them(compare, tmp_path):
    folder = write_rollouts(tmp_path / "rollouts", rollout_lines())
    assert says(compare(tmp_path, "gdpo", KEYS, status=1), folder)


TEXTS_LIKE_VALUES = {
    "equal numbers": ("1", "1.0", "01"),
    "missing values": ("NA", "null", "None"),
    "integers that are equal as floats": ("9007199254740993", "9007199254740992", "x"),
}


@pytest.mark.parametrize("column", ["uid", "question"])
@pytest.mark.parametrize("prompts", TEXTS_LIKE_VALUES.values(), ids=TEXTS_LIKE_VALUES)
def test_the_prompts_of_a_csv_file_are_text(prompts, column, compared_advantages, tmp_path):
    prompt_of_row = [prompts[prompt] for prompt in PROMPT_OF_ROW]
    file = write_table(scored_table(**{column: prompt_of_row}), tmp_path / "scored.csv")
    prompt_argument = [] if column == "uid" else ["--prompt", column]
    output = compared_advantages(file, "gdpo", KEYS, ACCURACY_KEY, *prompt_argument)
    assert output["uid"].tolist() == prompt_of_row
    assert_gdpo_advantages(output)


def test_a_cell_of_a_csv_file_that_is_not_a_number_is_not_scored(compare, tmp_path):
    table = scored_table(question=UIDS).astype(object)
    table.loc[0, "correct"] = "error"
    table.loc[1, "correct"] = None
    file = write_table(table, tmp_path / "scored.csv")
    text = compare(file, "gdpo", KEYS, ACCURACY_KEY, "--prompt", "question")
    assert a_line_says(text, "note: ", "'correct'", "2 of 12")


def test_a_csv_row_without_a_prompt_is_rejected(compare, tmp_path):
    table = scored_table(question=UIDS).astype(object)
    table.loc[2, "question"] = None
    file = write_table(table, tmp_path / "scored.csv")
    text = compare(file, "gdpo", KEYS, ACCURACY_KEY, "--prompt", "question", status=1)
    assert says(text, "1 of 12 rows", "'question'")


@pytest.mark.parametrize("name", ["scored.xlsx", "scored.csv.gz", "scored"])
def test_a_file_of_another_format_is_rejected_with_the_formats(name, compare, tmp_path):
    file = tmp_path / name
    file.write_text("question,correct")
    assert says(compare(file, "gdpo", KEYS, status=1), name, ".parquet", ".jsonl", ".csv")


def test_the_log_of_a_run_is_rejected_with_the_command_that_reads_it(compare, tmp_path):
    log = write_log(tmp_path / "run.jsonl", (1, {"reward/x/mean": 1.0}))
    assert says(compare(log, "gdpo", status=1), log, "report")


def test_an_empty_table_is_rejected(compare, tmp_path):
    file = tmp_path / "empty.csv"
    file.write_text("question,correct")
    assert says(compare(file, "gdpo", status=1), "empty.csv")


def test_a_folder_that_has_only_the_log_of_a_run_is_rejected(compare, tmp_path):
    folder = write_rollouts(tmp_path / "r", [{"step": 1, "data": {}}], name="metrics")
    assert says(compare(folder, "gdpo", status=1), "*.jsonl", "*.csv", "advantages-*.parquet")


def test_a_reward_that_is_text_is_rejected_with_the_columns_of_numbers(compare, tmp_path):
    file = write_table(scored_table(uid=UIDS, text=["a"] * 12), tmp_path / "scored.csv")
    text = compare(file, "gdpo", "algorithm.rewards.keys=[text,correct]", status=1)
    assert says(text, "'text'", "'correct', 'format'", "algorithm.rewards.rubrics=[text]")


LONG_LIST = [7] * 1500
OTHER_LONG_LIST = [*LONG_LIST[:700], 8, *LONG_LIST[701:]]
SIMILAR_PROMPTS = {
    "long lists": [LONG_LIST, OTHER_LONG_LIST, [*LONG_LIST, 7]],
    "lists in structs": [{"role": "user", "ids": ids} for ids in (LONG_LIST, OTHER_LONG_LIST, [])],
    "large integers": [2**53, 2**53 + 1, 2**53 + 2],
}


@pytest.mark.parametrize("is_torn", [False, True], ids=["complete", "torn"])
@pytest.mark.parametrize("name", ["scored.parquet", "scored.jsonl"])
@pytest.mark.parametrize("prompts", SIMILAR_PROMPTS.values(), ids=SIMILAR_PROMPTS)
def test_different_prompts_are_different_groups(prompts, name, is_torn, compared_advantages, tmp_path):
    """Also next to a torn line or an empty row, for which pandas turns integers into floats."""
    file = tmp_path / name
    rows = []
    for prompt, correct, format_reward in zip(PROMPT_OF_ROW, CORRECT, FORMAT, strict=True):
        rows.append({"question": prompts[prompt], "correct": correct, "format": format_reward})
    if file.suffix == ".parquet":
        empty_rows = [dict.fromkeys(rows[0])] if is_torn else []
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows + empty_rows), file)
    else:
        write_json_lines(file, rows)
        if is_torn:
            append(file, '{"question"')
    output = compared_advantages(file, "gdpo", KEYS, ACCURACY_KEY, "--prompt", "question")
    assert_gdpo_advantages(output)


def append(file, text):
    """Append a text to a file."""
    with file.open("a") as opened:
        opened.write(text)


@pytest.fixture
def incomplete_rollouts(tmp_path):
    """Return a folder with two groups of one response and one of four, an unscored reward, and a torn line."""
    lines = rollout_lines()
    lines = [lines[0], lines[4], *lines[8:]]
    lines[0]["correct"] = None
    folder = write_rollouts(tmp_path / "r", without(lines, "acc", "tokens"))
    append(folder / "1.jsonl", '{"input": "x", "outp')
    return folder


def test_notes_count_torn_lines_unscored_rewards_and_single_responses(incomplete_rollouts, compare):
    text = compare(incomplete_rollouts, "gdpo", KEYS, ACCURACY_KEY)
    assert says(text, "groups of 1 to 4", "accuracy (correct)")
    assert a_line_says(text, "note: ", "Skipped 1")
    assert a_line_says(text, "note: ", "'correct'", "1 of 6")
    assert a_line_says(text, "note: ", "2 group(s)", "grpo")


def test_a_note_says_that_weights_by_tokens_need_the_number_of_tokens(incomplete_rollouts, compare):
    variant = f"gdpo algorithm.gdpo.whiten=token {KEYS}"
    text = compare(incomplete_rollouts, variant, ACCURACY_KEY)
    assert a_line_says(text, f"note: {variant}", "approximate", "`tokens`")


def test_a_note_says_that_rollouts_without_steps_have_no_history(compare, tmp_path):
    without_steps = write_rollouts(tmp_path / "rollouts", without(rollout_lines(), "step"), name="1")
    with_steps = write_rollouts(tmp_path / "steps", rollout_lines(1), rollout_lines(2))
    assert a_line_says(compare(without_steps, "hadw"), "note: hadw", "history", "`step`")
    assert not says(compare(with_steps, "hadw"), "`step`")
