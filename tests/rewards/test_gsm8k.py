"""The rewards of GSM8K: as the reference implementation computes them, and corrected, which is the default."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.facts import facts
from verl_ext.errors import DataError
from verl_ext.rewards.gsm8k import check_ground_truth, compute_score


def response_with(answer: str) -> str:
    """Return a well-formed response with this answer."""
    return f"<think>9 * 2</think>\n<answer>{answer}</answer>"


@dataclass(frozen=True)
class NumberCase:
    """A ground truth, an answer, and the rewards (correctness, integer) with each setting of `strict`.

    None means that the ground truth is an error.
    """

    truth: str
    answer: str
    reference: tuple[int, int]
    corrected: tuple[int, int] | None


NUMBERS = {
    "space around the answer": NumberCase("18", "\n 18 ", reference=(1, 1), corrected=(1, 1)),
    "no answer": NumberCase("18", "", reference=(0, 0), corrected=(0, 0)),
    "words": NumberCase("18", "it is 18", reference=(0, 0), corrected=(0, 0)),
    "a ground truth with a separator, copied": NumberCase("1,000", "1,000", reference=(1, 0), corrected=(1, 1)),
    "a ground truth with a separator": NumberCase("1,000", "1000", reference=(0, 1), corrected=(1, 1)),
    "a negative ground truth, copied": NumberCase("-5", "-5", reference=(1, 0), corrected=(1, 1)),
    "a plus sign": NumberCase("5", "+5", reference=(0, 0), corrected=(1, 1)),
    "negative zero": NumberCase("0", "-0", reference=(0, 0), corrected=(1, 1)),
    "leading zeros": NumberCase("18", "018", reference=(0, 1), corrected=(1, 1)),
    "a decimal of the same value": NumberCase("18", "18.0", reference=(0, 0), corrected=(1, 0)),
    "superscript digits": NumberCase("18", "¹⁸", reference=(0, 1), corrected=(0, 0)),
    "a decimal ground truth": NumberCase("0.5", "0.5", reference=(1, 0), corrected=None),
    "a currency": NumberCase("18", "$18", reference=(0, 0), corrected=(0, 0)),
}


@pytest.mark.parametrize("strict", ["reference", "corrected"])
@pytest.mark.parametrize("case", NUMBERS.values(), ids=NUMBERS)
def test_rewards_of_a_number(case, strict):
    response = response_with(case.answer)
    expected = case.reference if strict == "reference" else case.corrected
    if expected is None:
        with pytest.raises(DataError, match=facts("row 3 of 'gsm8k'", "integer")):
            compute_score("gsm8k", response, case.truth, {"index": 3}, strict=strict)
        return
    correctness, integer = expected
    rewards = compute_score("gsm8k", response, case.truth, {"index": 3}, strict=strict)
    score = correctness + integer + 1
    assert rewards == {"correctness": correctness, "integer": integer, "format": 1, "score": score}


@dataclass(frozen=True)
class FormatCase:
    """A response to the ground truth 18, its correctness, and its format reward with each setting of `strict`."""

    response: str
    correctness: int
    reference: int
    corrected: int


CORRECT_RESPONSE = response_with("18")
FORMATS = {
    "well-formed": FormatCase(CORRECT_RESPONSE, 1, reference=1, corrected=1),
    "a line break at the end": FormatCase(f"{CORRECT_RESPONSE}\n", 1, reference=1, corrected=1),
    "no tags": FormatCase("18", 1, reference=0, corrected=0),
    "two answers, the last correct": FormatCase(
        f"{response_with('17')}<answer>18</answer>", 1, reference=0, corrected=0
    ),
    "two answers, the first correct": FormatCase(f"{CORRECT_RESPONSE}<answer>17</answer>", 0, reference=0, corrected=0),
    # Only the reference gives no format reward for space around the response.
    "space at the start": FormatCase(f" {CORRECT_RESPONSE}", 1, reference=0, corrected=1),
    "space at the end": FormatCase(f"{CORRECT_RESPONSE} ", 1, reference=0, corrected=1),
}


@pytest.mark.parametrize("strict", ["reference", "corrected"])
@pytest.mark.parametrize("case", FORMATS.values(), ids=FORMATS)
def test_format_reward_and_which_answer_counts(case, strict):
    rewards = compute_score("gsm8k", case.response, "18", strict=strict)
    assert rewards["correctness"] == case.correctness
    assert rewards["format"] == (case.reference if strict == "reference" else case.corrected)


@pytest.mark.parametrize("solution", ["18", " 18\n", "9 * 2 = <<9*2=18>>18\n#### 18", "####18"])
def test_ground_truth_is_the_text_after_the_mark_or_the_whole_text(solution):
    assert check_ground_truth(solution) == "18"
    assert compute_score("gsm8k", CORRECT_RESPONSE, solution)["score"] == 3


@pytest.mark.parametrize("strict", ["reference", "corrected"])
@pytest.mark.parametrize("truth", [None, 18, " ", "####"])
def test_ground_truth_without_an_answer_is_an_error_that_names_the_row(truth, strict):
    with pytest.raises(DataError, match=facts("row 17 of 'gsm8k'", "ground_truth")):
        compute_score("gsm8k", CORRECT_RESPONSE, truth, {"index": 17}, strict=strict)


ANSWER_FORMATS = st.sampled_from(["{}", "{:,}", "{:+}", "{:+,}", "{:08}"])
TRUTH_FORMATS = st.sampled_from(["{}", "{:,}"])


@given(st.integers(), ANSWER_FORMATS, TRUTH_FORMATS)
def test_ground_truth_as_answer_gets_the_largest_rewards_in_any_format(number, answer_format, truth_format):
    response = response_with(answer_format.format(number))
    rewards = compute_score("gsm8k", response, f"#### {truth_format.format(number)}")
    assert rewards == {"correctness": 1, "integer": 1, "format": 1, "score": 3}


@given(st.integers(), st.decimals(allow_nan=False, allow_infinity=False, places=3))
def test_correctness_is_equality_of_values(truth, answer):
    rewards = compute_score("gsm8k", response_with(f"{answer:f}"), str(truth))
    assert rewards["correctness"] == (truth == answer)
