"""The rewards of ground truths as responses, in which template, and which rows receive less."""

import pytest

from tests.facts import says
from verl_ext.checks.forms import FORMS, LONG, Trial, written
from verl_ext.errors import DataError


class FakeScorer:
    """Scores by a function of the answer and the ground truth."""

    def __init__(self, function):
        self.function, self.texts = function, []

    def score(self, row, text, where):
        self.texts.append(text)
        result = self.function(text, row["reward_model"]["ground_truth"])
        return result if isinstance(result, dict) else {"score": result}


def tried(function, truths, *, names=("score",), more=(), costly=False, sources=None, given=()):
    numbers = {name: (lambda result, name=name: result.get(name)) for name in names}
    trial = Trial(FakeScorer(function), numbers, more, costly=costly)
    for at, truth in enumerate(truths):
        row = {"data_source": sources[at] if sources else "x", "reward_model": {"ground_truth": truth}}
        trial.row(f"row {at}", row, given[at : at + 1], training=True)
    return trial


def reading(form):
    """A scorer that reads one form, and pays one."""
    return lambda text, truth: float(text == written(form, truth))


@pytest.mark.parametrize("form", FORMS)
def test_the_form_that_a_function_reads_is_found_and_used_for_the_other_rows(form):
    trial = tried(reading(form), ["7", "8", "9"])
    ((text, odd),) = trial.summary()
    assert not odd
    assert says(text, "score=1.0", "3 of 3")
    assert trial.chosen["x"].text == written(form, "7")
    later = trial.scorer.texts[len(FORMS) + 2 :]  # an empty answer and a long one
    assert later == [written(form, "8"), "", written(form, "9"), ""]


@pytest.mark.parametrize("truth", [{"target": ["7", "seven"]}, [["7"]], 7])
def test_of_a_ground_truth_that_is_a_structure_the_first_entry_is_tried_too(truth):
    ((text, odd),) = tried(lambda text, _: float(text == "<answer>7</answer>"), [truth]).summary()
    assert not odd
    assert says(text, "`<answer>7</answer>`")


def test_a_structure_that_parquet_has_given_the_keys_of_another_source_has_its_own_first_entry():
    ((text, odd),) = tried(lambda text, _: float(text == "r"), [{"target": None, "answers": ["r"]}]).summary()
    assert not odd
    assert says(text, "`r`")


def test_a_row_that_is_rewarded_in_another_template_is_not_a_row_without_a_reward():
    def function(text, truth):
        return float(text == (truth if truth.isdigit() else rf"\boxed{{{truth}}}"))

    ((text, odd),) = tried(function, ["42", "x^2", "7"]).summary()
    assert not odd
    assert says(text, "`42`", "3 of 3")


@pytest.mark.parametrize("pay", [0.0, 1.0])
def test_a_function_that_pays_every_answer_the_same_is_to_be_looked_at(pay):
    ((text, odd),) = tried(lambda *_: pay, ["7"] * 5).summary()
    assert odd
    assert says(text, f"score={pay}", *(f"`{form}`" for form in ("{}", "#### {}")))


def test_a_first_row_that_is_wrong_does_not_hide_the_form():
    trial = tried(lambda text, truth: float(text == f"#### {truth}" and "," not in truth), ["1,234", "7", "8"])
    ((text, odd),) = trial.summary()
    assert odd
    assert says(text, "2 of 3", "row 0", "1,234", "score=0.0")


def test_a_row_with_a_lower_reward_is_named_and_needs_a_review_if_it_receives_none():
    def function(text, truth):
        right = float(text == truth != "none")
        return {"score": right + bool(text), "correct": right, "format": float(bool(text))}

    names = ("correct", "format", "score")
    ((text, odd),) = tried(function, ["7", "none", "8"], names=names).summary()
    assert not odd  # it may be meant so
    assert says(text, "2 of 3", "row 1", "`none`", "correct=0.0")
    ((text, odd),) = tried(lambda text, truth: 0.5 * len(text) * (truth != "none"), ["7", "none", "8888"]).summary()
    assert odd
    assert says(text, "2 of 3", "row 1")


def test_each_data_source_has_a_form_of_its_own():
    def function(text, truth):
        return float(text == (f"#### {truth}" if truth < "5" else rf"\boxed{{{truth}}}"))

    lines = [*tried(function, ["1", "2", "7", "8"], sources=["a", "a", "b", "b"]).summary()]
    assert [odd for _, odd in lines] == [False, False]
    assert says(lines[0][0], "data_source a", "`#### 1`", "2 of 2")
    assert says(lines[1][0], "data_source b", r"`\boxed{7}`", "2 of 2")


def test_a_form_of_the_users_is_tried_and_a_costly_function_gets_no_other():
    trial = tried(reading("It is {}!"), ["7", "8"], more=["It is {}!"], costly=True)
    assert [odd for _, odd in trial.summary()] == [False]
    assert trial.scorer.texts[:3] == ["7", "", "It is 7!"]


def test_a_rewarded_response_of_the_file_is_enough():
    assert [*tried(lambda text, _: float(text == "magic"), ["7"], given=["magic"]).summary()] == []


def test_a_source_without_ground_truths_gets_an_empty_answer_only():
    trial = tried(lambda *_: 1.0, [None, ""])
    assert trial.scorer.texts == ["", ""]
    assert [*trial.summary()] == []


def test_a_number_that_is_the_same_for_every_response_is_reported():
    trial = tried(lambda text, truth: {"score": float(text == truth), "format": 1.0}, ["7"], names=("score", "format"))
    assert trial.constant() == ["format=1.0"]


def test_lists_per_turn_and_rubrics_count_with_their_sums():
    for right, wrong in (("[1.0, 0.0]", "[0.0, 0.0]"), ("[[1.0, 3.0]]", "[[0.0, 3.0]]")):
        trial = tried(lambda text, truth, pay=(wrong, right): {"a": pay[text == truth]}, ["7"], names=("a",))
        assert [odd for _, odd in trial.summary()] == [False]


def test_a_row_on_which_scoring_raises_says_nothing_of_the_form():
    def function(text, truth):
        if truth == "bad":
            raise DataError("boom")
        return float(text == truth)

    trial = tried(function, ["bad", "7"])
    assert len(trial.problems) == 1
    assert [(text.count("1 of 1"), odd) for text, odd in trial.summary()] == [(1, False)]


def test_a_long_answer_in_the_form_that_is_read_is_scored_too():
    trial = tried(reading("#### {}"), ["72"])
    (text,) = (answer.text for answer in trial.results if answer.kind == LONG)
    assert text.startswith("#### 7272")
    assert len(text) > 200
