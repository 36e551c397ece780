"""What killed writers leave is removed by their successors, and nothing that anybody could still need."""

import os

import pytest

from aggregator.history import FoldingPolicy, HistoryWriter, open_history, verify
from aggregator.history.sweep import sweep_segment
from aggregator.testing.packets import make_step
from telemetry.errors import HistoryDamagedError, HistoryWriteError, RunDirectoryInUseError, WriterFencedError
from telemetry.summary import DEFAULT_DESCRIPTOR
from tests.history.history_processes import packet_of

NO_FOLDING = FoldingPolicy(fan_in=(10**6, 10**6))


def create(path, resume_step=None):
    return HistoryWriter.create(path, {}, DEFAULT_DESCRIPTOR, resume_step, folding=NO_FOLDING)


def commit(writer, *steps):
    for step in steps:
        writer.commit(make_step(packet_of(step)))


def leave(path):
    """Put there what writers that died at the wrong moment leave."""
    left = [
        path / ".unpublished-manifest",
        path / "seg-00000" / ".unpublished-index",
        path / "seg-00000" / "c" / ".unpublished-chunk",
        path / "seg-00000" / "c" / "00000099.arrow",
        path / "seg-00000" / "c" / "L1-00000000-00000063.parquet",
        path / "seg-00000" / "c" / "L1-00000000-00000063.arrow",
    ]
    for file in left:
        file.write_bytes(b"half")
    return left


def test_a_successor_sweeps_what_its_predecessor_left_and_keeps_all_that_is_read_or_foreign(tmp_path):
    commit(create(tmp_path), 1, 2, 3)
    left, foreign = leave(tmp_path), [tmp_path / "seg-00000" / "notes.txt", tmp_path / "seg-00000" / "c" / "x.arrow"]
    for file in foreign:
        file.write_text("mine")
    reader = open_history(tmp_path)
    rows = reader.observations().to_pylist()
    successor = create(tmp_path, resume_step=4)
    assert not [file for file in left if file.exists()]
    assert [file.read_text() for file in foreign] == ["mine", "mine"]
    commit(successor, 4)
    assert reader.observations(steps=range(4)).to_pylist() == rows
    assert verify(tmp_path).num_rows == 0


def test_a_segment_that_somebody_may_still_write_is_never_swept(tmp_path):
    writer = create(tmp_path)
    commit(writer, 1)
    left = leave(tmp_path)
    sweep_segment(tmp_path / "seg-00000")
    assert all(file.exists() for file in left)
    writer.close()
    assert not [file for file in left[1:] if file.exists()]


def test_where_the_index_is_damaged_nothing_is_swept(tmp_path):
    commit(create(tmp_path), 1)
    create(tmp_path, resume_step=2).close()
    left = leave(tmp_path)
    newest = max((tmp_path / "seg-00000").glob("index-*"))
    newest.write_bytes(newest.read_bytes()[:-1] + b"?")
    sweep_segment(tmp_path / "seg-00000")
    assert all(file.exists() for file in left)
    with pytest.raises(HistoryDamagedError):
        create(tmp_path, resume_step=2)


@pytest.mark.parametrize("folder", ["c", ""])
def test_an_overtaken_writer_whose_unpublished_file_was_swept_is_told_that_it_was_overtaken(
    tmp_path, monkeypatch, folder
):
    zombie = create(tmp_path)
    commit(zombie, 1)
    link = os.link

    def overtaken(source, target):
        if os.path.basename(os.path.dirname(source)) == (folder or "seg-00000"):
            monkeypatch.undo()
            commit(create(tmp_path, resume_step=2), 2)
            assert not os.path.exists(source)
        link(source, target)

    monkeypatch.setattr(os, "link", overtaken)
    with pytest.raises(WriterFencedError):
        commit(zombie, 2)
    assert open_history(tmp_path).steps()["segment"].to_pylist() == [0, 1]
    assert verify(tmp_path).num_rows == 0


def test_a_disk_that_fails_is_not_taken_for_a_successor(tmp_path, monkeypatch):
    writer = create(tmp_path)
    commit(writer, 1)
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(FileNotFoundError(2, "No such file")))
    with pytest.raises(HistoryWriteError):
        commit(writer, 2)


def test_a_loser_of_the_race_to_begin_is_told_so_even_if_its_file_was_swept(tmp_path, monkeypatch):
    link, rivals = os.link, []

    def overtaken(source, target):
        if str(target).endswith("manifest.json"):
            monkeypatch.undo()
            commit(create(tmp_path), 1)
            rivals.append(create(tmp_path, resume_step=2))
        link(source, target)

    monkeypatch.setattr(os, "link", overtaken)
    with pytest.raises(RunDirectoryInUseError, match="steps up to 1"):
        create(tmp_path)
    assert rivals
