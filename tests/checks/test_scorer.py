"""The process in which responses are scored: how it ends, and what it cannot send."""

import signal
import time
from types import SimpleNamespace

import psutil
import pytest

from tests.facts import a_line_says
from verl_ext.checks import scoring
from verl_ext.errors import ConfigurationError, explaining_errors
from verl_ext.files import exit_on_signals

FUNCTION = "reward.custom_reward_function"
FAULTY_FUNCTIONS = """
import enum, os, time

class Level(enum.IntEnum):
    EASY = 1

def returns_a_function(**given):
    return {"score": 1.0, "correct": 1.0, "format": lambda: 0}

def returns_a_class_of_its_file(**given):
    return {"score": 1.0, "correct": 1.0, "format": Level.EASY}

def crashes_with_a_child(**given):
    if os.fork() == 0:
        time.sleep(60)
    os._exit(3)
"""


@pytest.fixture
def try_faulty(try_reward, tmp_path):
    """Return the exit status and the output of `check --try-reward` with one of `FAULTY_FUNCTIONS`."""
    (tmp_path / "faulty.py").write_text(FAULTY_FUNCTIONS)

    def run(name, *arguments):
        return try_reward(f"{FUNCTION}.path={tmp_path}/faulty.py", f"{FUNCTION}.name={name}", *arguments)

    return run


def test_a_crash_is_reported_although_a_child_of_the_function_lives(try_faulty):
    status, output = try_faulty("crashes_with_a_child", "--seconds", "1")
    assert status == 1
    assert a_line_says(output, "error", "exit status 3", "row 0 of")
    assert "timed out" not in output


@pytest.mark.parametrize("name", ["returns_a_function", "returns_a_class_of_its_file"])
def test_a_result_that_cannot_be_sent_is_not_called_an_exception(try_faulty, name):
    status, output = try_faulty(name)
    assert status == 1
    assert a_line_says(output, "error", "a result that cannot be sent to another process", "Return only numbers")
    assert "it raises" not in output


def test_a_name_with_a_bracket_is_reported_as_a_wrong_name(try_reward):
    status, output = try_reward(f"{FUNCTION}.name='compute_score('")
    assert status == 1
    assert a_line_says(output, f"{FUNCTION}.name", "'compute_score('", "did you mean 'compute_score'")


def test_a_file_that_cannot_be_read_is_reported(try_reward, tmp_path, monkeypatch):
    original = scoring.serve.__globals__["Path"].read_text

    def read_text(path, *arguments, **options):
        if path.name == "reward.py":
            raise PermissionError(13, "Permission denied")
        return original(path, *arguments, **options)

    monkeypatch.setattr("pathlib.Path.read_text", read_text)
    status, output = try_reward()
    assert status == 1
    assert a_line_says(output, "error", "The reward function cannot be read", "PermissionError")


def answer_nothing(pipe_of_parent, pipe, config):
    """Serve as a child that has loaded a function, and waits for the end of the pipe."""
    pipe_of_parent.close()
    scoring.os.setsid()
    pipe.send(("result", False))
    time.sleep(60)


def test_all_children_are_killed_although_one_cannot_be(monkeypatch):
    killed = []

    def kill_raises():
        raise psutil.AccessDenied

    children = [SimpleNamespace(kill=kill_raises), SimpleNamespace(kill=lambda: killed.append("second"))]
    monkeypatch.setattr(scoring, "serve", answer_nothing)
    scorer = scoring.Scorer({}, timeout=60, deadline=time.monotonic() + 60, accepts_nan=False)
    monkeypatch.setattr(psutil, "Process", lambda pid: SimpleNamespace(children=lambda recursive: children))
    scorer.close()
    assert killed == ["second"]


@pytest.fixture
def handlers_kept():
    """Restore the signal handlers of this process."""
    numbers = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers_kept")
def test_a_signal_is_not_reported_as_an_error_of_a_file():
    exit_on_signals()
    with pytest.raises(SystemExit) as caught, explaining_errors("The configuration x"):
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.code == 128 + signal.SIGTERM


def test_an_exit_of_the_user_s_code_is_reported_as_an_error():
    with pytest.raises(ConfigurationError, match="x cannot be read"), explaining_errors("x", ConfigurationError):
        raise SystemExit(3)
