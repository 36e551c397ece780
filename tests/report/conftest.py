"""Runs and reports that all tests of the folder read; none changes one."""

import pytest

from aggregator.history import open_history
from aggregator.report import write_report
from tests.report import runs


@pytest.fixture(scope="session")
def run_of(tmp_path_factory):
    """Return the directory of a run by the name of its writer, written once."""
    folder, written = tmp_path_factory.mktemp("runs"), {}

    def get(name):
        if name not in written:
            written[name] = getattr(runs, name)(folder / name)
        return written[name]

    return get


@pytest.fixture(scope="session")
def history_of(run_of):
    return lambda name: open_history(run_of(name))


@pytest.fixture(scope="session")
def page_of_run(run_of, tmp_path_factory):
    """Return the report of a run by the name of its writer, written once."""
    folder, written = tmp_path_factory.mktemp("reports"), {}

    def get(name):
        if name not in written:
            written[name] = write_report(run_of(name), folder / f"{name}.html")
        return written[name]

    return get
