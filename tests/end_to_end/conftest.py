import pytest

from tests.end_to_end import run as runs


@pytest.hookimpl(trylast=True)  # after the tests have been selected by their markers
def pytest_collection_modifyitems(items):
    """Put the longest tests first, so that processes which share the tests end together.

    pytest-xdist gives each process two tests at the start, so the shortest test comes second.
    """

    def runs_of(item):
        mark = item.get_closest_marker("runs")
        return mark.args[0] if mark else 1

    items.sort(key=runs_of, reverse=True)
    if len(items) > 2:
        shortest = items.pop()
        items.insert(1, shortest)


@pytest.fixture
def start(tiny, tmp_path):
    """Return a function that starts a run. After the test, no process of the runs may be left."""
    started = []

    def start_run(name, *overrides, **settings):
        run = runs.start(tmp_path / name, tiny, *overrides, **settings)
        started.append(run)
        return run

    yield start_run
    remaining_processes = []
    for run in started:
        if run.process.poll() is None:
            run.kill()
        remaining_processes += runs.end_all(run.mark)
        run.clear()
    assert remaining_processes == []
