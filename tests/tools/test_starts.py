"""Several starts that dump into one folder are read as one run, and notes name the steps that are skipped."""

import json
import os
import shutil

import pytest
from pyarrow import parquet

from tests.facts import facts, says
from tests.tools.run_files import write_dump
from verl_ext.errors import DataError
from verl_ext.tools.compare.read import read_rollouts

REWARD_OF_START = {"first": 0.0, "second": 1.0, "third": 0.5, "fourth": 0.25}
"""The reward `correct` of all responses of a start, by which a test recognizes the start."""
START_OF_REWARD = {reward: start for start, reward in REWARD_OF_START.items()}


def write_start(folder, start, steps, *, after_step=0, **more):
    """Write the dumps of one start, which begins after a step."""
    correct_at_step = {step: [REWARD_OF_START[start]] * 12 for step in steps}
    write_dump(folder, steps, after_step=after_step, correct_at_step=correct_at_step, **more)


def read_starts(folder):
    """Return from which start each step was read, and the notes."""
    rollouts = read_rollouts(folder)
    start_of_step = {}
    for step, rewards in rollouts.table.groupby("step")["reward/correct"]:
        (reward,) = rewards.unique()
        start_of_step[step] = START_OF_REWARD[reward]
    return start_of_step, rollouts.notes


def test_a_second_start_from_scratch_replaces_all_of_the_first(tmp_path):
    write_start(tmp_path, "first", [1, 2, 3, 4])
    write_start(tmp_path, "second", [1, 2])
    start_of_step, (note,) = read_starts(tmp_path)
    assert start_of_step == {1: "second", 2: "second"}
    assert says(note, tmp_path / "from-0-0", "1 to 4")


@pytest.mark.parametrize("steps", [[3, 4], [3], [4]])
def test_a_resume_replaces_all_later_steps_of_the_earlier_start(steps, tmp_path):
    """Also those that the resume has not reached."""
    write_start(tmp_path, "first", [1, 2, 3, 4])
    write_start(tmp_path, "second", steps, after_step=2)
    start_of_step, (note,) = read_starts(tmp_path)
    assert start_of_step == {1: "first", 2: "first"} | dict.fromkeys(steps, "second")
    assert says(note, tmp_path / "from-0-0", "3 to 4")


@pytest.mark.parametrize(
    ("after_step", "steps", "folder", "skipped"), [(2, [3], "from-2-0", "step 3"), (0, [1, 2, 3], "from-0-1", "1 to 3")]
)
def test_a_resume_continues_the_last_start_that_reached_its_step(after_step, steps, folder, skipped, tmp_path):
    """A start that died before its first save leaves the checkpoints of the earlier one."""
    write_start(tmp_path, "first", [1, 2, 3, 4])
    write_start(tmp_path, "second", steps, after_step=after_step)
    write_start(tmp_path, "third", [5], after_step=4)
    start_of_step, (note,) = read_starts(tmp_path)
    assert start_of_step == {1: "first", 2: "first", 3: "first", 4: "first", 5: "third"}
    assert says(note, tmp_path / folder, skipped)


def test_of_two_starts_that_reached_its_step_a_resume_continues_the_later(tmp_path):
    write_start(tmp_path, "first", [1, 2, 3, 4])
    write_start(tmp_path, "second", [3, 4, 5], after_step=2)
    write_start(tmp_path, "third", [5], after_step=4)
    start_of_step, _ = read_starts(tmp_path)
    assert start_of_step == {1: "first", 2: "first", 3: "second", 4: "second", 5: "third"}


def test_earlier_dumps_that_stop_short_of_a_resume_are_kept(tmp_path):
    """A full disk ends the dumps and not the run."""
    write_start(tmp_path, "first", [1, 2])
    write_start(tmp_path, "second", [11], after_step=10)
    start_of_step, notes = read_starts(tmp_path)
    assert start_of_step == {1: "first", 2: "first", 11: "second"}
    assert notes == ()


def test_a_folder_of_another_name_is_no_start(tmp_path):
    write_start(tmp_path, "first", [1, 2])
    write_start(tmp_path / "other", "second", [3])
    (tmp_path / "other/from-0-0").rename(tmp_path / "from-2b-0")
    assert read_starts(tmp_path) == ({1: "first", 2: "first"}, ())


def test_the_start_time_orders_the_starts_whatever_their_folders_are_called(tmp_path):
    write_start(tmp_path, "second", [1, 2], times=[4, 5, 6])
    write_start(tmp_path, "first", [1, 2, 3], times=[1, 1, 2, 3])
    start_of_step, (note,) = read_starts(tmp_path)
    assert start_of_step == {1: "second", 2: "second"}
    assert says(note, tmp_path / "from-0-1", "1 to 3")


@pytest.mark.parametrize("direction", [1, -1], ids=["ascending", "descending"])
def test_a_copy_reads_the_same_whatever_the_times_of_its_files(direction, tmp_path):
    original = tmp_path / "dump"
    write_start(original, "first", [1, 2, 3])
    write_start(original, "second", [3, 4], after_step=2)
    copy = shutil.copytree(original, tmp_path / "copy")
    for index, file in enumerate(sorted(copy.rglob("*.parquet")), start=1):
        modified_at = direction * index
        os.utime(file, (index, modified_at))
    expected = {1: "first", 2: "first", 3: "second", 4: "second"}
    assert read_starts(original)[0] == expected
    assert read_starts(copy)[0] == expected


def test_starts_whose_files_were_copied_into_one_folder_are_separated(tmp_path):
    write_start(tmp_path / "dump", "first", [1, 2, 3, 4])
    write_start(tmp_path / "dump", "second", [3], after_step=2)
    together = tmp_path / "together"
    together.mkdir()
    for file in sorted(tmp_path.glob("dump/*/*.parquet")):
        shutil.copy(file, together)
    start_of_step, (note,) = read_starts(together)
    assert start_of_step == {1: "first", 2: "first", 3: "second"}
    assert says(note, together, "step 4")


def test_updates_are_in_the_order_of_their_steps_whatever_the_files_are_called(tmp_path):
    write_start(tmp_path, "first", [1, 2])
    file_of_step_1 = tmp_path / "from-0-0/advantages-00000001-000.parquet"
    file_of_step_1.rename(tmp_path / "from-0-0/advantages-first.parquet")
    assert read_rollouts(tmp_path).table["step"].tolist() == [1] * 12 + [2] * 12


OVERLAPPING_TIMES = {
    "they take turns": ([1, 2, 4, 6], [3, 5, 7]),
    "the second ends first": ([1, 2, 3, 9], [4, 5, 6]),
    "the first writes once more": ([1, 2, 3, 5], [4, 6, 7]),
}


@pytest.mark.parametrize(("first_times", "second_times"), OVERLAPPING_TIMES.values(), ids=OVERLAPPING_TIMES)
def test_two_runs_at_the_same_time_are_rejected_and_each_can_be_read(first_times, second_times, tmp_path):
    write_start(tmp_path, "third", [6], after_step=5, times=[0, 0.5])
    write_start(tmp_path, "first", [1, 2, 3], times=first_times)
    write_start(tmp_path, "second", [1, 2], times=second_times)
    write_start(tmp_path, "fourth", [3], after_step=2, times=[10, 11])
    first_folder = tmp_path / "from-0-0"
    second_folder = tmp_path / "from-0-1"
    with pytest.raises(DataError, match=facts(first_folder, second_folder, "algorithm.verl_ext.dump_dir")):
        read_starts(tmp_path)
    assert read_starts(first_folder) == ({1: "first", 2: "first", 3: "first"}, ())
    assert read_starts(second_folder) == ({1: "second", 2: "second"}, ())


def test_a_dump_of_an_earlier_version_is_rejected(tmp_path):
    """Its metadata have no times."""
    write_start(tmp_path, "first", [1, 2])
    file = tmp_path / "from-0-0/advantages-00000001-000.parquet"
    table = parquet.read_table(file)
    metadata = json.loads(table.schema.metadata[b"verl_ext"])
    for name in ("after_step", "started_at", "written_at"):
        del metadata[name]
    old_table = table.replace_schema_metadata({"verl_ext": json.dumps(metadata)})
    parquet.write_table(old_table, file)
    with pytest.raises(DataError, match=facts(file, "earlier version", "'started_at'")):
        read_starts(tmp_path)
