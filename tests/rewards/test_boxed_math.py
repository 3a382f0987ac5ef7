from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.facts import facts
from tests.linear import is_linear
from verl_ext.errors import ConfigurationError, DataError
from verl_ext.rewards.boxed_math import Options, check_ground_truth, compute_score, last_boxed
from verl_ext.rewards.math_judge import NoVerdictError


def accuracy(solution: str, gold: str, **kwargs: object) -> float:
    return compute_score("math", solution, gold, {"index": 3}, **kwargs)["score"]


EQUAL = [
    (r"\frac{1}{2}", "0.5"),
    ("1000", "1,000"),
    (r"10\%", "0.1"),
    ("x=5", "5"),
    (r"\text{east}", "east"),
    (r"12", r"12 \text{ cm}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
]
UNEQUAL = [("5", "6"), (r"\frac{1}{3}", "0.333"), (r"10\%", "10"), ("(0,1)", "[0,1]"), (r"\text{east}", r"\text{west}")]


@pytest.mark.parametrize(("gold", "answer"), [*EQUAL, *UNEQUAL])
def test_answers_are_equal_or_not(gold, answer):
    assert accuracy(rf"So the answer is $\boxed{{{answer}}}$.", gold) == ((gold, answer) in EQUAL)


# Without braces: what stands in the box, and what follows it. None of them is 5 for certain.
UNREAD = [r"5x+3", "5 + 3", "5^2", "5/2", r"5\%", "5, 6", r"5 \text{ cm}", "5 < 6", "5(x)", "xy", r"\frac12", "$5$"]
# What may follow a number without braces.
ENDS = [".", ", so", " \nWe", r"\)", r" \]", r" \end{x}", "}", "**", r"\;.", r" \quad$", "</answer>"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", None),
        (r"\boxed5.", "5"),
        (r"\boxed{1}, no, \boxed 2", "2"),
        (r"\boxed 1, no, \boxed{2}", "2"),
        (r"\boxed{1 + \boxed 2}", "2"),
        (r"\boxed", None),
        *((rf"so $\boxed {bare}$.", bare) for bare in ("5", "-3.5", ".5", "1,000", "x")),
        *((rf"It is \boxed 5{end}", "5") for end in ENDS),
        *((rf"It is \boxed {bare}", None) for bare in UNREAD),
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
    ],
)
def test_the_last_complete_box_by_where_it_opens(text, found):
    assert last_boxed(text) == found


@pytest.mark.parametrize("solution", ["", "5", r"\boxed{ }", r"\boxed{5", "\\boxed{\ud800}"])
def test_an_answer_without_a_readable_box_is_wrong(solution):
    assert accuracy(solution, "5") == 0


READABLE = [r"0.\overline{72}", r"We get \boxed 4, then $\boxed 12$.", r"3\,:\,4 \;", " 5 ", "?"]
READABLE += ["-123456789012", r"\frac{-7}{12}", "-4x^2+9y"]


@pytest.mark.parametrize("gold", READABLE)
def test_a_gold_of_a_public_set_is_read_as_it_is(gold):
    assert accuracy(rf"\boxed{{{last_boxed(gold) or gold}}}", gold) == 1
    assert accuracy(r"\boxed{173}", gold) == 0


@pytest.mark.parametrize("gold", [None, "", r"\frac{2}{3", r"\boxed{}", r"\boxed \frac12", r"\boxed{5", "\\"])
def test_a_gold_that_cannot_be_read_is_an_error_that_names_the_row(gold):
    for solution in (r"\boxed{5}", ""):
        with pytest.raises(DataError, match=facts("row 3 of 'math'", "ground_truth")):
            compute_score("math", solution, gold, {"index": 3})


def test_a_gold_that_takes_too_long_is_an_error():
    with pytest.raises(DataError, match=facts("0.3 s")):
        compute_score("math", r"\boxed{5}", "(" * 900, timeout=0.03)


def test_without_math_verify_the_error_names_the_package(monkeypatch):
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
def test_a_wrong_setting_is_refused(kwargs, words):
    with pytest.raises(ConfigurationError, match=facts(*words)):
        compute_score("math", r"\boxed{5}", "5", **kwargs)


PIECES = st.sampled_from(
    ["\\boxed{", "\\boxed", "{", "}", "\\", "\\frac", "1", "x", "%", "\n", " ", "$", "\ud800", "\x00", "^"]
)


@settings(deadline=None)
@given(st.text(max_size=20) | st.lists(PIECES, max_size=12).map("".join))
def test_any_answer_gets_0_or_1(text):
    for solution in (text, rf"\boxed{{{text}}}"):
        assert accuracy(solution, "7", timeout=2.0) in (0.0, 1.0)


ADVERSARIAL = ["\\boxed{", "\\boxed ", "{", "}", "\\", " ", "\\boxed{5}"]


@pytest.mark.parametrize("block", ADVERSARIAL)
def test_time_is_linear_in_the_length_of_the_answer(block):
    def score(text):
        for solution in (text, rf"\boxed{{{text}}}", f"{text}}}"):
            accuracy(solution, "5")

    assert is_linear(score, lambda size: block * (size // len(block)))


def test_a_judge_that_failed_is_asked_again(monkeypatch):
    verdicts = iter([NoVerdictError("its process died"), True])

    def ask(*_):
        verdict = next(verdicts)
        if isinstance(verdict, Exception):
            raise verdict
        return verdict

    monkeypatch.setattr("verl_ext.rewards.boxed_math.VERIFIER", SimpleNamespace(ask=ask))
    with pytest.raises(DataError):
        check_ground_truth("17.25")
    assert check_ground_truth("17.25") == "17.25"
