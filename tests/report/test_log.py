from __future__ import annotations

import json

import pytest

from verl_ext.errors import DataError
from verl_ext.report.log import find_log, read_log, read_logs


def line(step, **data):
    return json.dumps({"step": step, "data": data}) + "\n"


def test_a_torn_last_line_is_left_out_and_counted(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1, a=0.5) + line(2, a=1.5)[:-8])
    log = read_log(path)
    assert log.steps == {1: {"a": 0.5}}
    assert log.unreadable == 1


@pytest.mark.parametrize("text", ["[]\n", '{"step": "1", "data": {}}\n', '{"step": 1}\n', "Training\n", "\x00\x00\n"])
def test_a_line_that_is_no_record_is_counted(tmp_path, text):
    path = tmp_path / "metrics.jsonl"
    path.write_text(text + line(1, a=1))
    log = read_log(path)
    assert (log.steps, log.unreadable) == ({1: {"a": 1.0}}, 1)


def test_of_a_step_that_was_logged_twice_the_later_values_count(tmp_path):
    """Training and validation of a step are two records; so may be a step before and after a resume."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1, a=1) + line(2, a=2, b=5) + "\n" + line(2, a=20, c=3))
    log = read_log(path)
    assert log.steps == {1: {"a": 1.0}, 2: {"a": 20.0, "b": 5.0, "c": 3.0}}
    assert log.resumed_after == ()


def test_what_a_resumed_run_has_left_behind_is_left_out(tmp_path):
    """Five steps, killed, resumed from the checkpoint of step 2, killed again after step 3."""
    path = tmp_path / "metrics.jsonl"
    first = "".join(line(step, a=step) for step in range(1, 6))
    path.write_text(first + line(6, a=6)[:-9] + "\n" + line(3, a=30))
    log = read_log(path)
    assert list(log.steps.items()) == [(1, {"a": 1.0}), (2, {"a": 2.0}), (3, {"a": 30.0})]
    assert log.resumed_after == (2,)
    assert log.unreadable == 1


def test_the_validation_before_a_resumed_training_keeps_the_step_of_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(line(step, a=step) for step in range(1, 6)) + line(3, val=9) + line(4, a=40))
    log = read_log(path)
    assert list(log.steps.items()) == [
        (1, {"a": 1.0}), (2, {"a": 2.0}), (3, {"a": 3.0, "val": 9.0}), (4, {"a": 40.0})
    ]  # fmt: skip


def test_the_parts_of_a_run_are_read_one_after_the_other(tmp_path):
    """verl's file logger begins a new file on every start."""
    (tmp_path / "1.jsonl").write_text("".join(line(step, a=step) for step in (1, 2, 3)))
    (tmp_path / "2.jsonl").write_text("".join(line(step, a=10 * step) for step in (3, 4)))
    log = read_logs([tmp_path / "1.jsonl", tmp_path / "2.jsonl"])
    assert [values["a"] for values in log.steps.values()] == [1, 2, 30, 40]


def test_missing_lines_leave_a_gap(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1, a=1) + line(4, a=4))
    assert list(read_log(path).steps) == [1, 4]


@pytest.fixture
def events(tmp_path):
    writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter
    folder = tmp_path / "tensorboard"
    for part in ((1, 2, 3), (3, 4)):
        log = writer(str(folder))
        for step in part:
            log.add_scalar("reward/a/mean", step * (1 if part[0] == 1 else 10), step)
            log.add_scalar("timing_s/step", 0.5, step)
        log.close()
    return folder


def test_a_tensorboard_folder_is_read_like_a_log_resumed_parts_and_all(events):
    log = read_log(events)
    assert [values["reward/a/mean"] for values in log.steps.values()] == [1, 2, 30, 40]
    assert {values["timing_s/step"] for values in log.steps.values()} == {0.5}
    assert find_log(events) == events
    assert find_log(events.parent) == events  # a run's folder with a tensorboard folder in it
    (events.parent / "metrics.jsonl").write_text(line(1, a=1))
    assert find_log(events.parent) == events.parent / "metrics.jsonl"


def test_what_is_no_number_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1, a=1, text="x", flag=True, nothing=None, nan=float("nan"), inf=float("inf")))
    assert read_log(path).steps == {1: {"a": 1.0}}


def test_a_log_without_any_record_is_an_error_that_says_what_was_expected(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("")
    with pytest.raises(DataError, match="no line of verl's file logger"):
        read_log(path)


def test_a_log_is_found_by_its_path_by_its_folder_and_as_the_only_jsonl_file(tmp_path):
    other = tmp_path / "run_1.jsonl"
    other.write_text("")
    assert find_log(other) == other
    assert find_log(tmp_path) == other
    (tmp_path / "metrics.jsonl").write_text("")
    assert find_log(tmp_path) == tmp_path / "metrics.jsonl"


def test_a_folder_with_two_logs_and_a_missing_one_are_errors_that_list_what_is_there(tmp_path):
    (tmp_path / "a.jsonl").write_text("")
    (tmp_path / "b.jsonl").write_text("")
    with pytest.raises(DataError, match=r"holds 'a\.jsonl', 'b\.jsonl'; expected"):
        find_log(tmp_path)
    with pytest.raises(DataError, match="does not exist; expected"):
        find_log(tmp_path / "nowhere")
