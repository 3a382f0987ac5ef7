"""The advantages are those that the estimators give in a run, and notes say what differs from a run."""

import json

import numpy as np
import pandas as pd
import pyarrow.parquet
import pytest

from tests.facts import a_line_says, says
from tests.tools import made
from verl_ext import Settings, build, rubric

BOTH = ("right", "form")
RIGHT = "algorithm.rewards.accuracy_key=right"


@pytest.fixture
def compare(capsys):
    return lambda *arguments, status=0: made.call(capsys, "compare", *arguments, status=status)


@pytest.fixture
def advantages(tmp_path, compare):
    """Compare, and return what `--output` holds."""

    def advantages(folder, *arguments):
        compare(folder, *arguments, "--output", tmp_path / "out.parquet")
        return pd.read_parquet(tmp_path / "out.parquet")

    return advantages


def expected(name, keys=("score",), **sections):
    settings = Settings.parse(sections | ({} if keys == ("score",) else {"rewards": {"keys": list(keys)}}))
    chain = build(name, settings)
    return chain(made.batch(keys)).advantages


STEPS = ["weighted_sum", "center", {"step": "scale_by_mad", "epsilon": 0.5}]
CASES = [
    ("dgpo", expected("dgpo")),
    (f"gdpo algorithm.gdpo.whiten=token +{made.KEYS}", expected("gdpo", BOTH, gdpo={"whiten": "token"})),
    (f"dgpo   {made.KEYS}  algorithm.dgpo.dqw_temp=0.5", expected("dgpo", BOTH, dgpo={"dqw_temp": 0.5})),
    (f"grpo {made.KEYS}", expected("grpo", BOTH)),
    ("[weighted_sum, center, {step: scale_by_mad, epsilon: 0.5}]", expected("compose", compose={"steps": STEPS})),
]


@pytest.mark.parametrize(("variant", "wanted"), CASES)
def test_a_variant_has_the_advantages_of_its_estimator(variant, wanted, advantages, tmp_path):
    folder = made.rollouts(tmp_path / "rollouts", made.entries())
    found = advantages(folder, variant)
    (ours,) = (name for name in found if name.startswith("advantage/") and name != "advantage/grpo")
    np.testing.assert_allclose(found[ours], wanted, atol=1e-12)
    np.testing.assert_allclose(found["advantage/grpo"], expected("grpo"), atol=1e-12)


def test_a_rubric_is_read_from_the_text_of_json_lines(advantages, compare, tmp_path):
    lines = made.entries()
    for line in lines:
        count = 2 + (line["gts"] == "0")
        line["rubric"] = rubric([line["right"], line["form"], 0.5][:count], [1, -3, 2][:count])
    folder = made.rollouts(tmp_path / "rollouts", lines)
    wanted = [(line["right"] - 3 * line["form"]) / (6 if line["gts"] == "0" else 4) for line in lines]
    settings = f"algorithm.rewards.keys=[right,rubric] algorithm.rewards.rubrics=[rubric] {RIGHT}"
    found = advantages(folder, f"drgrpo {settings}")
    (ours,) = (name for name in found if name.startswith("advantage/drgrpo"))
    total = (np.array(made.RIGHT) + wanted).reshape(3, 4)
    np.testing.assert_allclose(found[ours], (total - total.mean(axis=1, keepdims=True)).ravel(), atol=1e-12)
    assert "'rubric'" in compare(folder, settings.replace("rubrics=[rubric]", "rubrics=[]"), "drgrpo", status=1)
    made.rollouts(folder, [lines[0] | {"rubric": rubric([1])}, *lines[1:]])
    assert says(compare(folder, settings, "drgrpo", status=1), "'rubric'", "p0-1")


def test_a_setting_alone_applies_to_all_variants_and_may_come_after_options(advantages, tmp_path):
    folder = made.rollouts(tmp_path / "rollouts", made.entries())
    setting = "algorithm.norm_adv_by_std_in_grpo=False"
    found = advantages(folder, "gdpo", "hadw", "--output", tmp_path / "other", made.KEYS, setting, "drgrpo")
    without = {"norm_adv_by_std_in_grpo": False}
    for name in ("gdpo", "drgrpo"):
        np.testing.assert_allclose(found[f"advantage/{name}"], expected(name, BOTH, **without), atol=1e-12)
    np.testing.assert_allclose(found["advantage/grpo"], expected("grpo", **without), atol=1e-12)


def test_history_goes_through_the_steps_in_order_whatever_the_files_are_called(advantages, tmp_path):
    """10.jsonl comes before 2.jsonl by name; one file may hold several steps, in any order."""
    steps = [made.entries(1), made.entries(2, acc=0.75), made.entries(10)]
    apart = advantages(made.rollouts(tmp_path / "apart", *steps), "hadw")
    assert apart["step"].tolist() == [1] * 12 + [2] * 12 + [10] * 12
    mixed = made.rollouts(tmp_path / "mixed", steps[2] + steps[0] + steps[1], name="all")
    np.testing.assert_array_equal(advantages(mixed, "hadw")["advantage/hadw"], apart["advantage/hadw"])
    assert len(set(apart["advantage/hadw"].round(6))) > len(set(apart["advantage/grpo"].round(6)))


def test_a_note_says_that_rollouts_without_steps_have_no_history(compare, tmp_path):
    folder = made.rollouts(tmp_path / "rollouts", made.without(made.entries(), "step"), name="1")
    assert a_line_says(compare(folder, "hadw"), "note: hadw", "history", "`step`")
    assert not says(compare(made.rollouts(tmp_path / "steps", made.entries(1), made.entries(2)), "hadw"), "`step`")


def test_a_trajectory_with_several_outputs_counts_once_with_all_its_tokens(advantages, tmp_path):
    earlier = [line | {"tokens": 2, "score": 0.0, "right": 0.0, "form": 0.0} for line in made.entries()[:3]]
    later = [line | {"uid": f"{line['uid'][:-1]}1"} for line in made.entries()[:3]]
    found = advantages(made.rollouts(tmp_path / "rollouts", later + made.entries()[3:] + earlier), "grpo", made.KEYS)
    assert found["tokens"].tolist() == [length + 2 * (row < 3) for row, length in enumerate(made.LENGTHS)]
    np.testing.assert_allclose(found["advantage/grpo (sum)"], expected("grpo", BOTH), atol=1e-12)


def test_groups_are_prompts_whatever_identifies_them(advantages, tmp_path):
    whole = advantages(made.rollouts(tmp_path / "keys", made.entries()), "dgpo")["advantage/dgpo"]
    plain = [line | {"uid": f"q_{row // 4}_7"} for row, line in enumerate(made.entries())]
    texts = made.without(made.entries(), "uid", "step")
    for name, lines in {"plain": plain, "texts": texts}.items():
        found = advantages(made.rollouts(tmp_path / name, lines, name="1"), "dgpo")
        np.testing.assert_array_equal(found["advantage/dgpo"], whole, err_msg=name)


# What a dump says of its run.
ACCURACY = {"rewards": {"keys": ["right", "form"], "accuracy_key": "right"}}
CONDITIONS = {"form": {"reward": "right", "at_least": 1.0}}
WEIGHTED = {"rewards": {"keys": ["right", "form"], "weights": [3.0, 1.0], "conditions": CONDITIONS}}


@pytest.mark.parametrize("over", ["token", "sequence"])
def test_the_advantages_of_a_run_that_counts_tokens_or_rows_are_reproduced(advantages, tmp_path, over):
    steps = ["weighted_sum", "center", {"step": "balance", "over": over}]
    folder, recorded = made.dump(tmp_path / "dump", [1], name="compose", algorithm={"compose": {"steps": steps}})
    found = advantages(folder, f"[weighted_sum,center,{{step:balance,over:{over}}}]")
    np.testing.assert_allclose(found.iloc[:, -1], recorded, atol=1e-12)


@pytest.mark.parametrize("step", [1.1, np.inf, None, "1"])
def test_a_step_is_a_whole_number(compare, tmp_path, step):
    lines = [entry | {"step": step if row == 3 else 1} for row, entry in enumerate(made.entries())]
    folder = made.rollouts(tmp_path / "rollouts", lines)
    assert a_line_says(compare(folder, "gdpo", status=1), "1 of 12 rows", "whole number", "'step'")


def write(table, file):
    """Write a table in the format of the file's suffix."""
    match file.suffix.lower():
        case ".parquet":
            table.to_parquet(file)
        case ".csv":
            table.to_csv(file, index=False)
        case _:
            table.to_json(file, orient="records", lines=True)


@pytest.mark.parametrize("name", ["scored.parquet", "scored.jsonl", "scored.csv", "SCORED.CSV"])
def test_any_table_of_scored_responses_is_compared(compare, advantages, tmp_path, name):
    """Without a run: one column per reward, any name for the prompt, with or without a step."""
    table = pd.DataFrame({"question": made.UIDS, "right": made.RIGHT, "form": made.FORM, "text": ["a"] * 12})
    file = tmp_path / name
    write(table, file)
    found = advantages(file, "gdpo", made.KEYS, RIGHT, "--prompt", "question")
    np.testing.assert_allclose(found["advantage/gdpo"], expected("gdpo", BOTH), atol=1e-12)
    assert says(compare(file, "gdpo", made.KEYS, status=1), "--prompt", "question")
    assert says(compare(file, "gdpo", made.KEYS, "--prompt", "questions", status=1), "--prompt", "'question'")
    two = tmp_path / f"two-{name}"
    both = pd.concat([table.assign(step=1), table.assign(step=2)])
    write(both, two)
    assert says(compare(two, "gdpo", made.KEYS, RIGHT, "--prompt", "question"), "6 groups of 4")


def test_a_folder_with_csv_files_is_read(compare, tmp_path):
    (tmp_path / "r").mkdir()
    for step in (1, 2):
        write(pd.DataFrame(made.entries(step)), tmp_path / f"r/{step}.csv")
    text = compare(tmp_path / "r", "gdpo", made.KEYS, RIGHT)
    assert says(text, "24 trajectories in 6 groups of 4, steps 1 to 2, 2 batches")
    assert says(compare(tmp_path, "gdpo", made.KEYS, status=1), tmp_path / "r")


@pytest.mark.parametrize("column", ["uid", "question"])
@pytest.mark.parametrize(
    "prompts", [("1", "1.0", "01"), ("NA", "null", "None"), ("9007199254740993", "9007199254740992", "x")]
)
def test_the_prompts_of_a_csv_file_are_text(advantages, tmp_path, prompts, column):
    """Also if they look like numbers, of which some would be equal, or like missing values."""
    questions = [prompts[row // 4] for row in range(12)]
    write(pd.DataFrame({column: questions, "right": made.RIGHT, "form": made.FORM}), tmp_path / "scored.csv")
    named = [] if column == "uid" else ["--prompt", column]
    found = advantages(tmp_path / "scored.csv", "gdpo", made.KEYS, RIGHT, *named)
    assert found["uid"].tolist() == questions
    np.testing.assert_allclose(found["advantage/gdpo"], expected("gdpo", BOTH), atol=1e-12)


def test_a_cell_of_a_csv_file_that_is_not_a_number_is_not_scored(compare, tmp_path):
    table = pd.DataFrame({"question": made.UIDS, "right": made.RIGHT, "form": made.FORM}).astype(object)
    table.loc[0, "right"] = "error"
    table.loc[1, "right"] = None
    write(table, tmp_path / "scored.csv")
    text = compare(tmp_path / "scored.csv", "gdpo", made.KEYS, RIGHT, "--prompt", "question")
    assert a_line_says(text, "note: ", "'right'", "2 of 12")
    table.loc[2, "question"] = None
    write(table, tmp_path / "scored.csv")
    text = compare(tmp_path / "scored.csv", "gdpo", made.KEYS, RIGHT, "--prompt", "question", status=1)
    assert says(text, "1 of 12 rows", "'question'")


@pytest.mark.parametrize("name", ["scored.xlsx", "scored.csv.gz", "scored"])
def test_a_file_of_another_format_is_rejected_with_the_formats(compare, tmp_path, name):
    (tmp_path / name).write_text("question,right")
    assert says(compare(tmp_path / name, "gdpo", made.KEYS, status=1), name, ".parquet", ".jsonl", ".csv")


def test_the_log_of_a_run_and_an_empty_table_are_rejected(compare, tmp_path):
    log = made.log(tmp_path / "run.jsonl", (1, {"reward/x/mean": 1.0}))
    assert says(compare(log, "gdpo", status=1), log, "report")
    (tmp_path / "empty.csv").write_text("question,right")
    assert says(compare(tmp_path / "empty.csv", "gdpo", status=1), "empty.csv")


def test_a_reward_that_is_text_is_rejected_with_the_columns_of_numbers(compare, tmp_path):
    table = pd.DataFrame({"uid": made.UIDS, "right": made.RIGHT, "form": made.FORM, "text": ["a"] * 12})
    write(table, tmp_path / "scored.csv")
    text = compare(tmp_path / "scored.csv", "gdpo", "algorithm.rewards.keys=[text,right]", status=1)
    assert says(text, "'text'", "'form', 'right'", "algorithm.rewards.rubrics=[text]")


LONG = [7] * 1500
OTHER = [*LONG[:700], 8, *LONG[701:]]
PROMPTS = {
    "long lists": [LONG, OTHER, [*LONG, 7]],
    "lists in structs": [{"role": "user", "ids": ids} for ids in (LONG, OTHER, [])],
    "large integers": [2**53, 2**53 + 1, 2**53 + 2],
}


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("name", ["scored.parquet", "scored.jsonl"])
@pytest.mark.parametrize("prompts", PROMPTS)
def test_different_prompts_are_different_groups(advantages, tmp_path, prompts, name, torn):
    """Also next to a torn line or an empty row, for which pandas turns integers into floats."""
    questions = [PROMPTS[prompts][row // 4] for row in range(12)]
    columns = {"question": questions, "right": made.RIGHT, "form": made.FORM}
    columns = {key: [*values, *[None] * torn] for key, values in columns.items()}
    table, file = pyarrow.table(columns), tmp_path / name
    if name.endswith("parquet"):
        pyarrow.parquet.write_table(table, file)
    else:
        lines = [json.dumps(row) for row in table.to_pylist()]
        file.write_text("\n".join([*lines[:12], *['{"question"'] * torn]))
    found = advantages(file, "gdpo", made.KEYS, RIGHT, "--prompt", "question")
    np.testing.assert_allclose(found["advantage/gdpo"], expected("gdpo", BOTH), atol=1e-12)


def test_the_settings_of_a_run_apply_to_the_variants(compare, advantages, tmp_path):
    folder, recorded = made.dump(tmp_path / "dump", [1, 2], algorithm=WEIGHTED)
    found = advantages(folder, "gdpo")
    np.testing.assert_allclose(found["advantage/gdpo"], recorded, atol=1e-12)
    assert found["tokens"].tolist() == made.LENGTHS * 2
    text = compare(folder, "gdpo")
    assert a_line_says(text, "note: ", "run with gdpo")
    assert a_line_says(text, "note: ", '"weights": [3.0, 1.0]', '"at_least": 1.0')
    assert a_line_says(text, "gdpo", "equal", "recorded")
    assert a_line_says(compare(folder, "gdpo algorithm.gdpo.epsilon=0.5"), "epsilon=0.5", "differ", "recorded")


def test_an_argument_takes_precedence_over_the_setting_of_the_run(advantages, tmp_path):
    folder, _ = made.dump(tmp_path / "dump", [1], algorithm=WEIGHTED)
    alone = "algorithm.rewards.conditions=null"
    plain = ["gdpo", alone, "algorithm.rewards.weights=null"]
    np.testing.assert_allclose(advantages(folder, *plain)["advantage/gdpo"], expected("gdpo", BOTH), atol=1e-12)
    # Other keys do not take the weights of the run's.
    turned = advantages(folder, "drgrpo", "algorithm.rewards.keys=[form,right]", alone)["advantage/drgrpo"]
    np.testing.assert_allclose(turned, expected("drgrpo", BOTH), atol=1e-12)


def test_a_note_says_that_the_kl_of_a_run_is_ignored(compare, tmp_path):
    folder, _ = made.dump(tmp_path, [1], name="dgpo", algorithm=ACCURACY | {"use_kl_in_reward": True})
    assert a_line_says(compare(folder, "gdpo"), "note: ", "algorithm.use_kl_in_reward=True")


def test_the_advantages_of_hadw_are_reproduced_from_a_complete_dump(compare, advantages, tmp_path):
    rights = {step: made.RIGHT[step % 5 :] + made.RIGHT[: step % 5] for step in range(1, 4)}
    folder, recorded = made.dump(tmp_path / "dump", [1, 2, 3], name="hadw", algorithm=ACCURACY, rights=rights)
    np.testing.assert_allclose(advantages(folder, "hadw")["advantage/hadw"], recorded, atol=1e-12)
    assert a_line_says(compare(folder, "hadw"), "hadw", "equal", "recorded")
    other, _ = made.dump(tmp_path / "later", [2, 3], name="hadw", algorithm=ACCURACY, rights=rights)
    text = compare(other, "hadw")
    assert a_line_says(text, "note: hadw", "history")
    assert a_line_says(text, "hadw", "differ", "recorded")


def test_the_steps_of_a_resumed_run_replace_the_steps_that_it_repeats(compare, advantages, tmp_path):
    folder, _ = made.dump(tmp_path / "dump", [1, 2, 3])
    made.dump(folder, [3], start=2, algorithm=WEIGHTED)
    found = advantages(folder, "gdpo")
    first, second, third = np.split(found["advantage/grpo"].to_numpy(), 3)  # on the total, which has other weights
    assert (first == second).all()
    assert (first != third).any()
    assert found["reward/form"].tolist() == 3 * made.FORM  # as it was scored, with and without the condition
    text = compare(folder, "gdpo")
    assert a_line_says(text, "note: ", "2 of 3 updates", "settings")


def test_a_note_names_a_dump_that_cannot_be_read(compare, tmp_path):
    broken, (folder, _) = "advantages-00000009-000.parquet", made.dump(tmp_path, [1, 2])
    (folder / broken).write_bytes(b"PAR1")
    pd.DataFrame({"step": [1]}).to_parquet(folder / "advantages-other.parquet")
    text = compare(folder, "gdpo")
    assert a_line_says(text, "note: ", broken)
    assert a_line_says(text, "note: ", "advantages-other.parquet", "verl_ext")
    assert a_line_says(compare(folder / broken, "gdpo", status=1), broken, "cannot be read")


def test_the_text_has_the_tables_and_the_counts(compare, tmp_path):
    folder = made.rollouts(tmp_path / "r", made.entries(1), made.entries(2))
    text = compare(folder, "gdpo", "hadw", "[weighted_sum,center,scale_by_mad,whiten]", made.KEYS)
    assert a_line_says(text, "24 trajectories in 6 groups of 4, steps 1 to 2, 2 batches", folder)
    assert a_line_says(text, "[weighted_sum,center,scale_by_mad,whiten]")
    assert a_line_says(text, "estimator", "zero-variance groups", "zero advantages", "mean |A|", "sign flips")
    assert a_line_says(text, "grpo", "0.0% (0-39%)")  # Wilson's interval for none of six
    assert a_line_says(text, "(number of groups)", 2)
    assert says(text, "accuracy (acc)", "right  form")
    assert a_line_says(compare(folder, "gdpo", "algorithm.rewards.keys=[score,right]"), "score", "right", "rest")


def contributions(text):
    """The rows of the second table, by the text of the variant."""
    rows = text.split("\n\n")[2].splitlines()[3:]
    return {row.split()[0]: row.split()[1:] for row in rows if not row.startswith("  ")}


def test_a_contribution_is_what_a_reward_adds_to_the_sum_of_the_variant(compare, tmp_path):
    """By hand. The score is 2 right + form, and to it a logged `right` adds 1 right."""
    folder, own = made.rollouts(tmp_path / "r", made.entries()), "[tests.integration.custom_steps:Lowest,center]"
    found = contributions(compare(folder, "drgrpo", own, made.KEYS))
    assert found["grpo"] == ["26.3%", "47.5%", "26.3%"]
    assert found["drgrpo"] == ["36.8%", "63.2%", "0.0%"]
    assert found[own] == ["-", "-", "-"]


def test_grpo_on_a_weighted_sum_has_the_contributions_of_the_sum(compare, tmp_path):
    """By hand: with the weights and the condition of the run, or with the weights of the arguments."""
    dump, _ = made.dump(tmp_path / "dump", [1, 2], algorithm=WEIGHTED)
    table = made.rollouts(tmp_path / "r", made.without(made.entries(), "score"))
    weighted = [made.KEYS, "algorithm.rewards.weights=[3,1]"]
    for folder, given, wanted in ((dump, [], ["75.8%", "24.2%"]), (table, weighted, ["80.3%", "19.7%"])):
        found = contributions(compare(folder, "drgrpo", *given, RIGHT, "algorithm.norm_adv_by_std_in_grpo=False"))
        assert found["grpo"] == found["drgrpo"] == [*wanted, "0.0%"]


@pytest.mark.parametrize(
    ("variant", "has_note"),
    [("rvpo", True), ("gdpo", False), ("dvao", False), ("[soft_min,center]", True), ("[weighted_sum,center]", False)],
)
def test_a_note_says_that_the_weights_have_no_effect_on_a_variant(variant, has_note, compare, tmp_path):
    folder = made.rollouts(tmp_path / "r", made.entries())
    text = compare(folder, variant, made.KEYS, RIGHT, "algorithm.rewards.weights=[3,1]")
    wanted = (f"note: {variant}", "algorithm.rewards.weights has no effect", "Set algorithm.rewards.weights=null")
    assert a_line_says(text, *wanted) == has_note
    without_weights = compare(folder, variant, made.KEYS, RIGHT)
    assert not says(without_weights, "algorithm.rewards.weights")


def test_notes_count_torn_lines_missing_rewards_and_single_responses(compare, tmp_path):
    lines = [line for row, line in enumerate(made.entries()) if row % 4 == 0 or row > 7]
    lines[0]["right"] = None
    folder = made.rollouts(tmp_path / "r", made.without(lines, "acc", "tokens"))
    with (folder / "1.jsonl").open("a") as file:
        file.write('{"input": "x", "outp')
    text = compare(folder, "gdpo", made.KEYS, RIGHT)
    assert says(text, "groups of 1 to 4", "accuracy (right)")
    assert a_line_says(text, "note: ", "Skipped 1")
    assert a_line_says(text, "note: ", "'right'", "1 of 6")
    assert a_line_says(text, "note: ", "2 group(s)", "grpo")
    named = f"gdpo algorithm.gdpo.whiten=token {made.KEYS}"
    assert a_line_says(compare(folder, named, RIGHT), f"note: {named}", "approximate", "`tokens`")


@pytest.mark.parametrize("variant", ["dvao", "gdpo", "[center,scale_by_std,weighted_sum]"])
def test_an_estimator_that_needs_no_accuracy_is_compared_without_one(variant, compare, advantages, tmp_path):
    """The table by accuracy is omitted, and a note says which setting it needs."""
    folder = made.rollouts(tmp_path / "r", made.without(made.entries(), "acc"))
    text = compare(folder, variant, made.KEYS)
    assert a_line_says(text, "note: ", "table", "algorithm.rewards.accuracy_key", "'form'", "'right'")
    assert contributions(text)
    assert "(number of groups)" not in text
    named = compare(folder, variant, made.KEYS, RIGHT)
    assert says(named, "accuracy (right)", "(number of groups)")
    assert not a_line_says(named, "note: ", "table")
    found = advantages(folder, variant, made.KEYS)
    name = f"advantage/{variant}"
    np.testing.assert_array_equal(found[name], advantages(folder, variant, made.KEYS, RIGHT)[name])


def test_an_estimator_that_needs_an_accuracy_may_name_it_alone(compare, tmp_path):
    folder = made.rollouts(tmp_path / "r", made.without(made.entries(), "acc"))
    assert contributions(compare(folder, f"hadw {made.KEYS} {RIGHT}", f"dvao {made.KEYS}"))


def test_a_reward_outside_the_unit_interval_is_compared_without_an_accuracy(compare, tmp_path):
    """The only reward is used as the accuracy, and is beyond [0, 1]."""
    folder = made.rollouts(tmp_path / "r", made.without(made.entries(), "acc", "right", "form"))
    assert a_line_says(compare(folder, "drgrpo"), "note: ", "table", "'score'", "accuracy_threshold")


ENTRIES = made.entries()
REJECTED = [
    (ENTRIES, [], ("'gdpo'",)),
    (ENTRIES, ["gdpo", "algorithm.rewards.keys=[rihgt,form]"], ("'rihgt'", "did you mean 'right'")),
    (ENTRIES, ["gdpo"], ("algorithm.rewards.keys", "'form'", "'right'")),
    (ENTRIES, ["grpo"], ("'grpo'", "twice")),
    (ENTRIES, ["gdpo", made.KEYS, "algorithm.rewards.rejected=exclude"], ("algorithm.rewards.rejected=exclude",)),
    (ENTRIES, ["gdpo", made.KEYS, "+algorithm.rewards.rejected=exclude"], ("algorithm.rewards.rejected=exclude",)),
    (ENTRIES, ["gdpo", made.KEYS, "algorithm.rewards.per_turn=[form]"], ("algorithm.rewards.per_turn=null",)),
    (made.without(ENTRIES, "acc"), ["hadw", made.KEYS], ("algorithm.rewards.accuracy_key", "'form'", "'right'")),
    (made.without(ENTRIES, "acc"), ["gdpo", made.KEYS, f"{RIGHT}s"], ("algorithm.rewards.accuracy_key", "'rights'")),
    (made.without(ENTRIES, "right", "form", "acc"), ["gdpo", made.KEYS], ("'right'", "'score'")),
    (made.entries(right=10**400), ["gdpo", made.KEYS], ("cannot be read",)),
    (made.without(made.entries(right=np.inf), "score"), ["gdpo", made.KEYS], ("'right'", "'p0-1'", "inf")),
]


@pytest.mark.parametrize(("lines", "arguments", "wanted"), REJECTED, ids=range(len(REJECTED)))
def test_mistakes_are_rejected_with_the_valid_values(lines, arguments, wanted, compare, tmp_path):
    folder = made.rollouts(tmp_path / "r", lines)
    assert says(compare(folder, *arguments, status=1), *wanted)


def test_a_folder_with_the_log_of_a_run_alone_is_rejected(compare, tmp_path):
    folder = made.rollouts(tmp_path / "r", [{"step": 1, "data": {}}], name="metrics")
    assert says(compare(folder, "gdpo", status=1), "*.jsonl", "*.csv", "advantages-*.parquet")
