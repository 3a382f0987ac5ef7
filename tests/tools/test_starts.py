"""Several starts that dump into one folder are read as one run, and notes name the steps that are skipped."""

import json
import os
import shutil

import pytest
from pyarrow import parquet

from tests.facts import facts, says
from tests.tools import made
from verl_ext.errors import DataError
from verl_ext.tools.compare.read import read_rollouts


def started(folder, mark, steps, start=0, **more):
    """A start that has reached such steps; the reward `right` of all its responses is the mark."""
    made.dump(folder, steps, start=start, rights={step: [float(mark)] * 12 for step in steps}, **more)


def read(folder):
    """The mark of each step, and the notes."""
    found = read_rollouts(folder)
    return found.table.groupby("step")["reward/right"].unique().map(list).to_dict(), found.notes


def test_a_second_start_from_scratch_replaces_all_of_the_first(tmp_path):
    started(tmp_path, 0, [1, 2, 3, 4])
    started(tmp_path, 1, [1, 2])
    marks, (note,) = read(tmp_path)
    assert marks == {1: [1], 2: [1]}
    assert says(note, tmp_path / "from-0-0", "1 to 4")


@pytest.mark.parametrize("steps", [[3, 4], [3], [4]])
def test_a_resume_replaces_all_later_steps_of_the_earlier_start(tmp_path, steps):
    """Also those that the resume has not reached."""
    started(tmp_path, 0, [1, 2, 3, 4])
    started(tmp_path, 1, steps, start=2)
    marks, (note,) = read(tmp_path)
    assert marks == {1: [0], 2: [0], **{step: [1] for step in steps}}
    assert says(note, tmp_path / "from-0-0", "3 to 4")


@pytest.mark.parametrize(("start", "steps"), [(2, [3]), (0, [1, 2, 3])])
def test_a_resume_continues_the_last_start_that_reached_its_step(tmp_path, start, steps):
    """A start that died before its first save leaves the checkpoints of the earlier one."""
    started(tmp_path, 0, [1, 2, 3, 4])
    started(tmp_path, 1, steps, start=start)
    started(tmp_path, 0.5, [5], start=4)
    marks, (note,) = read(tmp_path)
    assert marks == {1: [0], 2: [0], 3: [0], 4: [0], 5: [0.5]}
    skipped = "1 to 3" if len(steps) > 1 else "step 3"
    assert says(note, tmp_path / f"from-{start}-{int(start == 0)}", skipped)


def test_of_two_starts_that_reached_its_step_a_resume_continues_the_later_one(tmp_path):
    started(tmp_path, 0, [1, 2, 3, 4])
    started(tmp_path, 1, [3, 4, 5], start=2)
    started(tmp_path, 0.5, [5], start=4)
    assert read(tmp_path)[0] == {1: [0], 2: [0], 3: [1], 4: [1], 5: [0.5]}


def test_earlier_dumps_that_stop_short_of_a_resume_are_kept(tmp_path):
    """A full disk ends the dumps and not the run."""
    started(tmp_path, 0, [1, 2])
    started(tmp_path, 1, [11], start=10)
    assert read(tmp_path) == ({1: [0], 2: [0], 11: [1]}, ())


def test_a_folder_of_another_name_is_no_start(tmp_path):
    started(tmp_path, 0, [1, 2])
    started(tmp_path / "other", 1, [3])
    (tmp_path / "other/from-0-0").rename(tmp_path / "from-2b-0")
    assert read(tmp_path) == ({1: [0], 2: [0]}, ())


def test_the_start_time_orders_the_starts_whatever_their_folders_are_called(tmp_path):
    started(tmp_path, 0, [1, 2], times=[4, 5, 6])
    started(tmp_path, 1, [1, 2, 3], times=[1, 1, 2, 3])
    marks, (note,) = read(tmp_path)
    assert marks == {1: [0], 2: [0]}
    assert says(note, tmp_path / "from-0-1", "1 to 3")


@pytest.mark.parametrize("order", [1, -1])
def test_a_copy_reads_the_same_whatever_the_times_of_its_files(tmp_path, order):
    started(tmp_path / "dump", 0, [1, 2, 3])
    started(tmp_path / "dump", 1, [3, 4], start=2)
    copy = shutil.copytree(tmp_path / "dump", tmp_path / "copy")
    for time, file in enumerate(sorted(copy.rglob("*.parquet")), start=1):
        os.utime(file, (time, order * time))
    assert read(copy)[0] == read(tmp_path / "dump")[0] == {1: [0], 2: [0], 3: [1], 4: [1]}


def test_starts_whose_files_were_copied_into_one_folder_are_separated(tmp_path):
    started(tmp_path / "dump", 0, [1, 2, 3, 4])
    started(tmp_path / "dump", 1, [3], start=2)
    together = tmp_path / "together"
    together.mkdir()
    for file in sorted(tmp_path.glob("dump/*/*.parquet")):
        shutil.copy(file, together)
    marks, (note,) = read(together)
    assert marks == {1: [0], 2: [0], 3: [1]}
    assert says(note, together, "step 4")


def test_updates_are_in_the_order_of_their_steps_whatever_the_files_are_called(tmp_path):
    started(tmp_path, 0, [1, 2])
    folder = tmp_path / "from-0-0"
    (folder / "advantages-00000001-000.parquet").rename(folder / "advantages-first.parquet")
    assert read_rollouts(tmp_path).table["step"].tolist() == [1] * 12 + [2] * 12


OVERLAPS = {
    "they take turns": ([1, 2, 4, 6], [3, 5, 7]),
    "the second ends first": ([1, 2, 3, 9], [4, 5, 6]),
    "the first writes once more": ([1, 2, 3, 5], [4, 6, 7]),
}


@pytest.mark.parametrize("times", OVERLAPS.values(), ids=OVERLAPS)
def test_two_runs_at_the_same_time_are_refused_and_each_can_be_read(tmp_path, times):
    first, second = tmp_path / "from-0-0", tmp_path / "from-0-1"
    started(tmp_path, 0.5, [6], start=5, times=[0, 0.5])
    started(tmp_path, 0, [1, 2, 3], times=times[0])
    started(tmp_path, 1, [1, 2], times=times[1])
    started(tmp_path, 0.5, [3], start=2, times=[10, 11])
    with pytest.raises(DataError, match=facts(first, second, "algorithm.verl_ext.dump_dir")):
        read(tmp_path)
    assert read(first) == ({1: [0], 2: [0], 3: [0]}, ())
    assert read(second) == ({1: [1], 2: [1]}, ())


def test_a_dump_of_an_earlier_version_is_refused(tmp_path):
    """Its metadata have no times."""
    started(tmp_path, 0, [1, 2])
    file = tmp_path / "from-0-0/advantages-00000001-000.parquet"
    table = parquet.read_table(file)
    metadata = json.loads(table.schema.metadata[b"verl_ext"])
    for name in ("after_step", "started_at", "written_at"):
        del metadata[name]
    parquet.write_table(table.replace_schema_metadata({"verl_ext": json.dumps(metadata)}), file)
    with pytest.raises(DataError, match=facts(file, "earlier version", "'started_at'")):
        read(tmp_path)
