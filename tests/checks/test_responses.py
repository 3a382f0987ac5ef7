"""The rewards of ground truths as responses: in which template, and which rows receive less."""

from types import SimpleNamespace

import pytest

from tests.facts import says
from verl_ext.checks.responses import LONG, TEMPLATES, RewardProbe, fill_template
from verl_ext.checks.scorer_process import ScoringError
from verl_ext.checks.trial import Trial
from verl_ext.checks.try_reward import constant_rewards, reward_of_template, tried_enough, unrewarded_ground_truths
from verl_ext.settings import Settings


class FakeScorer:
    """Scores by a function of the response and the ground truth, and records the responses."""

    def __init__(self, function):
        self.function = function
        self.texts = []

    def score(self, row, text, where):
        self.texts.append(text)
        result = self.function(text, row["reward_model"]["ground_truth"])
        return result if isinstance(result, dict) else {"score": result}


def measure_of(name):
    """Return a function that reads a number of a result."""
    return lambda result: result.get(name)


def probe_of(
    function,
    truths,
    *,
    names=("score",),
    accuracy=None,
    sources=None,
    responses=(),
    custom_templates=(),
    is_expensive=False,
):
    """Return a probe that has scored rows of these ground truths.

    The reward function returns the numbers `names`. `accuracy` is one of them, by default the first. `sources` are the
    data sources of the rows, by default x. `responses` are those of a file of the user.
    """
    measures = {name: measure_of(name) for name in names}
    measure_of_accuracy = measures[accuracy or names[0]]
    scorer = FakeScorer(function)
    probe = RewardProbe(scorer, measures, measure_of_accuracy, custom_templates, is_expensive=is_expensive)
    for number, truth in enumerate(truths):
        source = sources[number] if sources else "x"
        row = {"data_source": source, "reward_model": {"ground_truth": truth}}
        probe.score_row(f"row {number}", row, responses[number : number + 1], is_training=True)
    return probe


def trial_of(probe):
    not_read = dict.fromkeys(("training_rows", "validation_rows", "prompts", "requested_rows", "findings"))
    return Trial(probe=probe, **not_read, has_responses_of_file=False)


def notes_of(probe, accuracy_key=None):
    """Return the notes about ground truths that receive no reward. The run may have named its accuracy."""
    rewards = {"accuracy_key": accuracy_key} if accuracy_key else {}
    run = SimpleNamespace(settings=Settings.parse({"rewards": rewards}), select=lambda path: None)
    return [finding.text for finding in unrewarded_ground_truths(trial_of(probe), run)]


# Reward functions


def rewards_template(template):
    """Return a function that rewards the ground truth in one template only."""

    def function(text, truth):
        return float(text == fill_template(template, truth))

    return function


def rewards_nothing(text, truth):
    return 0.0


def is_ground_truth(text, truth):
    """Reward the ground truth without a template."""
    return float(text == truth)


def rewards_format_and_integers(text, truth):
    """Return `format` for each response with <answer> tags, and `correct` for a ground truth that is an integer."""
    is_integer = str(truth).isdigit() and str(truth).strip() == truth
    is_correct = is_integer and text in (truth, f"<answer>{truth}</answer>")
    return {"score": float(is_correct), "correct": float(is_correct), "format": float("<answer>" in text)}


# Templates


@pytest.mark.parametrize("template", TEMPLATES)
def test_rewarded_template_is_found_and_comes_first_for_other_rows(template):
    probe = probe_of(rewards_template(template), ["7", "8", "9"])
    assert notes_of(probe) == []
    assert says(reward_of_template(probe, "x"), "score=1.0", "3 of 3")
    assert probe.best_template["x"].text == fill_template(template, "7")
    # The first row is scored in each template, with an empty response and with a long one.
    responses_to_later_rows = probe.scorer.texts[len(TEMPLATES) + 2 :]
    assert responses_to_later_rows == [fill_template(template, "8"), "", fill_template(template, "9"), ""]


@pytest.mark.parametrize("truth", [{"target": ["7", "seven"]}, [["7"]], 7])
def test_first_entry_of_a_structured_ground_truth_is_tried(truth):
    probe = probe_of(rewards_template("<answer>7</answer>"), [truth])
    assert notes_of(probe) == []
    assert says(reward_of_template(probe, "x"), "`<answer>7</answer>`")


def test_keys_that_parquet_adds_to_a_structured_ground_truth_are_skipped():
    """Parquet gives each row the keys of all data sources, with null for those of other sources."""
    probe = probe_of(rewards_template("r"), [{"target": None, "answers": ["r"]}])
    assert notes_of(probe) == []
    assert says(reward_of_template(probe, "x"), "`r`")


def test_row_that_is_rewarded_in_another_template_counts_as_rewarded():
    def rewards_boxed_formulas(text, truth):
        template = "{}" if truth.isdigit() else r"\boxed{{}}"
        return float(text == fill_template(template, truth))

    probe = probe_of(rewards_boxed_formulas, ["42", "x^2", "7"])
    assert notes_of(probe) == []
    assert says(reward_of_template(probe, "x"), "`42`", "2 of 3", r"`\boxed{x^2}` of row 1 receives score=1.0")


def test_each_data_source_has_its_own_template():
    def rewards_template_of_source(text, truth):
        template = "#### {}" if truth < "5" else r"\boxed{{}}"
        return float(text == fill_template(template, truth))

    probe = probe_of(rewards_template_of_source, ["1", "2", "7", "8"], sources=["a", "a", "b", "b"])
    assert notes_of(probe) == []
    assert says(reward_of_template(probe, "a"), "data_source a", "`#### 1`", "2 of 2")
    assert says(reward_of_template(probe, "b"), "data_source b", r"`\boxed{7}`", "2 of 2")


def test_row_that_is_incorrect_in_the_best_template_is_tried_in_all():
    """The best template of the data source receives only the format reward for the second row."""

    def function(text, truth):
        template = "<answer>{}</answer>" if truth == "7" else "#### {}"
        is_correct = text == fill_template(template, truth)
        return {"score": float(is_correct), "format": float("<answer>" in text)}

    probe = probe_of(function, ["7", "8"], names=("score", "format"))
    responses_to_second_row = [response.text for response in probe.rows["x"][1].from_truth]
    assert responses_to_second_row[0] == "<answer>8</answer>"
    assert "#### 8" in responses_to_second_row


def test_all_templates_are_tried_on_ten_rows_of_a_data_source():
    probe = probe_of(rewards_nothing, [str(number) for number in range(12)])
    tried_templates = [len(row.from_truth) for row in probe.rows["x"]]
    assert tried_templates == [len(TEMPLATES)] * 10 + [1, 1]


def test_rows_beyond_the_searched_ones_are_scored_in_one_template():
    probe = probe_of(rewards_nothing, [str(number) for number in range(12)])
    responses_to_row_9 = [text for text in probe.scorer.texts if text.endswith(" 9")]
    responses_to_row_10 = [text for text in probe.scorer.texts if text.endswith(" 10")]
    assert len(responses_to_row_9) > len(responses_to_row_10)


def test_long_response_is_scored_in_the_best_template():
    probe = probe_of(rewards_template("#### {}"), ["72"])
    (text,) = [response.text for response in probe.results if response.kind == LONG]
    assert text.startswith("#### 7272")
    assert len(text) > 200


def test_expensive_function_gets_only_the_first_and_the_custom_template():
    function = rewards_template("It is {}!")
    probe = probe_of(function, ["7", "8"], custom_templates=["It is {}!"], is_expensive=True)
    assert notes_of(probe) == []
    assert probe.scorer.texts[:3] == ["7", "", "It is 7!"]


@pytest.mark.parametrize(("templates", "is_judged"), [([], False), (["It is {}"], True)])
def test_expensive_function_is_judged_only_with_a_custom_template(templates, is_judged):
    probe = probe_of(rewards_nothing, ["7"], custom_templates=templates, is_expensive=True)
    assert tried_enough(trial_of(probe)) == is_judged


# Rows that receive less


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_reward_that_is_the_same_for_every_response_needs_a_review(reward):
    (note,) = notes_of(probe_of(lambda text, truth: reward, ["7"] * 5))
    assert says(note, f"score={reward}", "`{}`", "`#### {}`")


def test_unrewarded_first_row_does_not_hide_the_template():
    def rewards_numbers_without_separator(text, truth):
        return float(text == f"#### {truth}" and "," not in truth)

    (note,) = notes_of(probe_of(rewards_numbers_without_separator, ["1,234", "7"]))
    assert says(note, "1 of 2", "row 0", "1,234", "score=0.0")


def test_row_with_a_lower_reward_is_named_without_a_note():
    """A row without a correct response may be intended if it receives another reward."""

    def function(text, truth):
        is_correct = float(text == truth and truth != "none")
        is_not_empty = float(bool(text))
        return {"score": is_correct + is_not_empty, "correct": is_correct, "format": is_not_empty}

    probe = probe_of(function, ["7", "none", "8"], names=("correct", "format", "score"))
    assert notes_of(probe) == []
    assert says(reward_of_template(probe, "x"), "2 of 3", "row 1", "`none`", "correct=0.0")


def test_row_without_any_reward_needs_a_review():
    def rewards_length(text, truth):
        return 0.0 if truth == "none" else 0.5 * len(text)

    (note,) = notes_of(probe_of(rewards_length, ["7", "none", "8888"]))
    assert says(note, "2 of 3", "row 1")


def test_row_with_more_than_half_of_the_best_reward_is_not_lower():
    reward_of_truth = {"7": 1.0, "8": 0.6, "9": 0.4}
    probe = probe_of(lambda text, truth: reward_of_truth[truth] * (text == truth), ["7", "8", "9"])
    assert says(reward_of_template(probe, "x"), "2 of 3", "row 2")


def test_rewarded_response_of_the_file_is_enough():
    probe = probe_of(lambda text, truth: float(text == "magic"), ["7"], responses=["magic"])
    assert notes_of(probe) == []


def test_rows_without_ground_truth_get_only_an_empty_response():
    probe = probe_of(lambda text, truth: 1.0, [None, ""])
    assert probe.scorer.texts == ["", ""]
    assert probe.rows == {}
    assert notes_of(probe) == []


def test_constant_reward_is_reported():
    def function(text, truth):
        return {"score": is_ground_truth(text, truth), "format": 1.0}

    probe = probe_of(function, ["7"], names=("score", "format"))
    run = SimpleNamespace(select=lambda path: None)
    (finding,) = constant_rewards(trial_of(probe), run)
    assert says(finding.text, "format=1.0")


# The values of an incorrect and of a correct response, as verl stores them.
LISTS = {"per turn": ("[0.0, 0.0]", "[1.0, 0.0]"), "rubric": ("[[0.0, 3.0]]", "[[1.0, 3.0]]")}


@pytest.mark.parametrize(("incorrect", "correct"), LISTS.values(), ids=LISTS)
def test_lists_per_turn_and_rubrics_count_as_their_sums(incorrect, correct):
    def function(text, truth):
        return {"a": correct if text == truth else incorrect}

    assert notes_of(probe_of(function, ["7"], names=("a",))) == []


def test_row_whose_scoring_fails_is_not_counted_and_a_cause_is_reported_once():
    def function(text, truth):
        if truth == "bad":
            raise ScoringError("it raises KeyError: 'boom'", "Correct it.", cause="line 7")
        return is_ground_truth(text, truth)

    probe = probe_of(function, ["bad", "7", "bad"])
    (failure,) = probe.failures.values()
    failed_rows = [where.split(",")[0] for where in failure.where]
    assert failed_rows == ["row 0", "row 2"]
    assert notes_of(probe) == []
    assert says(reward_of_template(probe, "x"), "1 of 1")


def test_empty_response_that_is_not_scored_counts_as_0():
    def function(text, truth):
        return is_ground_truth(text, truth) if text else float("nan")

    assert notes_of(probe_of(function, ["7", "8"])) == []


# Data sources that are never correct

FORMAT_AND_CORRECT = {"names": ("correct", "format"), "sources": ["a", "a", "b", "b"]}
"""The options of a probe whose rows 0 and 1 are of data source a, and rows 2 and 3 of data source b."""


@pytest.mark.parametrize("truth", ["8.0", "8 ", 8])
@pytest.mark.parametrize("accuracy_key", ["correct", None])
def test_data_source_that_is_never_correct_needs_a_review_despite_its_format_reward(truth, accuracy_key):
    probe = probe_of(rewards_format_and_integers, ["7", "8", truth, truth], **FORMAT_AND_CORRECT)
    (note,) = notes_of(probe, accuracy_key)
    assert says(note, "data_source b", "row 2", "correct=0.0", "format=1.0")


CODE = "def f(x): return x + 1"


@pytest.mark.parametrize(("responses", "note_count"), [(["", "", CODE], 0), ([], 1)], ids=["with code", "without code"])
def test_data_source_is_correct_if_a_response_of_the_file_is(responses, note_count):
    """For example code: its ground truths are test cases, which are not correct responses."""

    def function(text, truth):
        expected_response = truth if truth.isdigit() else CODE
        is_correct = float(text == expected_response)
        return {"score": is_correct, "correct": is_correct, "format": float("<answer>" in text)}

    truths = ["7", "8", "f(1) == 2", "f(2) == 3"]
    probe = probe_of(function, truths, responses=responses, **FORMAT_AND_CORRECT)
    assert len(notes_of(probe, "correct")) == note_count


def test_data_source_without_a_reward_that_is_not_the_accuracy_is_no_mistake():
    truths = ["7", "8", "8.0", "8.0"]
    probe = probe_of(rewards_format_and_integers, truths, accuracy="format", **FORMAT_AND_CORRECT)
    assert notes_of(probe) == []


def test_accuracy_that_is_not_scored_in_a_data_source_is_no_mistake():
    """NaN means that a reward is not scored."""

    def function(text, truth):
        result = rewards_format_and_integers(text, truth)
        if truth in ("x", "y"):
            result["correct"] = float("nan")
        return result

    probe = probe_of(function, ["7", "8", "x", "y"], **FORMAT_AND_CORRECT)
    assert notes_of(probe, "correct") == []


@pytest.mark.parametrize(("names", "note_count"), [(("format",), 1), (("format", "correct"), 0)], ids=str)
def test_accuracy_that_is_no_reward_and_never_received_is_reported(names, note_count):
    """If the accuracy is a reward, `constant_rewards` reports it."""
    probe = probe_of(rewards_format_and_integers, ["8.0", "9.0"], names=names)
    probe.accuracy = measure_of("correct")
    assert len(notes_of(probe, "correct")) == note_count


def test_score_that_no_data_source_receives_is_no_accuracy():
    def rewards_format(text, truth):
        return {"score": 0.0, "format": float(bool(text))}

    probe = probe_of(rewards_format, ["7"], names=("format", "score"), accuracy="score")
    assert notes_of(probe) == []
