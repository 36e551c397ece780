"""The root's order of work: claim, append, show what is durable, and a stop that loses nothing committed."""

import os
import shutil

import pytest
import torch

from aggregator import open_history
from aggregator.history import GroupCommit, HistoryWriter, verify
from aggregator.recorder import Recorder
from aggregator.sinks import JsonlSink, MemorySink
from aggregator.testing import make_packet, make_site, make_steps
from telemetry.errors import HistoryWriteError, RunDirectoryInUseError, SinkDuplicateError, WriterFencedError
from telemetry.protocol import AttachOffer
from telemetry.summary import DEFAULT_DESCRIPTOR, summarize

SITE = make_site("w")
PATIENT = GroupCommit(max_steps=100, max_wait_s=3600.0, busy_share=0.0)


def steps(first, last):
    return make_steps(make_packet(s, {SITE: summarize(torch.ones(2))}) for s in range(first, last + 1))


def claimed(path, *sinks, resume_step=None, group=None):
    recorder = Recorder(group)
    offer = AttachOffer(0, 1, str(path), {"x": 1}, DEFAULT_DESCRIPTOR, sinks=sinks, resume_step=resume_step)
    return recorder, recorder.claim(offer)


def test_a_run_is_claimed_committed_shown_and_sealed(tmp_path):
    sink, lines = MemorySink(), JsonlSink(tmp_path / "run" / "metrics.jsonl")
    recorder, reply = claimed(tmp_path / "run", sink, lines)
    for step in steps(1, 3):
        recorder.append(step)
    reports = recorder.close(20.0)
    assert [(r.name, r.state, r.num_emitted) for r in reports] == [("memory", "ok", 3), ("jsonl", "ok", 3)]
    history = open_history(tmp_path / "run")
    assert (history.run_id, reply.segment) == (reply.run_id, 0)
    assert history.segments()["sealed"].to_pylist() == [True]
    assert history.steps()["step"].to_pylist() == [step.step for step in sink.steps] == [1, 2, 3]
    assert sink.run.run_id == reply.run_id


def test_a_resumed_run_tells_its_sinks_where_it_begins(tmp_path):
    recorder, first = claimed(tmp_path)
    for step in steps(1, 3):
        recorder.append(step)
    recorder.close(20.0)
    sink = MemorySink()
    recorder, second = claimed(tmp_path, sink, resume_step=3)
    recorder.close(20.0)
    assert (second.run_id, second.segment, sink.run.resume_step) == (first.run_id, 1, 3)


def test_a_refused_sink_leaves_no_run_behind(tmp_path):
    sink = MemorySink()
    with pytest.raises(SinkDuplicateError):
        claimed(tmp_path / "run", sink, sink)
    assert not (tmp_path / "run").exists()


def test_a_full_disk_is_told_once_and_stays_told_while_the_record_stays_readable(tmp_path, monkeypatch):
    sink = MemorySink()
    recorder, _ = claimed(tmp_path, sink)
    first, second, third = steps(1, 3)
    recorder.append(first).result(timeout=20)

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(HistoryWriteError, match="No space left") as failure:
        recorder.append(second).result(timeout=20)
    assert failure.value.step == 2
    monkeypatch.undo()
    with pytest.raises(HistoryWriteError):
        recorder.append(third)
    assert recorder.close(20.0)[0].num_emitted == 1
    assert open_history(tmp_path).steps()["step"].to_pylist() == [1]


def test_a_directory_that_is_removed_under_the_run_is_a_typed_error(tmp_path):
    recorder, _ = claimed(tmp_path / "run")
    first, second = steps(1, 2)
    recorder.append(first).result(timeout=20)
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(HistoryWriteError, match="No such file"):
        recorder.append(second).result(timeout=20)


def test_a_step_is_shown_once_it_is_durable_and_not_before(tmp_path):
    sink = MemorySink()
    recorder, _ = claimed(tmp_path, sink, group=PATIENT)
    told = [recorder.append(step) for step in steps(1, 3)]
    assert not any(acknowledgement.done() for acknowledgement in told)
    assert open_history(tmp_path).steps().num_rows == 0
    assert sink.steps == []
    recorder.flush()
    assert [acknowledgement.result().step for acknowledgement in told] == [1, 2, 3]
    assert open_history(tmp_path).steps()["step"].to_pylist() == [1, 2, 3]
    assert recorder.close(20.0)[0].num_emitted == 3


def test_a_step_with_a_finding_is_durable_and_shown_at_once_with_those_before(tmp_path):
    sink = MemorySink()
    recorder, _ = claimed(tmp_path, sink, group=PATIENT)
    packet = make_packet(2, {SITE: summarize(torch.tensor([float("nan"), 1.0]))})
    told = [recorder.append(step) for step in make_steps([make_packet(1, {SITE: summarize(torch.ones(2))}), packet])]
    assert [acknowledgement.done() for acknowledgement in told] == [True, True]
    # The finding is one of the built-in checks, and the acknowledged step has it.
    assert [f["code"] for f in told[1].result().packet.findings] == ["nonfinite_values"]
    assert open_history(tmp_path).findings()["step"].to_pylist() == [2]
    recorder.close(20.0)


def test_a_group_that_cannot_be_written_is_shown_to_no_sink_and_fails_each_of_its_steps(tmp_path, monkeypatch):
    sink = MemorySink()
    recorder, _ = claimed(tmp_path, sink, group=PATIENT)
    told = [recorder.append(step) for step in steps(1, 2)]
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(HistoryWriteError):
            recorder.flush()
    assert [type(acknowledgement.exception()) for acknowledgement in told] == [HistoryWriteError] * 2
    with pytest.raises(HistoryWriteError):
        recorder.append(steps(3, 3)[0])
    assert recorder.close(20.0)[0].num_emitted == 0


class SegmentSink(MemorySink):
    """Keeps in one list what it is told, in order."""

    def __init__(self):
        super().__init__()
        self.told = []

    def begin_segment(self, run):
        self.told.append((run.segment, run.resume_step))

    def emit(self, step):
        self.told.append(step.step)


def test_a_new_segment_continues_the_run_in_one_directory_and_supersedes(tmp_path):
    sink, plain = SegmentSink(), MemorySink()
    recorder, reply = claimed(tmp_path, sink, plain, group=PATIENT)
    told = [recorder.append(step) for step in steps(1, 5)]
    assert recorder.begin_segment(4) == reply.segment + 1 == 1
    assert all(acknowledgement.done() for acknowledgement in told)
    for step in steps(4, 6):
        recorder.append(step)
    assert recorder.begin_segment(6) == 2
    recorder.append(steps(6, 6)[0])
    assert [report.num_emitted for report in recorder.close(20.0)] == [9, 9]
    history = open_history(tmp_path)
    segments = history.segments()
    assert segments["segment"].to_pylist() == [0, 1, 2]
    assert segments["resume_step"].to_pylist() == [None, 4, 6]
    assert segments["parent"].to_pylist() == [None, 0, 1]
    assert segments["sealed"].to_pylist() == [True] * 3
    assert history.run_id == reply.run_id
    view = history.steps(include_superseded=True)
    assert list(zip(view["step"].to_pylist(), view["segment"].to_pylist(), strict=True)) == [
        (1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (4, 1), (5, 1), (6, 1), (6, 2)
    ]  # fmt: skip
    assert history.steps()["step"].to_pylist() == [1, 2, 3, 4, 5, 6]
    assert history.series("w", "activation", "mean")["step"].to_pylist() == [1, 2, 3, 4, 5, 6]
    assert sink.told == [1, 2, 3, 4, 5, (1, 4), 4, 5, 6, (2, 6), 6]
    assert verify(tmp_path).num_rows == 0


def test_a_new_segment_forgets_what_the_checks_have_seen(tmp_path):
    recorder, _ = claimed(tmp_path)
    bad = {SITE: summarize(torch.tensor([float("nan"), 1.0]))}

    def codes(step):
        (merged,) = make_steps([make_packet(step, bad)])
        return [finding["code"] for finding in recorder.append(merged).result(timeout=20).packet.findings]

    assert [codes(1), codes(2)] == [["nonfinite_values"], []]
    recorder.begin_segment(2)
    assert codes(2) == ["nonfinite_values"]
    recorder.close(20.0)


def test_a_writer_that_was_overtaken_begins_no_segment_behind_its_successor(tmp_path):
    recorder, _ = claimed(tmp_path)
    recorder.append(steps(1, 1)[0])
    successor, reply = claimed(tmp_path, resume_step=2)
    with pytest.raises(WriterFencedError):
        recorder.begin_segment(1)
    with pytest.raises(WriterFencedError):
        recorder.append(steps(2, 2)[0])
    successor.append(steps(2, 2)[0])
    successor.close(20.0)
    assert open_history(tmp_path).segments()["segment"].to_pylist() == [0, reply.segment]


def test_of_a_process_that_continues_itself_and_another_one_is_refused(tmp_path, monkeypatch):
    recorder, _ = claimed(tmp_path)
    recorder.append(steps(1, 1)[0])
    close = HistoryWriter.close

    def close_and_lose(writer):
        close(writer)
        monkeypatch.undo()
        claimed(tmp_path, resume_step=2)

    monkeypatch.setattr(HistoryWriter, "close", close_and_lose)
    with pytest.raises(RunDirectoryInUseError, match="seg-00001"):
        recorder.begin_segment(1)
    with pytest.raises(RunDirectoryInUseError):
        recorder.append(steps(2, 2)[0])
    assert open_history(tmp_path).segments()["segment"].to_pylist() == [0, 1]


def test_an_abort_keeps_what_was_appended_and_not_yet_durable(tmp_path):
    recorder, _ = claimed(tmp_path, group=PATIENT)
    recorder.append(steps(1, 1)[0])
    recorder.abort()
    assert open_history(tmp_path).steps()["step"].to_pylist() == [1]


def test_an_abort_before_the_first_commit_leaves_the_directory_free(tmp_path):
    recorder, _ = claimed(tmp_path)
    recorder.abort()
    claimed(tmp_path)


def test_an_abort_after_a_commit_keeps_the_record(tmp_path):
    recorder, _ = claimed(tmp_path)
    recorder.append(steps(1, 1)[0])
    recorder.abort()
    assert open_history(tmp_path).steps()["step"].to_pylist() == [1]
    with pytest.raises(RunDirectoryInUseError, match="steps up to 1"):
        claimed(tmp_path)
