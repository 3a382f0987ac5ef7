import pytest

from tests.end_to_end import run as runs


@pytest.hookimpl(trylast=True)  # after the tests that the markers leave out
def pytest_collection_modifyitems(items):
    """The longest first of all tests of the session, so that processes which share them end together.

    pytest-xdist gives each process two tests at the start, so the shortest comes second.
    """

    def runs_of(item):
        mark = item.get_closest_marker("runs")
        return mark.args[0] if mark else 1

    items.sort(key=runs_of, reverse=True)
    if len(items) > 2:
        items.insert(1, items.pop())


@pytest.fixture
def start(tiny, tmp_path):
    """Starts runs, and fails the test where one leaves processes behind."""
    started = []

    def begin(name, *overrides, **settings):
        started.append(runs.start(tmp_path / name, tiny, *overrides, **settings))
        return started[-1]

    yield begin
    left = []
    for run in started:
        if run.process.poll() is None:
            run.kill()
        left += runs.end_all(run.mark)
        run.clear()
    assert left == []
