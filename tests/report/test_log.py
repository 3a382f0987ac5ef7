from __future__ import annotations

import math
import os
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.facts import a_line_says, facts
from tests.report.logs import line
from verl_ext.cli import main
from verl_ext.errors import DataError
from verl_ext.report.log import Log
from verl_ext.report.reader import Reader, find_log


def read_log(path):
    return Reader([path]).read()


def steps_of(log):
    """What is logged, as a dict of dicts."""
    found = {int(step): {} for step in log.steps}
    for metric in log.metrics:
        for step, value in zip(*log.series(metric), strict=True):
            found[int(step)][metric] = float(value)
    return found


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        '{"step": "1", "data": {}}',
        '{"step": 1}',
        "Training",
        "\x00\x00",
        '{"step": 2, "data": {"a": 1',
        '{"step": true, "data": {}}',
    ],
)
def test_a_line_that_is_no_record_is_left_out_and_counted_also_the_last_one(tmp_path, text):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{text}\n{line(1, a=0.5)}{text}")
    log = read_log(path)
    assert (steps_of(log), log.unreadable) == ({1: {"a": 0.5}}, 2)


TORN = {
    "a number of 400 digits": b'{"step": 2, "data": {"a": ' + b"9" * 400 + b"}}",
    "a number of 5000 digits": b'{"step": 2, "data": {"a": -' + b"9" * 5000 + b"}}",
    "a step that no run reaches": b'{"step": ' + b"9" * 30 + b', "data": {"a": 1}}',
    "deep nesting": b'{"step": 2, "data": {"a": ' + b"[" * 100_000,
    "closed deep nesting": b'{"step": 2, "data": {"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}",
    "half a surrogate pair": b'{"step": 2, "data": {"a\\ud800": 1}}',
    "the other half, in capitals": b'{"step": 2, "data": {"\\uDFFF": 1}}',
    "half a surrogate pair in bytes": b'{"step": 2, "data": {"\xed\xa0\x80": 1}}',
    "half a character": b'{"step": 2, "data": {"\xc3": 1}}',
}


@pytest.mark.parametrize("case", TORN)
@pytest.mark.parametrize("more", [[], ["--html", "page.html", "--markdown", "table.md"]])
def test_a_line_that_nothing_can_use_is_counted_and_the_rest_is_reported(case, more, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        line(1, **{"reward/x/mean": 1}).encode() + TORN[case] + b"\n" + line(3, **{"reward/x/mean": 2}).encode()
    )
    assert main(["report", f"run={path}", *more]) == 0
    text = capsys.readouterr().out
    assert "1 unreadable line" in text
    assert text.splitlines()[2].split()[:5] == ["x", "run", "1", "1-3", "1.500"]


def test_a_surrogate_pair_is_a_character_like_any_other(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "data": {"\\ud83d\\ude00": 1}}\n' + line(2, **{"\\ud800": 2}))
    assert steps_of(read_log(path)) == {1: {"\N{GRINNING FACE}": 1.0}, 2: {"\\ud800": 2.0}}


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85", "\x7f"])
def test_only_a_newline_ends_a_line(mark, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1, "data": {{"a{mark}b": 1}}}}\r\n\n', encoding="utf-8")
    log = read_log(path)
    assert (steps_of(log), log.unreadable) == ({1: {f"a{mark}b": 1.0}}, 0)


VALUES = st.one_of(st.floats(), st.integers(-5, 5), st.none(), st.booleans(), st.text(max_size=1))
RECORDS = st.lists(st.tuples(st.integers(0, 6), st.dictionaries(st.sampled_from("abc"), VALUES)), min_size=1)


@given(RECORDS)
def test_a_log_holds_what_a_dict_of_dicts_would(records):
    expected, last, resumed = {}, 0, []
    for step, data in records:
        if step < last:
            expected = {known: values for known, values in expected.items() if known <= step}
            resumed.append(max((known for known in expected if known < step), default=0))
        last = step
        numbers = {name: value for name, value in data.items() if type(value) in (int, float) and math.isfinite(value)}
        expected.setdefault(step, {}).update(numbers)
    log = Log(Path("x"))
    for record in records:
        log.add(*record)
    assert steps_of(log) == expected
    assert list(log.steps) == sorted(expected)
    assert log.resumed_after == resumed
    assert log.metrics == set().union(*expected.values()) == {name for name in "abcd" if name in log}


def test_reading_takes_less_memory_than_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    data = {f"reward/metric_{at}/mean": at / 7 for at in range(100)}
    path.write_text("".join(line(step, **data) for step in range(1, 1001)))
    tracemalloc.start()
    log = read_log(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(log.steps) == 1000
    assert peak < path.stat().st_size


def test_what_a_resumed_run_has_left_behind_is_left_out(tmp_path):
    """Killed in step 6, resumed from the checkpoint of step 3 with its validation, killed again after step 4."""
    path = tmp_path / "metrics.jsonl"
    first = "".join(line(step, a=step, nan=math.nan) for step in range(1, 6))
    path.write_text(first + line(6, a=6)[:-9] + "\n" + line(3, val=9) + line(4, a=40))
    log = read_log(path)
    assert steps_of(log) == {1: {"a": 1.0}, 2: {"a": 2.0}, 3: {"a": 3.0, "val": 9.0}, 4: {"a": 40.0}}
    assert log.resumed_after == [2]
    assert log.unreadable == 1


def test_the_parts_of_a_run_are_read_one_after_the_other(tmp_path):
    """verl's file logger begins a new file on every start."""
    (tmp_path / "1.jsonl").write_text("".join(line(step, a=step) for step in (1, 2, 3)))
    (tmp_path / "2.jsonl").write_text("".join(line(step, a=10 * step) for step in (3, 4)))
    log = Reader([tmp_path / "1.jsonl", tmp_path / "2.jsonl"]).read()
    assert [values["a"] for values in steps_of(log).values()] == [1, 2, 30, 40]


def test_a_log_of_many_resumes_is_read_in_time_and_a_few_of_them_are_listed(tmp_path, capsys):
    """As long as one without, but for the steps that are taken again."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(line(4 * part + at, **{"reward/x/mean": 0.5}) for part in range(3000) for at in range(1, 7))
    )
    began = time.process_time()
    log = read_log(path)
    assert time.process_time() - began < 1.5
    assert log.resumed_after == list(range(4, 12_000, 4))
    assert main(["report", f"run={path}"]) == 0
    text = capsys.readouterr().out
    assert a_line_says(text, "resumed", "4, 8, 12", "2,994 more")
    assert max(map(len, text.splitlines())) < 200 + len(str(path))


HUGE = [1e308, -1e308, 1.7e308, 1.1e150, 10**300]


@pytest.mark.parametrize("value", HUGE)
def test_a_value_too_large_to_compute_with_is_not_logged(value, tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    values = [value, 0.5, -value, value, 1.5]
    path.write_text("".join(line(step, **{"reward/x/mean": each}) for step, each in enumerate(values, 1)))
    assert steps_of(read_log(path)) == {1: {}, 2: {"reward/x/mean": 0.5}, 3: {}, 4: {}, 5: {"reward/x/mean": 1.5}}
    assert main(["report", f"run={path}"]) == 0
    assert capsys.readouterr().out.splitlines()[2].split()[3:] == ["2-5", "1.000", "1.000", "1.000", "1.000"]


@pytest.mark.parametrize("more", [["--plot", "out.png"], ["--html", "out.html"], ["--follow"]])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_values_can_be_shown(more, sign, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    for name, scale in (("a", sign), ("b", -sign)):
        data = ({"reward/x/mean": scale * value} for value in (1e150, -1e150, 1e150))
        (tmp_path / name).write_text("".join(line(step, **each) for step, each in enumerate(data, 1)))
    if "--follow" in more:
        monkeypatch.setattr("verl_ext.report.follow.follow", lambda read, draw, *_, **__: draw(read()))
    assert main(["report", "run=a", "run=b", *more]) == 0


@pytest.mark.parametrize("where", ["", "metrics.jsonl", "other.jsonl"])
def test_a_pipe_is_refused_as_a_log(where, tmp_path):
    run = tmp_path / "run"
    if where:
        run.mkdir()
    os.mkfifo(run / where)
    with pytest.raises(DataError, match=facts(run / where, "regular file")):
        find_log(run)


def test_a_pipe_beside_a_log_is_left_alone(tmp_path):
    os.mkfifo(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").touch()
    assert find_log(tmp_path) == tmp_path / "b.jsonl"


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
    assert [values["reward/a/mean"] for values in steps_of(log).values()] == [1, 2, 30, 40]
    assert {values["timing_s/step"] for values in steps_of(log).values()} == {0.5}
    assert find_log(events) == events
    assert find_log(events.parent) == events  # a run's folder with a tensorboard folder in it
    (events.parent / "metrics.jsonl").write_text(line(1, a=1))
    assert find_log(events.parent) == events.parent / "metrics.jsonl"


def test_a_log_without_any_record_is_an_error_that_says_what_was_expected(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("")
    with pytest.raises(DataError, match=facts(path, "file logger")):
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
    with pytest.raises(DataError, match=facts(tmp_path, "'a.jsonl', 'b.jsonl'")):
        find_log(tmp_path)
    with pytest.raises(DataError, match=facts(tmp_path / "nowhere", "not exist")):
        find_log(tmp_path / "nowhere")
