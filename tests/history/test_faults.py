"""Whatever the file system does in mid-run, it is said, and what was committed stays readable."""

import errno
import os
import shutil

import pytest

from aggregator.history import FoldingPolicy, GroupCommit, HistoryWriter, open_history, verify
from aggregator.testing.packets import make_step
from telemetry.errors import HistoryWriteError
from telemetry.summary import DEFAULT_DESCRIPTOR
from tests.history.history_processes import packet_of

FOLDING = FoldingPolicy((4, 2))


def create(path, resume_step=None):
    return HistoryWriter.create(
        path, {}, DEFAULT_DESCRIPTOR, resume_step, folding=FOLDING, group=GroupCommit(3, 60.0, 0.0)
    )


def commit(writer, *steps):
    for step in steps:
        writer.commit(make_step(packet_of(step)))
        assert writer.wait_folded(50)


def failing(code, after):
    """A write that fails with ``code`` from its ``after``-th call on."""
    calls, write = [], os.write

    def wrapped(descriptor, data):
        calls.append(1)
        if len(calls) > after:
            raise OSError(code, os.strerror(code))
        return write(descriptor, data)

    return wrapped


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("after", [0, 1])
def test_a_disk_that_fails_in_mid_run_is_told_once_and_the_run_can_be_continued(tmp_path, monkeypatch, code, after):
    writer = create(tmp_path)
    commit(writer, *range(6))
    waiting = writer.append(make_step(packet_of(6)))
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", failing(code, after))
        with pytest.raises(HistoryWriteError, match=os.strerror(code)) as failure:
            writer.commit(make_step(packet_of(7)))
        assert failure.value.step == 6
    assert isinstance(waiting.exception(), HistoryWriteError)
    with pytest.raises(HistoryWriteError):
        writer.commit(make_step(packet_of(8)))
    writer.close()
    assert open_history(tmp_path).steps()["step"].to_pylist() == list(range(6))
    commit(create(tmp_path, resume_step=6), 6, 7)
    assert open_history(tmp_path).steps()["step"].to_pylist() == list(range(8))
    assert verify(tmp_path).num_rows == 0


def test_a_directory_that_is_removed_in_mid_run_is_told_and_nothing_hangs(tmp_path):
    writer = create(tmp_path / "run")
    commit(writer, 1, 2)
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(HistoryWriteError, match="No such file"):
        writer.commit(make_step(packet_of(3)))
    writer.close()
    writer.abandon()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_permission_that_is_lost_in_mid_run_is_told(tmp_path):
    writer = create(tmp_path)
    commit(writer, 1, 2)
    chunks = tmp_path / "seg-00000" / "c"
    chunks.chmod(0o500)
    with pytest.raises(HistoryWriteError, match="Permission denied"):
        writer.commit(make_step(packet_of(3)))
    chunks.chmod(0o700)
    assert open_history(tmp_path).steps()["step"].to_pylist() == [1, 2]


def test_a_disk_that_fills_while_folding_costs_no_step(tmp_path, monkeypatch):
    writer = create(tmp_path)
    commit(writer, 0, 1, 2)
    real = os.link

    def refused(source, target):
        if "L1-" in str(target):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "link", refused)
    commit(writer, 3, 4, 5)
    writer.close()
    history = open_history(tmp_path)
    assert history.steps()["step"].to_pylist() == list(range(6))
    assert history.findings()["code"].to_pylist() == ["folding_failed"]
