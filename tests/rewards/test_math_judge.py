"""The process that runs math-verify: a reply belongs to its question, also after an interruption or a failure."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from tests.facts import facts
from verl_ext.errors import ConfigurationError, VerlExtError
from verl_ext.rewards.math_judge import NoVerdictError, Verifier

ENDLESS = "9^{9^{9^9}}"


@pytest.fixture
def fake_library(tmp_path, monkeypatch):
    """Return a function that writes a package math_verify whose expressions are texts, and which loads at once.

    Its arguments are expressions of Python. Each process that loads it writes its id into the file `loaded_by`.
    """

    def write(verify="left == right", parse="[text[7:-1]]", first=""):
        (tmp_path / "math_verify.py").write_text(
            f"import os, sys, time\n{first}\nLatexExtractionConfig = dict\n"
            f"with open({str(tmp_path / 'loaded_by')!r}, 'a') as file:\n    print(os.getpid(), file=file)\n"
            f"def parse(text, *args, **kwargs):\n    return {parse}\n"
            f"def verify(left, right, **kwargs):\n    return {verify}\n"
        )

    monkeypatch.syspath_prepend(tmp_path)
    return write


def processes_that_loaded_it(folder):
    """Return the ids of the processes that have loaded the fake library."""
    return [int(process) for process in (folder / "loaded_by").read_text().split()]


@pytest.fixture
def judge():
    new_judge = Verifier()
    yield new_judge
    if new_judge._idle:
        new_judge._idle.end()


def run(script, *, cwd=None):
    """Return the output of a script that must neither fail nor write to standard error."""
    command = [sys.executable, "-W", "always", "-c", textwrap.dedent(script)]
    path = os.pathsep.join(folder for folder in sys.path if folder)
    variables = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=cwd, env=variables)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


INTERRUPTED = """
    import random, signal, threading, warnings
    from verl_ext.rewards.math_judge import Verifier

    warnings.simplefilter("ignore", ResourceWarning)  # of what an interruption drops
    judge, draw = Verifier(), random.Random(1)

    def interrupt(*_):
        raise draw.choice([KeyboardInterrupt, TimeoutError, ValueError])

    signal.signal(signal.SIGALRM, interrupt)
    stop, incorrect, interruptions = threading.Event(), [], 0

    def ask_from_another_thread():
        for number in range(10**9):
            if stop.is_set():
                return
            if judge.equal(str(number // 2), str(number - number // 2), 5.0) is not (number % 2 == 0):
                incorrect.append(number)

    threads = [threading.Thread(target=ask_from_another_thread) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for number in range(50):
        try:
            signal.setitimer(signal.ITIMER_REAL, draw.uniform(0.0005, 0.004))
            while True:
                judge.equal(str(number), str(number), 5.0)
        except (KeyboardInterrupt, TimeoutError, ValueError):
            interruptions += 1
        if judge.equal(str(number), "other", 5.0):
            incorrect.append(number)
    stop.set()
    for thread in threads:
        thread.join()
    print(interruptions, incorrect)
"""


@pytest.mark.parametrize("threads", [0, 2])
def test_random_interruptions_cause_no_incorrect_verdict(fake_library, threads):
    fake_library(verify="time.sleep(0.001) or left == right")
    assert run(INTERRUPTED.replace("THREADS", str(threads))) == "50 []\n"


def test_endless_comparison_is_unequal_after_its_time_and_is_logged(judge, caplog):
    with pytest.raises(NoVerdictError, match=facts("0.3 s")):
        judge.ask("5", ENDLESS, 0.3)
    assert not judge.equal("5", ENDLESS, 0.3)
    assert "0.3 s" in caplog.text
    assert judge.equal("5", "5", 0.3)


def test_killed_process_is_replaced(fake_library, tmp_path, judge, caplog):
    fake_library()
    assert judge.equal("5", "5", 5.0)
    (process,) = processes_that_loaded_it(tmp_path)
    os.kill(process, signal.SIGKILL)
    assert judge.equal("5", "5", 5.0)
    assert len(processes_that_loaded_it(tmp_path)) == 2
    assert not caplog.text


def test_process_that_dies_of_a_question_gives_no_verdict(fake_library, judge):
    fake_library(verify="left == right if left != ['bad'] else os._exit(7)")
    with pytest.raises(NoVerdictError):
        judge.ask("bad", "5", 5.0)
    assert not judge.equal("bad", "5", 5.0)
    assert judge.equal("5", "5", 5.0)


def test_stopped_process_is_an_error_and_is_replaced(fake_library, tmp_path, judge, monkeypatch):
    fake_library()
    assert judge.equal("5", "5", 5.0)
    (process,) = processes_that_loaded_it(tmp_path)
    os.kill(process, signal.SIGSTOP)
    monkeypatch.setattr("verl_ext.rewards.math_judge._MIN_WALL_SECONDS", 0.1)
    with pytest.raises(VerlExtError, match=facts("0.5 s")):
        judge.equal("5", "5", 0.05)
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
    assert judge.equal("5", "5", 5.0)


def test_forked_process_has_its_own_judge():
    script = r"""
        import os
        from verl_ext.rewards.math_judge import VERIFIER
        VERIFIER.equal("5", "5", 5.0)
        process_of_parent = VERIFIER._idle.popen.pid
        VERIFIER._lock.acquire()  # as if another thread were asking
        child = os.fork()
        if not child:
            is_equal = VERIFIER.equal("5", "5", 5.0)
            os._exit(0 if is_equal and VERIFIER._idle.popen.pid != process_of_parent else 1)
        status = os.waitpid(child, 0)[1]
        VERIFIER._lock.release()
        print(status, VERIFIER.equal("6", "5", 5.0), VERIFIER._idle.popen.pid == process_of_parent)
    """
    assert run(script) == "0 False True\n"


def test_answer_that_takes_too_long_is_incorrect_and_prints_nothing():
    """The caller ignores and blocks the signal of the timeout."""
    script = rf"""
        import logging, signal
        logging.disable()
        signal.signal(signal.SIGPROF, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGPROF}})
        from verl_ext.rewards.boxed_math import compute_score
        late = compute_score("math", r"\boxed{{{ENDLESS}}}", "5", timeout=0.3)
        print(late, compute_score("math", r"\boxed{{5}}", "5")["score"])
    """
    assert run(script) == "{'accuracy': 0.0, 'score': 0.0} 1.0\n"


def test_only_cpu_time_counts(fake_library, judge):
    fake_library(verify="time.sleep(0.5) or left == right")
    assert judge.equal("5", "5", 0.2)


ALLOCATE_5_GIB = """
def allocate(text):
    try:
        return len(bytearray((5 << 30) * ("big" in text)))
    except MemoryError:
        return "limited"
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is set on Linux only")
def test_process_has_a_memory_limit(tmp_path, fake_library, judge):
    fake_library(first=ALLOCATE_5_GIB, parse="[allocate(text) or text]")
    assert judge.equal("big 1", "big 2", 5.0)
    assert not judge.equal("1", "2", 5.0)


def test_file_of_the_working_folder_does_not_replace_a_library(tmp_path):
    (tmp_path / "sympy.py").write_text("raise ImportError('not the library')")
    (tmp_path / "link").symlink_to(tmp_path)
    script = """
        import os, sys
        sys.path.remove("")  # so that the caller itself imports no file of the folder
        from verl_ext.rewards.math_judge import VERIFIER
        sys.path[:0] = ["", os.getcwd(), "link"]
        print(VERIFIER.equal("1/2", "0.5", 5.0))
    """
    assert run(script, cwd=tmp_path) == "True\n"


@pytest.mark.parametrize(
    "library",
    [
        {"first": "raise ImportError('Unsupported ANTLR version 4.7')"},
        {"parse": "[] if '%' in text else [text]", "verify": "bool(left) and left == right"},
    ],
)
def test_broken_math_verify_is_an_error(library, fake_library, judge):
    fake_library(**library)
    with pytest.raises(ConfigurationError):
        judge.equal("5", "5", 5.0)
