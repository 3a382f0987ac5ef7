"""The advantages are those that the estimators give in a run, and notes say what differs from a run."""

import numpy as np
import pandas as pd
import pytest
from pyarrow import parquet

from tests.facts import a_line_says, says
from tests.tools.expected import advantages_of
from tests.tools.run_files import (
    ACCURACY_KEY,
    CORRECT,
    FORMAT,
    KEYS,
    LENGTHS,
    rollout_lines,
    without,
    write_dump,
    write_rollouts,
)
from verl_ext import Step

BOTH = ("correct", "format")


@pytest.fixture
def rollouts(tmp_path):
    """Return a folder with one step of verl's rollouts."""
    return write_rollouts(tmp_path / "rollouts", rollout_lines())


@pytest.fixture
def rollouts_without_accuracy(tmp_path):
    """Return a folder with one step of verl's rollouts that have no reward `acc`."""
    return write_rollouts(tmp_path / "no_accuracy", without(rollout_lines(), "acc"))


STEPS = ["weighted_sum", "center", {"step": "scale_by_mad", "epsilon": 0.5}]
ADVANTAGES_OF_VARIANTS = {
    "dgpo": advantages_of("dgpo"),
    f"gdpo algorithm.gdpo.whiten=token +{KEYS}": advantages_of("gdpo", BOTH, gdpo={"whiten": "token"}),
    f"dgpo   {KEYS}  algorithm.dgpo.dqw_temp=0.5": advantages_of("dgpo", BOTH, dgpo={"dqw_temp": 0.5}),
    f"grpo {KEYS}": advantages_of("grpo", BOTH),
    "[weighted_sum, center, {step: scale_by_mad, epsilon: 0.5}]": advantages_of("compose", compose={"steps": STEPS}),
}


@pytest.mark.parametrize("variant", ADVANTAGES_OF_VARIANTS)
def test_a_variant_has_the_advantages_of_its_estimator(variant, rollouts, compared_advantages):
    output = compared_advantages(rollouts, variant)
    np.testing.assert_allclose(output[f"advantage/{variant}"], ADVANTAGES_OF_VARIANTS[variant], atol=1e-12)
    np.testing.assert_allclose(output["advantage/grpo"], advantages_of("grpo"), atol=1e-12)


def test_a_setting_applies_to_all_variants_and_may_follow_an_option(rollouts, compared_advantages, tmp_path):
    setting = "algorithm.norm_adv_by_std_in_grpo=False"
    output = compared_advantages(rollouts, "gdpo", "hadw", "--output", tmp_path / "other", KEYS, setting, "drgrpo")
    without_std = {"norm_adv_by_std_in_grpo": False}
    for name in ("gdpo", "drgrpo"):
        np.testing.assert_allclose(
            output[f"advantage/{name}"], advantages_of(name, BOTH, **without_std), atol=1e-12, err_msg=name
        )
    np.testing.assert_allclose(output["advantage/grpo"], advantages_of("grpo", **without_std), atol=1e-12)


# Sections `algorithm` of runs that write dumps.
WITH_ACCURACY = {"rewards": {"keys": ["correct", "format"], "accuracy_key": "correct"}}
WITH_WEIGHTS = {
    "rewards": {
        "keys": ["correct", "format"],
        "weights": [3.0, 1.0],
        "conditions": {"format": {"reward": "correct", "at_least": 1.0}},
    }
}


@pytest.mark.parametrize("over", ["token", "sequence"])
def test_the_advantages_of_a_run_that_counts_tokens_or_rows_are_reproduced(over, compared_advantages, tmp_path):
    steps = ["weighted_sum", "center", {"step": "balance", "over": over}]
    algorithm = {"compose": {"steps": steps}}
    folder, recorded = write_dump(tmp_path / "dump", [1], name="compose", algorithm=algorithm)
    variant = f"[weighted_sum,center,{{step:balance,over:{over}}}]"
    output = compared_advantages(folder, variant)
    np.testing.assert_allclose(output[f"advantage/{variant}"], recorded, atol=1e-12)


def test_the_settings_of_a_run_apply_to_the_variants(compare, compared_advantages, tmp_path):
    folder, recorded = write_dump(tmp_path / "dump", [1, 2], algorithm=WITH_WEIGHTS)
    output = compared_advantages(folder, "gdpo")
    np.testing.assert_allclose(output["advantage/gdpo"], recorded, atol=1e-12)
    assert output["tokens"].tolist() == LENGTHS * 2
    text = compare(folder, "gdpo")
    assert a_line_says(text, "note: ", "run with gdpo")
    assert a_line_says(text, "note: ", '"weights": [3.0, 1.0]', '"at_least": 1.0')
    assert a_line_says(text, "gdpo", "equal", "recorded")
    with_epsilon = compare(folder, "gdpo algorithm.gdpo.epsilon=0.5")
    assert a_line_says(with_epsilon, "epsilon=0.5", "differ", "recorded")


def test_an_argument_takes_precedence_over_the_setting_of_the_run(compared_advantages, tmp_path):
    folder, _ = write_dump(tmp_path / "dump", [1], algorithm=WITH_WEIGHTS)
    overrides = ["algorithm.rewards.conditions=null", "algorithm.rewards.weights=null"]
    output = compared_advantages(folder, "gdpo", *overrides)
    np.testing.assert_allclose(output["advantage/gdpo"], advantages_of("gdpo", BOTH), atol=1e-12)


def test_other_keys_do_not_get_the_weights_of_the_run(compared_advantages, tmp_path):
    folder, _ = write_dump(tmp_path / "dump", [1], algorithm=WITH_WEIGHTS)
    overrides = ["algorithm.rewards.conditions=null", "algorithm.rewards.keys=[format,correct]"]
    output = compared_advantages(folder, "drgrpo", *overrides)
    np.testing.assert_allclose(output["advantage/drgrpo"], advantages_of("drgrpo", BOTH), atol=1e-12)


def test_a_note_says_that_the_kl_of_a_run_is_ignored(compare, tmp_path):
    folder, _ = write_dump(tmp_path, [1], name="dgpo", algorithm=WITH_ACCURACY | {"use_kl_in_reward": True})
    assert a_line_says(compare(folder, "gdpo"), "note: ", "algorithm.use_kl_in_reward=True")


CORRECT_AT_STEP = {step: CORRECT[step:] + CORRECT[:step] for step in range(1, 4)}


def test_the_advantages_of_hadw_are_reproduced_from_a_complete_dump(compare, compared_advantages, tmp_path):
    folder, recorded = write_dump(
        tmp_path, [1, 2, 3], name="hadw", algorithm=WITH_ACCURACY, correct_at_step=CORRECT_AT_STEP
    )
    output = compared_advantages(folder, "hadw")
    np.testing.assert_allclose(output["advantage/hadw"], recorded, atol=1e-12)
    assert a_line_says(compare(folder, "hadw"), "hadw", "equal", "recorded")


def test_the_advantages_of_hadw_differ_if_the_first_step_is_missing(compare, tmp_path):
    folder, _ = write_dump(tmp_path, [2, 3], name="hadw", algorithm=WITH_ACCURACY, correct_at_step=CORRECT_AT_STEP)
    text = compare(folder, "hadw")
    assert a_line_says(text, "note: hadw", "history")
    assert a_line_says(text, "hadw", "differ", "recorded")


def test_the_steps_of_a_resumed_run_replace_the_steps_that_it_repeats(compare, compared_advantages, tmp_path):
    folder, _ = write_dump(tmp_path / "dump", [1, 2, 3])
    write_dump(folder, [3], after_step=2, algorithm=WITH_WEIGHTS)
    output = compared_advantages(folder, "gdpo")
    # grpo is computed on the total, which has other weights after the resume.
    first, second, third = np.split(output["advantage/grpo"].to_numpy(), 3)
    assert (first == second).all()
    assert (first != third).any()
    # The rewards are as they were scored, with and without the condition.
    assert output["reward/format"].tolist() == 3 * FORMAT
    assert a_line_says(compare(folder, "gdpo"), "note: ", "2 of 3 updates", "settings")


def test_a_note_names_a_dump_that_cannot_be_read(compare, tmp_path):
    folder, _ = write_dump(tmp_path, [1, 2])
    broken = folder / "advantages-00000009-000.parquet"
    broken.write_bytes(b"PAR1")
    pd.DataFrame({"step": [1]}).to_parquet(folder / "advantages-other.parquet")
    text = compare(folder, "gdpo")
    assert a_line_says(text, "note: ", broken.name)
    assert a_line_says(text, "note: ", "advantages-other.parquet", "verl_ext")
    assert a_line_says(compare(broken, "gdpo", status=1), broken.name, "cannot be read")


def test_the_prompts_of_a_dump_may_be_named(compare, tmp_path):
    folder, _ = write_dump(tmp_path, [1])
    assert compare(folder, "gdpo", "--prompt", "uid") == compare(folder, "gdpo")


def test_the_total_of_a_dump_has_a_name_that_no_reward_has(compared_advantages, tmp_path):
    folder, _ = write_dump(tmp_path / "dump", [1])
    (file,) = folder.rglob("*.parquet")
    dump = parquet.read_table(file)
    for name in ("total", "score", "sum"):
        dump = dump.append_column(f"reward/{name}", dump["reward/correct"])
    parquet.write_table(dump, file)
    output = compared_advantages(folder, "drgrpo", "algorithm.rewards.keys=[total]")
    assert output["reward/total"].tolist() == CORRECT
    assert output["reward/total 2"].tolist() == (np.array(CORRECT) + FORMAT).tolist()


def test_the_text_has_the_tables_and_the_counts(compare, tmp_path):
    folder = write_rollouts(tmp_path / "r", rollout_lines(1), rollout_lines(2))
    text = compare(folder, "gdpo", "hadw", "[weighted_sum,center,scale_by_mad,whiten]", KEYS)
    assert a_line_says(text, "24 trajectories in 6 groups of 4, steps 1 to 2, 2 batches", folder)
    assert a_line_says(text, "[weighted_sum,center,scale_by_mad,whiten]")
    assert a_line_says(text, "estimator", "zero-variance groups", "zero advantages", "mean |A|", "sign flips")
    assert a_line_says(text, "grpo", "0.0% (0-39%)")  # Wilson's interval for none of six
    assert a_line_says(text, "(number of groups)", 2)
    assert says(text, "accuracy (acc)", "correct  format")


def contributions_in(text):
    """Return the rows of the second table, by variant."""
    table = text.split("\n\n")[2].splitlines()
    rows = [line.split() for line in table[3:] if not line.startswith("  ")]
    return {variant: cells for variant, *cells in rows}


class LowestReward(Step):
    """The lowest reward of each response."""

    name = "lowest_reward"
    sums = True

    def apply(self, values, batch):
        return values.min(axis=1, keepdims=True)


def test_a_contribution_is_what_a_reward_adds_to_the_sum_of_the_variant(compare, rollouts):
    """By hand. The score is 2 correct + format, of which the named rewards are correct + format."""
    without_sum = f"[{__name__}:LowestReward,center]"
    contributions = contributions_in(compare(rollouts, "drgrpo", without_sum, KEYS))
    assert contributions["grpo"] == ["26.3%", "47.5%", "26.3%"]
    assert contributions["drgrpo"] == ["36.8%", "63.2%", "0.0%"]
    assert contributions[without_sum] == ["-", "-", "-"]


WITHOUT_STD = "algorithm.norm_adv_by_std_in_grpo=False"


def test_grpo_has_the_contributions_of_the_total_of_a_run(compare, tmp_path):
    """By hand, with the weights and the condition of the run."""
    dump, _ = write_dump(tmp_path, [1, 2], algorithm=WITH_WEIGHTS)
    contributions = contributions_in(compare(dump, "drgrpo", ACCURACY_KEY, WITHOUT_STD))
    assert contributions["grpo"] == contributions["drgrpo"] == ["75.8%", "24.2%", "0.0%"]


def test_grpo_on_a_weighted_sum_has_the_contributions_of_the_sum(compare, tmp_path):
    """By hand, with the weights of the arguments."""
    table = write_rollouts(tmp_path / "r", without(rollout_lines(), "score"))
    weights = "algorithm.rewards.weights=[3,1]"
    contributions = contributions_in(compare(table, "drgrpo", KEYS, weights, ACCURACY_KEY, WITHOUT_STD))
    assert contributions["grpo"] == contributions["drgrpo"] == ["80.3%", "19.7%", "0.0%"]


@pytest.mark.parametrize(
    ("variant", "ignores_weights"),
    [("rvpo", True), ("gdpo", False), ("dvao", False), ("[soft_min,center]", True), ("[weighted_sum,center]", False)],
)
def test_a_note_says_that_the_weights_have_no_effect_on_a_variant(variant, ignores_weights, compare, rollouts):
    text = compare(rollouts, variant, KEYS, ACCURACY_KEY, "algorithm.rewards.weights=[3,1]")
    note = (f"note: {variant}", "algorithm.rewards.weights has no effect", "Set algorithm.rewards.weights=null")
    assert a_line_says(text, *note) == ignores_weights
    without_weights = compare(rollouts, variant, KEYS, ACCURACY_KEY)
    assert not says(without_weights, "algorithm.rewards.weights")


WITHOUT_ACCURACY = ["dvao", "gdpo", "[center,scale_by_std,weighted_sum]"]


@pytest.mark.parametrize("variant", WITHOUT_ACCURACY)
def test_the_table_by_accuracy_is_omitted_if_the_accuracy_is_not_known(variant, compare, rollouts_without_accuracy):
    text = compare(rollouts_without_accuracy, variant, KEYS)
    assert a_line_says(text, "note: ", "table", "algorithm.rewards.accuracy_key", "'correct'", "'format'")
    assert contributions_in(text)
    assert "(number of groups)" not in text
    with_accuracy = compare(rollouts_without_accuracy, variant, KEYS, ACCURACY_KEY)
    assert says(with_accuracy, "accuracy (correct)", "(number of groups)")
    assert not a_line_says(with_accuracy, "note: ", "table")


@pytest.mark.parametrize("variant", WITHOUT_ACCURACY)
def test_the_accuracy_has_no_effect_on_an_estimator_without_one(
    variant, compared_advantages, rollouts_without_accuracy
):
    column = f"advantage/{variant}"
    without_accuracy = compared_advantages(rollouts_without_accuracy, variant, KEYS)
    with_accuracy = compared_advantages(rollouts_without_accuracy, variant, KEYS, ACCURACY_KEY)
    np.testing.assert_array_equal(without_accuracy[column], with_accuracy[column])


def test_one_variant_may_name_an_accuracy_that_the_others_do_not_need(compare, rollouts_without_accuracy):
    assert contributions_in(compare(rollouts_without_accuracy, f"hadw {KEYS} {ACCURACY_KEY}", f"dvao {KEYS}"))


def test_a_reward_outside_the_unit_interval_is_compared_without_an_accuracy(compare, tmp_path):
    """The only reward would be used as the accuracy, but it is not in [0, 1]."""
    lines = without(rollout_lines(), "acc", "correct", "format")
    folder = write_rollouts(tmp_path / "r", lines)
    assert a_line_says(compare(folder, "drgrpo"), "note: ", "table", "'score'", "accuracy_threshold")


LINES = rollout_lines()
LINES_WITHOUT_ACCURACY = without(LINES, "acc")
REJECTED = {
    "no variant": (LINES, [], ["'gdpo'"]),
    "a misspelled reward": (LINES, ["gdpo", "algorithm.rewards.keys=[corect]"], ["'corect'", "did you mean 'correct'"]),
    "no keys": (LINES, ["gdpo"], ["algorithm.rewards.keys", "'correct'", "'format'"]),
    "grpo on the score twice": (LINES, ["grpo"], ["'grpo'", "twice"]),
    "a setting without effect": (
        LINES,
        ["gdpo", KEYS, "algorithm.rewards.rejected=exclude"],
        ["algorithm.rewards.rejected=exclude"],
    ),
    "a setting without effect, with a plus": (
        LINES,
        ["gdpo", KEYS, "+algorithm.rewards.rejected=exclude"],
        ["algorithm.rewards.rejected=exclude"],
    ),
    "a per-turn reward without turns": (
        LINES,
        ["gdpo", KEYS, "algorithm.rewards.per_turn=[format]"],
        ["algorithm.rewards.per_turn=null"],
    ),
    "an estimator without its accuracy": (
        LINES_WITHOUT_ACCURACY,
        ["hadw", KEYS],
        ["algorithm.rewards.accuracy_key", "'correct'", "'format'"],
    ),
    "a misspelled accuracy": (
        LINES_WITHOUT_ACCURACY,
        ["gdpo", KEYS, "algorithm.rewards.accuracy_key=corrects"],
        ["algorithm.rewards.accuracy_key", "'corrects'"],
    ),
    "missing rewards": (without(LINES, "correct", "format", "acc"), ["gdpo", KEYS], ["'correct'", "'score'"]),
    "an integer that is no float": (rollout_lines(correct=10**400), ["gdpo", KEYS], ["cannot be read"]),
    "an infinite reward": (
        without(rollout_lines(correct=np.inf), "score"),
        ["gdpo", KEYS],
        ["'correct'", "'p0-1'", "inf"],
    ),
}


@pytest.mark.parametrize(("lines", "arguments", "message"), REJECTED.values(), ids=REJECTED)
def test_mistakes_are_rejected_with_the_valid_values(lines, arguments, message, compare, tmp_path):
    folder = write_rollouts(tmp_path / "r", lines)
    assert says(compare(folder, *arguments, status=1), *message)
