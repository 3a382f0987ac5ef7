"""The rewards of ground truths as responses, in which template, and which rows receive less."""

from types import SimpleNamespace

import pytest

from tests.facts import says
from verl_ext.checks.responses import LONG, TEMPLATES, RewardProbe, fill_template
from verl_ext.checks.scorer_process import ScoringError
from verl_ext.checks.trial import Trial
from verl_ext.checks.try_reward import constant_rewards, reward_of_template, tried_enough, unrewarded_ground_truths
from verl_ext.settings import Settings


class FakeScorer:
    """Scores by a function of the response and the ground truth."""

    def __init__(self, function):
        self.function, self.texts = function, []

    def score(self, row, text, where):
        self.texts.append(text)
        result = self.function(text, row["reward_model"]["ground_truth"])
        return result if isinstance(result, dict) else {"score": result}


def probe_of(function, truths, *, names=("score",), custom=(), expensive=False, sources=None, given=(), accuracy=None):
    measures = {name: (lambda result, name=name: result.get(name)) for name in names}
    read_accuracy = measures[accuracy or names[0]]
    probe = RewardProbe(FakeScorer(function), measures, read_accuracy, custom, is_expensive=expensive)
    for number, truth in enumerate(truths):
        row = {"data_source": sources[number] if sources else "x", "reward_model": {"ground_truth": truth}}
        probe.score_row(f"row {number}", row, given[number : number + 1], is_training=True)
    return probe


def trial_of(probe):
    usual = dict.fromkeys(("training_rows", "validation_rows", "prompts", "requested_rows", "findings"))
    return Trial(probe=probe, **usual, has_responses_of_file=False)


def notes_of(probe, accuracy_key=None):
    """The notes about the ground truths."""
    settings = Settings.parse({"rewards": {"accuracy_key": accuracy_key}} if accuracy_key else {})
    run = SimpleNamespace(settings=settings, select=lambda path: None)
    return [finding.text for finding in unrewarded_ground_truths(trial_of(probe), run)]


def pays_for(template):
    """A scorer that reads one template, and pays one."""
    return lambda text, truth: float(text == fill_template(template, truth))


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_template_that_a_function_reads_is_found_and_used_for_the_other_rows(template):
    probe = probe_of(pays_for(template), ["7", "8", "9"])
    assert notes_of(probe) == []
    assert says(reward_of_template(probe, "x"), "score=1.0", "3 of 3")
    assert probe.best_template["x"].text == fill_template(template, "7")
    later = probe.scorer.texts[len(TEMPLATES) + 2 :]  # after an empty response and a long one
    assert later == [fill_template(template, "8"), "", fill_template(template, "9"), ""]


@pytest.mark.parametrize("truth", [{"target": ["7", "seven"]}, [["7"]], 7])
def test_of_a_ground_truth_that_is_a_structure_the_first_entry_is_tried_too(truth):
    probe = probe_of(lambda text, _: float(text == "<answer>7</answer>"), [truth])
    assert notes_of(probe) == []
    assert says(reward_of_template(probe, "x"), "`<answer>7</answer>`")


def test_a_structure_that_parquet_has_given_the_keys_of_another_source_has_its_own_first_entry():
    probe = probe_of(lambda text, _: float(text == "r"), [{"target": None, "answers": ["r"]}])
    assert notes_of(probe) == []
    assert says(reward_of_template(probe, "x"), "`r`")


def test_a_row_that_is_rewarded_in_another_template_is_not_a_row_without_a_reward():
    def function(text, truth):
        return float(text == (truth if truth.isdigit() else rf"\boxed{{{truth}}}"))

    probe = probe_of(function, ["42", "x^2", "7"])
    assert notes_of(probe) == []
    assert says(reward_of_template(probe, "x"), "`42`", "2 of 3", r"`\boxed{x^2}` of row 1 receives score=1.0")


@pytest.mark.parametrize("pay", [0.0, 1.0])
def test_a_function_that_pays_every_response_the_same_needs_a_review(pay):
    (text,) = notes_of(probe_of(lambda *_: pay, ["7"] * 5))
    assert says(text, f"score={pay}", *(f"`{template}`" for template in ("{}", "#### {}")))


def test_a_first_row_that_is_wrong_does_not_hide_the_template():
    (text,) = notes_of(
        probe_of(lambda text, truth: float(text == f"#### {truth}" and "," not in truth), ["1,234", "7"])
    )
    assert says(text, "1 of 2", "row 0", "1,234", "score=0.0")


def test_a_row_with_a_lower_reward_is_named_and_needs_a_review_if_it_receives_none():
    def function(text, truth):
        right = float(text == truth != "none")
        return {"score": right + bool(text), "correct": right, "format": float(bool(text))}

    probe = probe_of(function, ["7", "none", "8"], names=("correct", "format", "score"))
    assert notes_of(probe) == []  # it may be meant so
    assert says(reward_of_template(probe, "x"), "2 of 3", "row 1", "`none`", "correct=0.0")
    (text,) = notes_of(probe_of(lambda text, truth: 0.5 * len(text) * (truth != "none"), ["7", "none", "8888"]))
    assert says(text, "2 of 3", "row 1")


def test_each_data_source_has_a_template_of_its_own():
    def function(text, truth):
        return float(text == (f"#### {truth}" if truth < "5" else rf"\boxed{{{truth}}}"))

    probe = probe_of(function, ["1", "2", "7", "8"], sources=["a", "a", "b", "b"])
    assert notes_of(probe) == []
    assert says(reward_of_template(probe, "a"), "data_source a", "`#### 1`", "2 of 2")
    assert says(reward_of_template(probe, "b"), "data_source b", r"`\boxed{7}`", "2 of 2")


def with_format(text, truth):
    """A function that pays for the format of every response, and for a ground truth that is an integer."""
    correct = float(
        truth == str(truth).strip() and str(truth).isdigit() and text in (truth, f"<answer>{truth}</answer>")
    )
    return {"score": correct, "correct": correct, "format": float("<answer>" in text)}


@pytest.mark.parametrize("truth", ["8.0", "8 ", 8])
@pytest.mark.parametrize("named", [True, False])
def test_a_data_source_that_is_never_correct_is_reported_although_another_reward_is_received(truth, named):
    names = ("correct", "format")
    probe = probe_of(with_format, ["7", "8", truth, truth], names=names, sources=["a", "a", "b", "b"])
    (text,) = notes_of(probe, "correct" if named else None)
    assert says(text, "data_source b", "row 2", "correct=0.0", "format=1.0")


def test_a_data_source_is_correct_if_a_response_of_the_file_is():
    """For example code, whose ground truths are test cases."""
    truths, sources = ["7", "8", "f(1) == 2", "f(2) == 3"], ["a", "a", "b", "b"]

    def function(text, truth):
        correct = float(text == truth if truth.isdigit() else text == "def f(x): return x + 1")
        return {"score": correct, "correct": correct, "format": float("<answer>" in text)}

    names = ("correct", "format")
    probe = probe_of(function, truths, names=names, sources=sources, given=["", "", "def f(x): return x + 1"])
    assert notes_of(probe, "correct") == []
    assert len(notes_of(probe_of(function, truths, names=names, sources=sources), "correct")) == 1


def test_another_reward_that_a_data_source_does_not_receive_is_no_mistake():
    names = ("correct", "format")
    truths, sources = ["7", "8", "8.0", "8.0"], ["a", "a", "b", "b"]
    probe = probe_of(with_format, truths, names=names, sources=sources, accuracy="format")
    assert notes_of(probe) == []


def test_an_accuracy_that_is_not_scored_in_a_data_source_is_no_mistake():
    """NaN means that a reward is not scored."""

    def function(text, truth):
        result = with_format(text, truth)
        return result if truth in ("7", "8") else {**result, "correct": float("nan")}

    probe = probe_of(function, ["7", "8", "x", "y"], names=("correct", "format"), sources=["a", "a", "b", "b"])
    assert notes_of(probe, "correct") == []


def test_an_accuracy_that_is_no_reward_and_never_received_is_reported_in_a_single_data_source():
    """`constant_rewards` reports it if it is a reward."""
    for names, count in ((("format",), 1), (("format", "correct"), 0)):
        probe = probe_of(with_format, ["8.0", "9.0"], names=names)
        probe.accuracy = lambda result: result.get("correct")
        assert len(notes_of(probe, "correct")) == count


def test_a_score_that_no_data_source_receives_is_no_accuracy():
    probe = probe_of(lambda text, _: {"score": 0.0, "format": float(bool(text))}, ["7"], names=("format", "score"))
    probe.accuracy = probe.measures["score"]
    assert notes_of(probe) == []


def test_a_row_that_is_correct_only_in_another_template_is_searched():
    """The best template of the data source pays the second row for its format alone."""

    def function(text, truth):
        is_correct = text == (f"<answer>{truth}</answer>" if truth == "7" else f"#### {truth}")
        return {"score": float(is_correct), "format": float("<answer>" in text)}

    probe = probe_of(function, ["7", "8"], names=("score", "format"), sources=["a", "a"])
    assert probe.rows["a"][1].from_truth[0].text == "<answer>8</answer>"
    assert "#### 8" in [response.text for response in probe.rows["a"][1].from_truth]


def test_a_custom_template_is_tried_and_an_expensive_function_gets_no_other():
    probe = probe_of(pays_for("It is {}!"), ["7", "8"], custom=["It is {}!"], expensive=True)
    assert notes_of(probe) == []
    assert probe.scorer.texts[:3] == ["7", "", "It is 7!"]


def test_a_rewarded_response_of_the_file_is_enough():
    assert notes_of(probe_of(lambda text, _: float(text == "magic"), ["7"], given=["magic"])) == []


def test_a_source_without_ground_truths_gets_an_empty_response_only():
    probe = probe_of(lambda *_: 1.0, [None, ""])
    assert probe.scorer.texts == ["", ""]
    assert probe.rows == {}
    assert notes_of(probe) == []


def test_a_number_that_is_the_same_for_every_response_is_reported():
    probe = probe_of(
        lambda text, truth: {"score": float(text == truth), "format": 1.0}, ["7"], names=("score", "format")
    )
    run = SimpleNamespace(select=lambda path: None)
    (finding,) = constant_rewards(trial_of(probe), run)
    assert says(finding.text, "format=1.0")


def test_lists_per_turn_and_rubrics_count_with_their_sums():
    for right, wrong in (("[1.0, 0.0]", "[0.0, 0.0]"), ("[[1.0, 3.0]]", "[[0.0, 3.0]]")):
        probe = probe_of(lambda text, truth, pay=(wrong, right): {"a": pay[text == truth]}, ["7"], names=("a",))
        assert notes_of(probe) == []


def test_a_row_on_which_scoring_fails_says_nothing_of_the_template_and_a_cause_is_reported_once():
    def function(text, truth):
        if truth == "bad":
            raise ScoringError("it raises KeyError: 'boom'", "Correct it.", cause="line 7")
        return float(text == truth)

    probe = probe_of(function, ["bad", "7", "bad"])
    (failure,) = probe.failures.values()
    assert [where.split(",")[0] for where in failure.where] == ["row 0", "row 2"]
    assert notes_of(probe) == []
    assert says(reward_of_template(probe, "x"), "1 of 1")


def test_a_long_response_in_the_template_that_is_read_is_scored_too():
    probe = probe_of(pays_for("#### {}"), ["72"])
    (text,) = (response.text for response in probe.results if response.kind == LONG)
    assert text.startswith("#### 7272")
    assert len(text) > 200


def test_all_templates_are_tried_on_ten_rows_of_a_data_source():
    probe = probe_of(lambda *_: 0.0, [str(number) for number in range(12)])
    counts = [len([text for text in probe.scorer.texts if text.endswith(f" {number}")]) for number in (9, 10)]
    assert counts[0] > counts[1]
    assert [len(row.from_truth) for row in probe.rows["x"]] == [len(TEMPLATES)] * 10 + [1, 1]


def test_a_row_that_receives_more_than_half_of_the_best_is_not_lower():
    probe = probe_of(lambda text, truth: {"7": 1.0, "8": 0.6, "9": 0.4}[truth] * (text == truth), ["7", "8", "9"])
    assert says(reward_of_template(probe, "x"), "2 of 3", "row 2")


@pytest.mark.parametrize(("custom", "count"), [([], 0), (["It is {}"], 1)])
def test_an_expensive_function_is_judged_only_with_a_custom_template(custom, count):
    probe = probe_of(lambda *_: 0.0, ["7"], custom=custom, expensive=True)
    assert tried_enough(trial_of(probe)) == bool(count)


def test_an_empty_response_that_is_not_scored_counts_as_0():
    probe = probe_of(lambda text, truth: float(text == truth) if text else float("nan"), ["7", "8"])
    assert notes_of(probe) == []
