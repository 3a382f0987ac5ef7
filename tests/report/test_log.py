from __future__ import annotations

import json

import pytest

from verl_ext.errors import DataError
from verl_ext.report.log import find_log, read_log


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


def test_of_a_step_that_was_logged_twice_the_later_values_count_and_the_steps_are_in_order(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(2, a=2, b=5) + line(3, a=3) + line(1, a=1) + "\n" + line(2, a=20))
    assert list(read_log(path).steps.items()) == [(1, {"a": 1.0}), (2, {"a": 20.0, "b": 5.0}), (3, {"a": 3.0})]


def test_what_is_no_number_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1, a=1, text="x", flag=True, nothing=None))
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
