"""Storage that is lost in mid-run costs the record its next steps, never the training, and all ranks are told."""

from __future__ import annotations

import errno
import os
import shutil

import pytest

from aggregator import open_history
from aggregator.history import verify
from telemetry.errors import HistoryWriteError
from tests.collective.worlds import wait_until
from tests.ranks import run_ranks
from tests.watch.jobs import STEPS, train

LAST_KEPT = 2


def _fail_writes(code):
    def refused(*_):
        raise OSError(code, os.strerror(code))

    os.write = refused


LOSSES = {
    "disk full": lambda to: _fail_writes(errno.ENOSPC),
    "permission lost": lambda to: _fail_writes(errno.EACCES),
    "directory removed": shutil.rmtree,
}


def _train(rank, world_size, to, loss):
    plain = train(rank, world_size, None)["losses"]

    def on_step(session):
        coordinator = session._aggregator._coordinator
        if session._num_logged == LAST_KEPT and session.failure is None:
            wait_until(lambda: coordinator.account.num_committed == LAST_KEPT)
            if rank == 0:
                LOSSES[loss](to)

    watched = train(rank, world_size, to, on_step=on_step)
    return plain == watched["losses"], watched["report"]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_training_goes_on_the_report_says_what_was_not_kept_and_the_rest_stays_readable(tmp_path, loss, world_size):
    to = tmp_path / "run"
    for is_same, report in run_ranks(_train, world_size, to, loss):
        assert is_same
        assert report.num_steps == STEPS
        assert isinstance(report.merge.failure, HistoryWriteError)
        assert (report.merge.num_committed, report.merge.last_committed_step) == (LAST_KEPT, LAST_KEPT)
        # What was logged and is not in the record, and what was due after that, is told apart and adds up.
        assert report.num_logged + report.num_unlogged == STEPS
        assert report.num_logged > LAST_KEPT
        assert "cannot be written" in str(report)
    if loss != "directory removed":
        assert open_history(to).steps()["step"].to_pylist() == list(range(1, LAST_KEPT + 1))
        assert verify(to).num_rows == 0
