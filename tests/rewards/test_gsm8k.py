import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.facts import facts
from verl_ext.errors import DataError
from verl_ext.rewards.gsm8k import check_ground_truth, compute_score


def answer(text: str) -> str:
    return f"<think>9 * 2</think>\n<answer>{text}</answer>"


# gold, answer, (correctness, integer) as the reference has it, and by default
NUMBERS = {
    "space around it": ("18", "\n 18 ", (1, 1), (1, 1)),
    "nothing": ("18", "", (0, 0), (0, 0)),
    "words": ("18", "it is 18", (0, 0), (0, 0)),
    "a gold with a separator, copied": ("1,000", "1,000", (1, 0), (1, 1)),
    "a gold with a separator, without it": ("1,000", "1000", (0, 1), (1, 1)),
    "a negative gold, copied": ("-5", "-5", (1, 0), (1, 1)),
    "a plus sign": ("5", "+5", (0, 0), (1, 1)),
    "negative zero": ("0", "-0", (0, 0), (1, 1)),
    "leading zeros": ("18", "018", (0, 1), (1, 1)),
    "a decimal of the same value": ("18", "18.0", (0, 0), (1, 0)),
    "superscript digits": ("18", "¹⁸", (0, 1), (0, 0)),
    "a decimal gold": ("0.5", "0.5", (1, 0), None),
    "a currency": ("18", "$18", (0, 0), (0, 0)),
}


@pytest.mark.parametrize(("gold", "text", "reference", "corrected"), NUMBERS.values(), ids=NUMBERS)
def test_numbers(gold, text, reference, corrected):
    for strict, expected in (("reference", reference), ("corrected", corrected)):
        if expected is None:
            with pytest.raises(DataError, match=facts("row 3 of 'gsm8k'", "integer")):
                compute_score("gsm8k", answer(text), gold, {"index": 3}, strict=strict)
            continue
        correct, integer = expected
        score = compute_score("gsm8k", answer(text), gold, {"index": 3}, strict=strict)
        total = correct + integer + 1
        assert score == {"correctness": correct, "integer": integer, "format": 1, "score": total}, strict


# answer, correctness, format as the reference has it, and by default
FORMATS = {
    "well-formed": (answer("18"), 1, 1, 1),
    "a line break at the end": (f"{answer('18')}\n", 1, 1, 1),
    "no tags": ("18", 1, 0, 0),
    "two answers, the last right": (f"{answer('17')}<answer>18</answer>", 1, 0, 0),
    "two answers, the first right": (f"{answer('18')}<answer>17</answer>", 0, 0, 0),
    # Space around the answer costs the format in the reference alone.
    "space at the start": (f" {answer('18')}", 1, 0, 1),
    "space at the end": (f"{answer('18')} ", 1, 0, 1),
}


@pytest.mark.parametrize(("text", "correct", "reference", "corrected"), FORMATS.values(), ids=FORMATS)
def test_format_and_the_answer_that_counts(text, correct, reference, corrected):
    for strict, form in (("reference", reference), ("corrected", corrected)):
        score = compute_score("gsm8k", text, "18", strict=strict)
        assert (score["correctness"], score["format"]) == (correct, form), strict


@pytest.mark.parametrize("gold", ["18", " 18\n", "9 * 2 = <<9*2=18>>18\n#### 18", "####18"])
def test_the_gold_is_the_text_after_the_mark_or_all_of_it(gold):
    assert check_ground_truth(gold) == "18"
    assert compute_score("gsm8k", answer("18"), gold)["score"] == 3


@pytest.mark.parametrize("strict", ["reference", "corrected"])
@pytest.mark.parametrize("gold", [None, 18, " ", "####"])
def test_a_gold_without_one_answer_is_an_error_that_names_the_row(gold, strict):
    with pytest.raises(DataError, match=facts("row 17 of 'gsm8k'", "ground_truth")):
        compute_score("gsm8k", answer("18"), gold, {"index": 17}, strict=strict)


@given(st.integers(), st.sampled_from(["{}", "{:,}", "{:+}", "{:+,}", "{:08}"]), st.sampled_from(["{}", "{:,}"]))
def test_a_number_scores_full_marks_against_itself_however_it_is_written(number, form, gold_form):
    score = compute_score("gsm8k", answer(form.format(number)), f"#### {gold_form.format(number)}")
    assert score == {"correctness": 1, "integer": 1, "format": 1, "score": 3}


@given(st.integers(), st.decimals(allow_nan=False, allow_infinity=False, places=3))
def test_correctness_is_equality_of_values(gold, number):
    assert compute_score("gsm8k", answer(f"{number:f}"), str(gold))["correctness"] == (number == gold)
