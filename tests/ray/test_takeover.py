"""An actor that is started again goes on with its own record: nothing durable is lost, written twice, or stolen."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from aggregator import open_history
from aggregator.history import HistoryWriter
from aggregator.ray_actor import takeover
from aggregator.ray_actor.ledger import Ledger, Mark
from aggregator.ray_actor.window import PendingStep
from aggregator.recorder import Recorder
from telemetry.errors import HistoryNotFoundError, RunDirectoryInUseError, WriterFencedError
from telemetry.summary import DEFAULT_DESCRIPTOR
from tests.collective.worlds import offer
from tests.packets import make_packet


def opened(path, attempt="attempt", job="", **changes):
    """Return the ledger of a new incarnation."""
    ledger = Ledger(Mark("exp1", attempt, job))
    ledger.open(offer(0, 2, to=str(path), **changes), ())
    return ledger


def write(ledger, step, ranks=(0, 1), missing=(), segment=0, resume_step=None):
    """Write a step and wait until it is durable."""
    in_segment = {"segment": segment, "resume_step": resume_step}
    parts = [replace(make_packet(rank, 2, step, {"a": [float(rank)]}), **in_segment) for rank in ranks]
    pending = PendingStep((segment, step), 0.0, parts, missing=dict.fromkeys(missing, "is away"))
    written = ledger.append([pending], [2], 0.0)
    deadline = time.monotonic() + 20
    while not written:
        assert time.monotonic() < deadline, "the step did not become durable"
        time.sleep(0.01)
        written = ledger.settle()
    (found,) = written
    return found


def shown(path):
    return [(row["step"], row["missing_ranks"]) for row in open_history(path).coverage().to_pylist()]


def numbers_of(path):
    return [(s["segment"], s["resume_step"], s["num_commits"]) for s in open_history(path).segments().to_pylist()]


def test_a_new_incarnation_goes_on_in_a_new_segment_behind_a_fence_and_with_all_totals(tmp_path):
    first = opened(tmp_path)
    write(first, 1)
    write(first, 2, ranks=(0,), missing=(1,))
    second = opened(tmp_path)
    assert second.reply == first.reply
    assert second.own.durable == {(0, 1): frozenset(), (0, 2): frozenset({1})}
    write(second, 3)
    with pytest.raises(WriterFencedError):
        write(first, 3)
    report, _ = second.close(10, None, ())
    assert (report.num_committed, report.num_partial, report.missing_ranks) == (3, 1, (1,))
    assert shown(tmp_path) == [(1, []), (2, [1]), (3, [])]
    assert numbers_of(tmp_path) == [(0, None, 2), (1, 3, 1)]


def test_the_segments_that_ranks_begin_and_those_of_restarts_are_kept_apart(tmp_path):
    first = opened(tmp_path)
    for step in (1, 2, 3):
        write(first, step)
    write(first, 2, segment=1, resume_step=2)
    second = opened(tmp_path)
    assert second.reply.segment == 0
    assert second.own.durable.keys() == {(0, 1), (0, 2), (0, 3), (1, 2)}
    write(second, 3, segment=1, resume_step=2)
    write(second, 3, segment=2, resume_step=3)
    third = opened(tmp_path)
    assert third.own.durable.keys() == second.own.durable.keys() | {(1, 3), (2, 3)}
    write(third, 4, segment=2, resume_step=3)
    assert third.close(10, None, ())[0].num_committed == 7
    # Segments: 0, 1 by the ranks, 2 by a restart within 1, 3 by the ranks, 4 by a restart within 3.
    assert numbers_of(tmp_path) == [(0, None, 3), (1, 2, 1), (2, 3, 1), (3, 3, 1), (4, 4, 1)]
    assert shown(tmp_path) == [(1, []), (2, []), (3, []), (4, [])]


def test_an_incarnation_that_wrote_nothing_leaves_no_segment(tmp_path):
    write(opened(tmp_path), 1)
    for _ in range(5):
        opened(tmp_path)
    write(opened(tmp_path), 2)
    assert numbers_of(tmp_path) == [(0, None, 1), (1, 2, 1)]


def test_a_close_without_a_step_seals_what_the_incarnation_before_left_open(tmp_path):
    write(opened(tmp_path), 1)
    report, _ = opened(tmp_path).close(10, None, ())
    assert (report.num_committed, report.failure) == (1, None)
    assert open_history(tmp_path).segments().column("sealed").to_pylist() == [True]


def test_what_the_old_incarnation_commits_while_the_new_one_claims_is_kept_and_not_written_again(tmp_path, monkeypatch):
    old = opened(tmp_path)
    write(old, 1)
    new = opened(tmp_path)
    read, looks = takeover.read_own_record, []

    def look(path, attempt):
        found = read(path, attempt)
        looks.append(found)
        if len(looks) == 1:
            write(old, 2, ranks=(0,), missing=(1,))
        return found

    monkeypatch.setattr(takeover, "read_own_record", look)
    assert write(new, 2).absent == {1}
    with pytest.raises(WriterFencedError):
        write(old, 3)
    write(new, 3)
    assert shown(tmp_path) == [(1, []), (2, [1]), (3, [])]


def test_a_later_attempt_is_never_fenced_by_an_earlier_one_that_is_started_again(tmp_path):
    write(opened(tmp_path, "earlier"), 1)
    asleep = opened(tmp_path, "earlier")
    later = opened(tmp_path, "later", resume_step=2)
    write(later, 2)
    with pytest.raises(WriterFencedError, match="segment 1"):
        write(asleep, 2)
    with pytest.raises(WriterFencedError, match="segment 1"):
        opened(tmp_path, "earlier")
    write(later, 3)
    assert shown(tmp_path) == [(1, []), (2, []), (3, [])]


def test_an_actor_killed_in_the_middle_of_its_first_claim_can_begin_after_all(tmp_path):
    opened(tmp_path)
    (tmp_path / "seg-00000" / "segment.json").unlink()
    second = opened(tmp_path)
    write(second, 1)
    assert shown(tmp_path) == [(1, [])]
    assert open_history(tmp_path).segments().column("segment").to_pylist() == [second.reply.segment]


def test_a_directory_of_somebody_else_is_refused(tmp_path):
    HistoryWriter.create(tmp_path, {}, DEFAULT_DESCRIPTOR)
    with pytest.raises(RunDirectoryInUseError):
        opened(tmp_path)


def test_a_directory_that_the_new_node_does_not_see_is_told(tmp_path):
    recorder = takeover.SuccessorRecorder("attempt", Recorder)
    with pytest.raises(HistoryNotFoundError, match="every node sees"):
        recorder.claim(offer(0, 2, to=str(tmp_path)))


def test_a_job_that_its_launcher_restarts_before_a_checkpoint_begins_anew_from_step_zero(tmp_path):
    first = opened(tmp_path, "first", "cluster/job/experiment")
    for step in (1, 2):
        write(first, step)
    second = opened(tmp_path, "second", "cluster/job/experiment")
    write(second, 1, ranks=(0,), missing=(1,))
    assert shown(tmp_path) == [(1, [1])]
    with pytest.raises(RunDirectoryInUseError):
        opened(tmp_path, "third", "cluster/job/another experiment")


def test_findings_of_all_incarnations_are_in_the_report_once(tmp_path):
    # The second is opened before the first writes, as by a node that was taken for dead.
    ledgers = opened(tmp_path), opened(tmp_path)
    for step, ledger in enumerate(ledgers, start=1):
        ledger.notice({"code": "world_changed", "message": "rank 1 left", "ranks": [1]})
        write(ledger, step)
    (finding,) = [f for f in ledgers[1].close(10, None, ())[0].findings if f["code"] == "world_changed"]
    assert (finding["count"], finding["last_step"]) == (2, 2)
