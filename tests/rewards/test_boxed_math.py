import os
import resource
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_ext.errors import ConfigurationError, DataError
from verl_ext.rewards import boxed_math, math_judge
from verl_ext.rewards.boxed_math import Options, check_ground_truth, check_kwargs, compute_score, last_boxed

ENDLESS = r"\boxed{9^{9^{9^9}}}"


def accuracy(solution: str, gold: str, **kwargs: object) -> float:
    score = compute_score("math", solution, gold, {"index": 3}, **kwargs)
    assert list(score) == ["accuracy", "score"]
    assert score["accuracy"] == score["score"]
    assert {type(value) for value in score.values()} == {float}
    return score["score"]


EQUAL = [
    ("5", "5"),
    (r"\frac{1}{2}", "0.5"),
    (r"\frac{1}{2}", r"\dfrac12"),
    ("1000", "1,000"),
    ("10080", r"10,\!080"),
    (r"10\%", r"10\%"),
    (r"10\%", "0.1"),
    (r"\$5", "5"),
    ("x=5", "5"),
    ("(x+1)^2", "x^2+2x+1"),
    (r"\text{east}", "east"),
    (r"12", r"12 \text{ cm}"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3, \pi/2)"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    (r"[0,1)", r"[0, 1)"),
    ("3,5", "5,3"),
    (r"\{1,2\}", r"\{ 2, 1 \}"),
    ("$5$", "5"),
]
UNEQUAL = [("5", "6"), (r"\frac{1}{3}", "0.333"), (r"10\%", "10"), ("(0,1)", "[0,1]"), (r"\text{east}", r"\text{west}")]


@pytest.mark.parametrize(("gold", "answer"), EQUAL)
def test_equal_answers(gold, answer):
    assert accuracy(rf"So the answer is $\boxed{{{answer}}}$.", gold) == 1


@pytest.mark.parametrize(("gold", "answer"), UNEQUAL)
def test_unequal_answers(gold, answer):
    assert accuracy(rf"So the answer is $\boxed{{{answer}}}$.", gold) == 0


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", None),
        ("5", None),
        (r"\boxed 5", None),
        (r"\boxed{", None),
        (r"\boxed{5", None),
        (r"\boxed{\frac{1}{2}", None),
        (r"boxed{5}", None),
        (r"\boxed{5}", "5"),
        (r"\boxed{ 5 }", "5"),
        (r"\boxed {5}", "5"),
        (r"\boxed{}", ""),
        (r"\boxed{1}\boxed{2}", "2"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1\}}", r"\{1\}"),
        (r"\boxed{\}}", r"\}"),
        (r"\boxed{1\\}", r"1\\"),
        (r"} \boxed{5}", "5"),
        (r"{ \boxed{5}", "5"),
        (r"{ \boxed{5} }", "5"),
        (r"\boxed{1 + \boxed{2} + 3}", "2"),
        (r"\\boxed{5}", None),
    ],
)
def test_the_last_complete_box_by_where_it_opens(text, found):
    assert last_boxed(text) == found


@pytest.mark.parametrize(
    "solution", ["", "5", r"\boxed{}", r"\boxed{ }", r"\boxed{5", "\\boxed{\ud800}", "\\boxed{\x00}"]
)
def test_an_answer_without_a_readable_box_is_wrong(solution):
    assert accuracy(solution, "5") == 0


def test_the_gold_is_its_last_box_or_all_of_it():
    assert check_ground_truth(r"We get \boxed{4}, then \boxed{5}.") == "5"
    assert check_ground_truth(" 5 ") == "5"
    assert accuracy(r"\boxed{5}", r"\boxed{5}") == 1


@pytest.mark.parametrize("gold", [None, 5, "", r"\frac{2}{3", r"\boxed{}", "5" * 2001, r"\boxed{\ud800", "\\"])
def test_a_gold_that_cannot_be_read_is_an_error_that_names_the_row(gold):
    for solution in (r"\boxed{5}", ""):
        with pytest.raises(DataError, match=r"^row 3 of 'math': the ground truth "):
            compute_score("math", solution, gold, {"index": 3})


def test_a_gold_that_takes_too_long_is_an_error():
    with pytest.raises(DataError, match=r"cannot be read by math-verify in 0.3 s"):
        compute_score("math", r"\boxed{5}", "(" * 900, timeout=0.03)


def test_an_endless_answer_is_wrong_after_the_timeout_and_the_next_one_is_judged(caplog):
    began = time.monotonic()
    assert accuracy(ENDLESS, "5", timeout=0.3) == 0
    assert time.monotonic() - began < 30  # far from endless, even on a busy machine
    assert "math-verify took over 0.3 s, counted as wrong" in caplog.text
    assert accuracy(r"\boxed{5}", "5", timeout=0.3) == 1


def test_a_long_answer_is_wrong_without_being_judged(monkeypatch):
    assert check_ground_truth("5") == "5"
    monkeypatch.setattr(math_judge.Judge, "equal", lambda *args: pytest.fail("judged"))
    assert accuracy(rf"\boxed{{5{' ' * 3000}6}}", "5") == 0


def test_threads_get_their_own_verdicts():
    def score(number: int) -> float:
        assert threading.current_thread() is not threading.main_thread()
        return accuracy(rf"\boxed{{{number // 2}}}", str(number - number // 2))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(score, range(60))) == [float(number % 2 == 0) for number in range(60)]


def test_the_process_is_restarted_if_it_was_ended(caplog):
    assert accuracy(r"\boxed{5}", "5") == 1
    process = math_judge.JUDGE._process
    process.kill()
    process.wait()
    assert accuracy(r"\boxed{5}", "5") == 1
    assert math_judge.JUDGE._process.pid != process.pid
    assert not caplog.text


def test_a_process_that_ends_twice_is_reported(monkeypatch, caplog):
    def fails() -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-c", "input(); raise SystemExit(7)"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    monkeypatch.setattr(math_judge, "_start", fails)
    assert math_judge.Judge().equal("5", "5", 5.0) is False
    assert "ended twice (7), counted as wrong: '5'" in caplog.text


def run(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_a_forked_process_has_a_judge_of_its_own():
    script = r"""
        import os
        from verl_ext.rewards.boxed_math import compute_score
        from verl_ext.rewards.math_judge import JUDGE
        compute_score("math", r"\boxed{5}", "5")
        mine = JUDGE._process.pid
        JUDGE._lock.acquire()  # as if another thread were asking
        child = os.fork()
        if not child:
            right = compute_score("math", r"\boxed{5}", "5")["score"] == 1 and JUDGE._process.pid != mine
            JUDGE.close()
            os._exit(0 if right else 1)
        status = os.waitpid(child, 0)[1]
        JUDGE._lock.release()
        print(status, compute_score("math", r"\boxed{6}", "5")["score"], JUDGE._process.pid == mine)
    """
    assert run(script) == "0 0.0 True\n"


def test_the_process_ends_when_its_caller_dies():
    script = r"""
        import os
        from verl_ext.rewards.boxed_math import compute_score
        from verl_ext.rewards.math_judge import JUDGE
        compute_score("math", r"\boxed{5}", "5")
        print(JUDGE._process.pid, flush=True)
        os._exit(0)
    """
    judge = int(run(script))
    deadline = time.monotonic() + 30
    while alive(judge):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_timeout_works_where_the_caller_ignores_or_blocks_its_signal():
    script = rf"""
        import logging, signal
        logging.disable()
        signal.signal(signal.SIGPROF, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGPROF}})
        from verl_ext.rewards.boxed_math import compute_score
        print(compute_score("math", r"{ENDLESS}", "5", timeout=0.3))
    """
    assert run(script) == "{'accuracy': 0.0, 'score': 0.0}\n"


def test_the_process_does_not_hear_the_keyboard_interrupts_of_its_caller():
    assert accuracy(r"\boxed{5}", "5") == 1
    assert os.getpgid(math_judge.JUDGE._process.pid) != os.getpgid(0)


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is set on Linux only")
def test_the_process_has_a_limit_of_memory(tmp_path, monkeypatch):
    (tmp_path / "math_verify.py").write_text(
        "def parse(text, *args, **kwargs):\n"
        "    try:\n"
        "        return [text, len(bytearray((5 << 30) * ('big' in text)))]\n"
        "    except MemoryError:\n"
        "        return ['limited']\n"
        "LatexExtractionConfig = dict\nverify = lambda left, right, **kwargs: left == right\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    judge = math_judge.Judge()
    assert judge.equal("big 1", "big 2", 5.0)
    assert not judge.equal("1", "2", 5.0)
    judge.close()


def test_nothing_is_printed_when_an_answer_takes_too_long():
    script = rf"""
        import logging
        logging.disable()
        from verl_ext.rewards.boxed_math import compute_score
        compute_score("math", r"{ENDLESS}", "5", timeout=0.3)
        compute_score("math", r"\boxed{{5}}", "5")
    """
    assert run(script) == ""


def test_without_math_verify_the_error_names_the_package(monkeypatch):
    monkeypatch.setattr("verl_ext.rewards.options.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"needs 'math_verify'.*pip install 'math-verify>=0.8,<0.9'"):
        check_kwargs({"timeout": 4.25})


def test_a_math_verify_that_cannot_be_imported_is_reported_with_its_reason(tmp_path, monkeypatch):
    (tmp_path / "math_verify.py").write_text("raise ImportError('Unsupported ANTLR version 4.7')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigurationError, match=r"does not work here: ImportError: Unsupported ANTLR version 4.7"):
        math_judge.Judge().equal("5", "5", 5.0)


def test_a_math_verify_that_cannot_read_percentages_is_refused(tmp_path, monkeypatch):
    (tmp_path / "math_verify.py").write_text(
        "LatexExtractionConfig = dict\nparse = lambda text, *args, **kwargs: [] if '%' in text else [text]\n"
        "verify = lambda left, right, **kwargs: bool(left) and left == right\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigurationError, match=r"cannot read 10\\%.*pip install 'math-verify>=0.8,<0.9'"):
        math_judge.Judge().equal("5", "5", 5.0)


def test_a_math_verify_that_crashes_is_reported(tmp_path, monkeypatch):
    (tmp_path / "math_verify.py").write_text("import os; os._exit(9)")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigurationError, match=r"does not work here: its process ended with status 9"):
        math_judge.Judge().equal("5", "5", 5.0)


def test_what_a_library_prints_is_no_reply(tmp_path, monkeypatch):
    (tmp_path / "math_verify.py").write_text(
        "print('true')\nLatexExtractionConfig = dict\nparse = lambda text, *args, **kwargs: print('x') or [text]\n"
        "verify = lambda left, right, **kwargs: left == right\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    judge = math_judge.Judge()
    assert [judge.equal("5", other, 5.0) for other in ("5", "6", "5")] == [True, False, True]
    judge.close()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"timeout": 0}, "timeout must be above 0 and at most 3600, found 0.0"),
        ({"timeout": 3601}, "timeout must be above 0 and at most 3600"),
        ({"timeout": "5"}, "timeout must be a finite number, found '5'"),
        ({"timout": 5}, r"'timout' \(did you mean 'timeout'\?\)"),
    ],
)
def test_a_wrong_setting_is_refused(kwargs, message):
    with pytest.raises(ConfigurationError, match=message):
        compute_score("math", r"\boxed{5}", "5", **kwargs)


PIECES = st.sampled_from(
    ["\\boxed{", "\\boxed", "{", "}", "\\", "\\frac", "1", "x", "%", "\n", " ", "$", "\ud800", "\x00", "^"]
)


@settings(deadline=None)
@given(st.text(max_size=20) | st.lists(PIECES, max_size=12).map("".join))
def test_any_answer_gets_0_or_1(text):
    for solution in (text, rf"\boxed{{{text}}}"):
        assert accuracy(solution, "7", timeout=2.0) in (0.0, 1.0)


@settings(deadline=None)
@given(
    st.integers(-(10**12), 10**12), st.integers(1, 1000), st.sampled_from([r"{}", r"\frac{{{}}}{{{}}}", "{}x^2+{}y"])
)
def test_a_gold_scores_full_marks_against_itself(number, other, form):
    gold = form.format(number, other)
    assert accuracy(rf"\boxed{{{gold}}}", gold) == 1


@given(st.lists(st.sampled_from(["\\boxed{", "{", "}", "\\{", "\\}", "\\\\", "a"]), max_size=12).map("".join))
def test_a_box_is_balanced_and_opens_last(text):
    def content(start: int) -> str | None:
        depth, at = 1, start
        while at < len(text):
            if text[at] == "\\":
                at += 1
            else:
                depth += {"{": 1, "}": -1}.get(text[at], 0)
            if not depth:
                return text[start:at].strip()
            at += 1
        return None

    escaped, starts = False, []
    for at, character in enumerate(text):
        if not escaped and text.startswith("\\boxed{", at):
            starts.append(at + len("\\boxed{"))
        escaped = character == "\\" and not escaped
    boxes = [box for box in map(content, starts) if box is not None]
    assert last_boxed(text) == (boxes[-1] if boxes else None)


ADVERSARIAL = ["\\boxed{", "\\boxed", "\\boxed ", "\\boxed{}", "{", "}", "{}", "\\", "\\a", " ", "a", "\\boxed{5}"]


@pytest.mark.parametrize("block", ADVERSARIAL)
def test_a_megabyte_takes_less_than_a_second(block):
    check_ground_truth("5")  # starts the process and reads the gold
    text = block * (1_000_000 // len(block))
    for solution in (text, rf"\boxed{{{text}}}", f"{text}}}"):
        began = time.process_time()
        accuracy(solution, "5")
        assert time.process_time() - began < 1


def children_seconds():
    """CPU time of the judging processes that have ended, once the present one has."""
    boxed_math.JUDGE.close()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize(
    "box", ["9^{9^{9^9}}", "(" * 1900, "{" * 900 + "}" * 900, "x^" * 950, "x" * 2000, r"\int" * 400, "1+" * 990 + "1"]
)
def test_an_adversarial_box_takes_the_judge_less_than_a_second(box):
    def cost(answer):
        began = children_seconds()
        boxed_math.JUDGE.equal("5", answer, Options().timeout)
        return children_seconds() - began

    started = cost("5")
    assert cost(box) - started < 1


def test_golds_are_read_once(monkeypatch):
    asked = []
    monkeypatch.setattr(boxed_math.JUDGE, "equal", lambda gold, answer, timeout: asked.append(answer) or True)
    for _ in range(3):
        compute_score("math", r"\boxed{1}", "a gold of this test only")
    assert asked == ["a gold of this test only", "1", "1", "1"]


def test_an_idle_process_leaves_with_its_caller_at_exit():
    assert run(r"from verl_ext.rewards.boxed_math import check_ground_truth as c; print(c('5'))") == "5\n"
