"""`report --groups` on dumps."""

from __future__ import annotations

import pytest

from tests.facts import a_line_says, says
from tests.tools import made

CONDITION = {"gdpo": {"conditions": {"form": {"on": "right", "at_least": 1.0}}}}


@pytest.fixture
def report(capsys):
    return lambda *arguments, status=0: made.call(capsys, "report", "--groups", *arguments, status=status)


def test_groups_are_as_the_estimator_saw_them(report, tmp_path):
    """No answer of the last prompt is right: with the condition its form does not count, and it is dead."""
    text = report(made.dump(tmp_path / "without", [1])[0])
    assert a_line_says(text, "1 files, steps 1 to 1, 3 groups, 12 responses")
    assert a_line_says(text, "dead, no reward varies", "0 of 3 groups")
    assert text.splitlines()[-3].split()[1] == "p2"  # the hardest
    text = report(made.dump(tmp_path / "with", [1], algorithm=CONDITION)[0])
    assert a_line_says(text, "dead, no reward varies", "1 of 3 groups")
    assert a_line_says(text, "every advantage is 0", "1 of 3 groups")
    assert [row.split()[1] for row in text.splitlines()[-2:]] == ["p0", "p1"]
    assert a_line_says(text, "p0", "0.250 ± 0.500", "4.5")


def test_the_folder_that_was_written_last_counts_and_a_file_that_is_none_is_left_out(report, tmp_path):
    made.dump(tmp_path, [1, 2, 3])
    made.dump(tmp_path, [2], start=1)
    (tmp_path / "from-0-0/advantages-00000009-000.parquet").write_bytes(b"PAR1")
    text = report(tmp_path)
    assert a_line_says(text, "3 files", "9 groups")
    assert a_line_says(text, "from-1-0", "steps 2 to 2", "1 updates")
    assert a_line_says(text, "advantages-00000009-000.parquet", "left out")


def test_a_folder_without_dumps_is_refused(report, tmp_path):
    assert says(report(tmp_path, status=1), tmp_path, "advantages-*.parquet")
