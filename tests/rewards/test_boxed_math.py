"""The accuracy of a mathematical answer in a box, compared with a ground truth by math-verify."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.facts import facts
from tests.linear import is_linear
from verl_ext.errors import ConfigurationError, DataError
from verl_ext.rewards.boxed_math import Options, check_ground_truth, compute_score, last_boxed
from verl_ext.rewards.math_judge import NoVerdictError


def accuracy(response: str, truth: str, **kwargs: object) -> float:
    return compute_score("math", response, truth, {"index": 3}, **kwargs)["score"]


# The ground truth and the answer.
EQUAL = [
    (r"\frac{1}{2}", "0.5"),
    ("1000", "1,000"),
    (r"10\%", "0.1"),
    ("x=5", "5"),
    (r"\text{east}", "east"),
    (r"12", r"12 \text{ cm}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
]
UNEQUAL = [
    ("5", "6"),
    (r"\frac{1}{3}", "0.333"),
    (r"10\%", "10"),
    ("(0,1)", "[0,1]"),
    (r"\text{east}", r"\text{west}"),
]


@pytest.mark.parametrize(("truth", "answer"), EQUAL)
def test_equal_answer_is_correct(truth, answer):
    assert accuracy(rf"So the answer is $\boxed{{{answer}}}$.", truth) == 1


@pytest.mark.parametrize(("truth", "answer"), UNEQUAL)
def test_unequal_answer_is_incorrect(truth, answer):
    assert accuracy(rf"So the answer is $\boxed{{{answer}}}$.", truth) == 0


# Texts after a box without braces, for which the answer is not certain.
AMBIGUOUS = [r"5x+3", "5 + 3", "5^2", "5/2", r"5\%", "5, 6", r"5 \text{ cm}", "5 < 6", "5(x)", "xy", r"\frac12", "$5$"]
# Texts that may follow a number without braces.
ENDS = [".", ", so", " \nWe", r"\)", r" \]", r" \end{x}", "}", "**", r"\;.", r" \quad$", "</answer>"]


BOXES = [
    ("", None),
    (r"\boxed5.", "5"),
    (r"\boxed{1}, no, \boxed 2", "2"),
    (r"\boxed 1, no, \boxed{2}", "2"),
    (r"\boxed{1 + \boxed 2}", "2"),
    (r"\boxed", None),
    (r"\boxed{1}, as \boxed 2x", "1"),
    (r"\boxedx{5}", None),
    (r"\fbox{5}", "5"),
    (r"\fbox 5", "5"),
    (r"\boxed{5", None),
    (r"\boxed {5}", "5"),
    (r"\boxed{}", ""),
    (r"\boxed{\{1\}}", r"\{1\}"),
    (r"} \boxed{5}", "5"),
    (r"{ \boxed{5} }", "5"),
]


@pytest.mark.parametrize(("text", "answer"), BOXES)
def test_answer_is_the_last_complete_box_by_its_start(text, answer):
    assert last_boxed(text) == answer


@pytest.mark.parametrize("answer", ["5", "-3.5", ".5", "1,000", "x"])
def test_box_without_braces_has_a_number_or_a_letter(answer):
    assert last_boxed(rf"so $\boxed {answer}$.") == answer


@pytest.mark.parametrize("end", ENDS)
def test_number_without_braces_ends_before_this_text(end):
    assert last_boxed(rf"It is \boxed 5{end}") == "5"


@pytest.mark.parametrize("text", AMBIGUOUS)
def test_ambiguous_box_without_braces_is_no_answer(text):
    assert last_boxed(rf"It is \boxed {text}") is None


@pytest.mark.parametrize("response", ["", "5", r"\boxed{ }", r"\boxed{5", "\\boxed{\ud800}"])
def test_response_without_a_readable_box_is_incorrect(response):
    assert accuracy(response, "5") == 0


READABLE_TRUTHS = [
    r"0.\overline{72}",
    r"We get \boxed 4, then $\boxed 12$.",
    r"3\,:\,4 \;",
    " 5 ",
    "?",
    "-123456789012",
    r"\frac{-7}{12}",
    "-4x^2+9y",
]


@pytest.mark.parametrize("truth", READABLE_TRUTHS)
def test_ground_truth_of_a_public_data_set_is_readable(truth):
    answer = last_boxed(truth) or truth
    assert accuracy(rf"\boxed{{{answer}}}", truth) == 1
    assert accuracy(r"\boxed{173}", truth) == 0


@pytest.mark.parametrize("truth", [None, "", r"\frac{2}{3", r"\boxed{}", r"\boxed \frac12", r"\boxed{5", "\\"])
@pytest.mark.parametrize("response", [r"\boxed{5}", ""], ids=["a response with a box", "an empty response"])
def test_unreadable_ground_truth_is_an_error_that_names_the_row(truth, response):
    with pytest.raises(DataError, match=facts("row 3 of 'math'", "ground_truth")):
        compute_score("math", response, truth, {"index": 3})


def test_ground_truth_that_takes_too_long_is_an_error():
    with pytest.raises(DataError, match=facts("0.3 s")):
        compute_score("math", r"\boxed{5}", "(" * 900, timeout=0.03)


def test_error_about_missing_math_verify_names_the_package(monkeypatch):
    monkeypatch.setattr("verl_ext.rewards.options.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=facts("'math_verify'", "pip install 'math-verify>=0.8,<0.9'")):
        Options()


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"timeout": 0}, ("reward_kwargs.timeout", "above 0", "found 0")),
        ({"timeout": 3601}, ("reward_kwargs.timeout", "at most 3600", "found 3601")),
        ({"timout": 5}, ("'timout'", "did you mean 'timeout'")),
    ],
)
def test_invalid_setting_is_rejected(kwargs, words):
    with pytest.raises(ConfigurationError, match=facts(*words)):
        compute_score("math", r"\boxed{5}", "5", **kwargs)


PIECES = st.sampled_from(
    ["\\boxed{", "\\boxed", "{", "}", "\\", "\\frac", "1", "x", "%", "\n", " ", "$", "\ud800", "\x00", "^"]
)


@settings(deadline=None)
@given(st.text(max_size=20) | st.lists(PIECES, max_size=12).map("".join))
def test_any_response_gets_0_or_1(text):
    assert accuracy(text, "7", timeout=2.0) in (0.0, 1.0)
    assert accuracy(rf"\boxed{{{text}}}", "7", timeout=2.0) in (0.0, 1.0)


REPEATED_BLOCKS = ["\\boxed{", "\\boxed ", "{", "}", "\\", " ", "\\boxed{5}"]


@pytest.mark.parametrize("block", REPEATED_BLOCKS)
def test_time_is_linear_in_the_length_of_the_response(block):
    def score(text):
        accuracy(text, "5")
        accuracy(rf"\boxed{{{text}}}", "5")
        accuracy(f"{text}}}", "5")

    assert is_linear(score, lambda size: block * (size // len(block)))


class JudgeThatFailsOnce:
    """A judge whose process dies at the first question, and which then finds every answer equal."""

    def __init__(self):
        self.has_failed = False

    def ask(self, *question):
        if not self.has_failed:
            self.has_failed = True
            raise NoVerdictError("its process died")
        return True


def test_ground_truth_is_checked_again_after_a_failure_of_the_judge(monkeypatch):
    monkeypatch.setattr("verl_ext.rewards.boxed_math.VERIFIER", JudgeThatFailsOnce())
    with pytest.raises(DataError):
        check_ground_truth("17.25")
    assert check_ground_truth("17.25") == "17.25"
