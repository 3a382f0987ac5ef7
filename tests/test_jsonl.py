"""Lines of JSON that are torn or that hold what nothing can use, in what reads them: data and the evaluation."""

from __future__ import annotations

import json

import pytest

from tests.facts import facts
from tests.report.test_log import TORN
from verl_ext import jsonl
from verl_ext.errors import DataError
from verl_ext.recipes.data.plan import Split
from verl_ext.recipes.data.source import read
from verl_ext.recipes.evaluation.__main__ import main

BAD = {name: line.replace(b'"data"', b'"output"') for name, line in TORN.items() if "step" not in name}


def answer(uid, right, text="a"):
    record = {"input": "q", "output": text, "gts": "1", "score": right, "uid": f"{uid}_0_0"}
    return (json.dumps(record, ensure_ascii=False) + "\n").encode()


def split(column):
    return Split("train", ("*.jsonl",), (column,), lambda record, index: record)


@pytest.mark.parametrize("case", [*BAD, "cut off"])
def test_the_evaluation_counts_torn_lines_and_reads_the_rest(case, tmp_path, capsys):
    torn = BAD.get(case, answer("r", 1.0)[:-9])
    path = tmp_path / "5.jsonl"
    path.write_bytes(answer("p", 1.0) + torn + b"\n" + answer("q", 0.0))
    assert main([str(path), "--right", "score", "--json", str(tmp_path / "out.json")]) == 0
    (found,) = json.loads((tmp_path / "out.json").read_text()).values()
    assert (found["answers"], found["mean"], found["unreadable_lines"]) == (2, {"score": 0.5}, 1)
    assert "1 unreadable line" in capsys.readouterr().out


def test_a_dump_of_torn_lines_alone_is_an_error_that_counts_them(tmp_path, capsys):
    path = tmp_path / "5.jsonl"
    path.write_bytes(b"{\n{\n")
    assert main([str(path)]) == 1
    assert "2 unreadable line" in capsys.readouterr().err


@pytest.mark.parametrize("case", BAD)
def test_data_with_a_line_that_cannot_be_used_is_refused_with_its_number(case, tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_bytes(b'{"a": 1}\n\n' + BAD[case] + b"\n")
    with pytest.raises(DataError, match=facts(path, "line 3")):
        read([path], split("a"))


def test_only_a_newline_ends_a_line(tmp_path):
    mark = "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
    path = tmp_path / "5.jsonl"
    path.write_bytes(answer("p", 1.0, f"a{mark}b") + b"\r\n" + answer("q", 0.0))
    records = [jsonl.parse(line) for _, line in jsonl.lines(path)]
    assert [record["output"] for record in records] == [f"a{mark}b", "a"]
    assert read([path], split("output")) == records
    assert main([str(path), "--json", str(tmp_path / "out.json")]) == 0
    assert json.loads((tmp_path / "out.json").read_text())[str(path)]["answers"] == 2


@pytest.mark.parametrize("number", [10**308 - 1, 1 - 10**308, -7, 0, 1.5e308])
def test_numbers_that_fit_a_float_are_read(number):
    assert jsonl.parse(json.dumps(number).encode()) == number
