"""Which template is reported for a data source, and in how many rows its ground truths receive which reward."""

import pytest

from verl_ext.checks.responses import EMPTY, FROM_FILE, LONG, RewardProbe
from verl_ext.checks.try_reward import reward_of_template


class TableScorer:
    """Scores a response by its text, and any other text with 0."""

    def __init__(self, scores):
        self.scores = scores

    def score(self, row, text, where):
        return {"score": self.scores.get(text, 0.0)}


def probe_of_rows(scores, ground_truths, user_texts=()):
    """A probe that has scored a row for each ground truth, the first ones with a response of the user."""
    probe = RewardProbe(TableScorer(scores), {"score": read_score}, read_score)
    for number, ground_truth in enumerate(ground_truths):
        row = {"data_source": "x", "reward_model": {"ground_truth": ground_truth}}
        probe.score_row(f"row {number}", row, user_texts[number : number + 1], is_training=True)
    return probe


def read_score(result):
    return result.get("score")


def test_rows_that_are_rewarded_in_another_template_are_not_counted():
    probe = probe_of_rows({"#### 1": 1.0, r"\boxed{2}": 0.5}, ["1", "2"])
    text = reward_of_template(probe, "x")
    assert text == (
        "Ground truths formatted as `#### 1` receive score=1.0 in 1 of 2 rows. "
        r"The ground truth `\boxed{2}` of row 1 receives score=0.5."
    )


def test_a_lower_reward_in_the_same_template_is_not_called_equal():
    probe = probe_of_rows({"#### 1": 1.0, "#### 2": 0.5}, ["1", "2"])
    assert reward_of_template(probe, "x") == (
        "Ground truths formatted as `#### 1` receive score=1.0, or at least half of this gain over an empty response, "
        "in 2 of 2 rows."
    )


BETTER_LATER = {"#### 1": 0.1, "#### 4": 0.1, r"\boxed{2}": 1.0, r"\boxed{3}": 1.0, r"\boxed{4}": 1.0}


def test_a_later_template_with_a_higher_reward_replaces_the_first_one():
    probe = probe_of_rows(BETTER_LATER, ["1", "2", "3"])
    assert probe.best_template["x"].text == r"\boxed{2}"
    assert reward_of_template(probe, "x") == (
        r"Ground truths formatted as `\boxed{2}` receive score=1.0 in 2 of 3 rows. "
        "The ground truth `#### 1` of row 0 receives score=0.1."
    )


def test_earlier_rows_are_scored_in_a_template_that_is_found_later():
    """Row 1 is rewarded in the first template, so its ground truth is not scored in all templates."""
    probe = probe_of_rows(BETTER_LATER, ["1", "4", "2"])
    earlier_row = probe.rows["x"][1]
    assert [response.text for response in earlier_row.from_truth] == ["#### 4", r"\boxed{4}"]
    assert earlier_row.best.text == r"\boxed{4}"
    assert "receive score=1.0 in 2 of 3 rows." in reward_of_template(probe, "x")


def test_a_ground_truth_without_entries_is_scored_in_a_template_for_first_entries():
    probe = probe_of_rows({"1": 1.0, "#### 2": 0.5}, [["1"], "2"])
    assert probe.best_template["x"].kind == "{first}"
    assert probe.rows["x"][1].in_template("{first}").text == "2"
    assert probe.rows["x"][1].best.text == "#### 2"


def test_a_template_is_found_after_a_row_that_only_the_user_answers():
    probe = probe_of_rows({"by the user": 1.0, "#### 2": 1.0}, ["1", "2"], user_texts=["by the user"])
    assert probe.rewarded_by_file == {"x"}
    assert probe.best_template["x"].text == "#### 2"


def test_responses_to_a_row_are_scored_in_the_documented_order():
    probe = probe_of_rows({"#### 1": 1.0}, ["1"], user_texts=["by the user"])
    kinds = [response.kind for response in probe.results]
    assert kinds[:4] == ["{}", EMPTY, FROM_FILE, "#### {}"]
    assert kinds[-1] == LONG


@pytest.mark.parametrize("second_result", [2.0, None], ids=["another score", "an error"])
def test_a_repeated_call_leaves_the_first_result(second_result):
    from verl_ext.checks.scorer_process import ScoringError

    probe = probe_of_rows({"1": 1.0}, ["1"])
    first = next(iter(probe.results))

    def score_again(row, text, where):
        if second_result is None:
            raise ScoringError("it raises", "Correct it.", cause="repeated")
        return {"score": second_result}

    probe.scorer.score = score_again
    differences = probe.differences_when_repeated()
    assert differences == ({} if second_result is None else {"score": (1.0, 2.0)})
    assert probe.results[first] == {"score": 1.0}
    assert probe.failed == ({first} if second_result is None else set())
