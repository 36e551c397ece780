"""A rank that dies, hangs, leaves or disagrees is named on all others, and what the others brought is recorded."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as dist

from telemetry.errors import HistoryError, MergeDeadlineError, PacketMalformedError, PeerLostError
from telemetry.protocol import Deadlines
from tests.collective.worlds import IMPATIENT, PATIENT, MemoryRecorder, attach, offer, wait_for_failure, wait_until
from tests.packets import make_packet
from tests.ranks import RankDied, run_ranks


def _packet(rank, world_size, step):
    return make_packet(rank, world_size, step, {"a": [float(rank)]})


def _summary(aggregator, recorder, failure):
    report = aggregator.close()
    steps = [(s.step, s.packet.ranks, sorted(s.missing)) for s in recorder.steps]
    return failure, report, steps


def _told(report):
    """Return a report in a form that compares: exceptions do not."""
    return replace(report, failure=None), str(report.failure)


def _store():
    return dist.distributed_c10d._get_default_store()


def _wait_until_all_have_settled_one_step(aggregator, world_size):
    wait_until(lambda: aggregator._coordinator.num_settled == 1)
    _store().add("settled", 1)
    wait_until(lambda: _store().add("settled", 0) == world_size)


def _rank_is_killed(rank, world_size, victim):
    aggregator, recorder = attach(rank, world_size, PATIENT)
    aggregator.submit(_packet(rank, world_size, 1))
    _wait_until_all_have_settled_one_step(aggregator, world_size)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    aggregator.submit(_packet(rank, world_size, 2))
    failure = wait_for_failure(aggregator)
    assert time.monotonic() - begun < 15
    return _summary(aggregator, recorder, failure)


def test_a_killed_leaf_is_named_on_all_and_the_others_step_is_recorded():
    results = run_ranks(_rank_is_killed, 4, 3, may_die={3})
    assert results[3] == RankDied(-signal.SIGKILL)
    for failure, report, _ in results[:3]:
        assert type(failure) is PeerLostError
        assert set(failure.failures) == {3}
        assert report.missing_ranks == (3,)
        assert (report.num_committed, report.num_partial) == (2, 1)
        assert type(report.failure) is PeerLostError
    assert results[0][2] == [(1, (0, 1, 2, 3), []), (2, (0, 1, 2), [3])]


def test_a_killed_inner_rank_takes_its_subtree_out_of_the_step():
    results = run_ranks(_rank_is_killed, 8, 1, may_die={1})
    cut_off = {3, 4, 7}
    for rank in (0, 2, 5, 6):
        assert set(results[rank][0].failures) == {1} | cut_off, rank
    for rank in (3, 4):
        failure, report, _ = results[rank]
        assert type(failure) is PeerLostError
        assert set(failure.failures) == {1}
        assert report.num_committed == 1
    assert set(results[7][0].failures) == {1}
    assert results[0][2][-1] == (2, (0, 2, 5, 6), [1, 3, 4, 7])


def test_without_rank_zero_all_others_stop_and_say_so():
    results = run_ranks(_rank_is_killed, 4, 0, may_die={0})
    for failure, report, _ in results[1:]:
        assert type(failure) is PeerLostError
        assert set(failure.failures) == {0}
        assert report.failure is not None


def _rank_hangs(rank, world_size, victim):
    aggregator, recorder = attach(rank, world_size, IMPATIENT)
    aggregator.submit(_packet(rank, world_size, 1))
    _wait_until_all_have_settled_one_step(aggregator, world_size)
    if rank == victim:
        _store().wait(["over"], timedelta(seconds=40))
        aggregator.submit(_packet(rank, world_size, 2))
        return _summary(aggregator, recorder, wait_for_failure(aggregator))
    aggregator.submit(_packet(rank, world_size, 2))
    failure = wait_for_failure(aggregator)
    _store().add("stopped", 1)
    wait_until(lambda: _store().add("stopped", 0) == world_size - 1)
    _store().set("over", "1")
    return _summary(aggregator, recorder, failure)


@pytest.mark.parametrize("victim", [0, 1, 7])
def test_a_hung_rank_is_missing_after_the_deadline_and_its_children_are_not(victim):
    results = run_ranks(_rank_hangs, 8, victim)
    others = tuple(rank for rank in range(8) if rank != victim)
    for failure, report, _ in results:
        assert type(failure) is MergeDeadlineError
        assert set(failure.failures) == {victim}
        assert failure.step == 2
        assert "merge_s" in failure.remedy
        assert _told(report) == _told(results[0][1])
    assert results[0][2] == [(1, tuple(range(8)), []), (2, others, [victim])]
    assert results[0][1].missing_ranks == (victim,)


def _rank_is_frozen(rank, world_size, victim):
    aggregator, recorder = attach(rank, world_size, IMPATIENT)
    aggregator.submit(_packet(rank, world_size, 1))
    _wait_until_all_have_settled_one_step(aggregator, world_size)
    if rank == victim:
        _store().set("frozen", "1")
        os.kill(os.getpid(), signal.SIGSTOP)
    _store().wait(["frozen"], timedelta(seconds=20))
    aggregator.submit(_packet(rank, world_size, 2))
    failure = wait_for_failure(aggregator)
    begun = time.monotonic()
    summary = _summary(aggregator, recorder, failure)
    _store().add("closed", 1)
    if rank == (victim + 1) % world_size:
        wait_until(lambda: _store().add("closed", 0) == world_size - 1)
        os.kill(int(_store().get(f"pid/{victim}")), signal.SIGKILL)
    return *summary, time.monotonic() - begun


def _announce_and_freeze(rank, world_size, victim):
    _store().set(f"pid/{rank}", str(os.getpid()))
    return _rank_is_frozen(rank, world_size, victim)


@pytest.mark.parametrize(("victim", "lost"), [(3, {3}), (1, {1, 3})])
def test_a_frozen_process_keeps_nobody_from_going_on_or_closing(victim, lost):
    results = run_ranks(_announce_and_freeze, 4, victim, may_die={victim}, deadline_s=60)
    for rank in {0, 2}:
        failure, report, _, close_s = results[rank]
        assert type(failure) is MergeDeadlineError
        assert set(failure.failures) == lost
        assert report.num_partial == 1
        assert close_s < IMPATIENT.close_s + 5
    if victim == 1:
        # Its child hears no answer, and can blame only what is above it.
        assert set(results[3][0].failures) == {1}


def _rank_leaves_early(rank, world_size, victim):
    aggregator, recorder = attach(rank, world_size, Deadlines(attach_s=10, merge_s=30, close_s=20))
    aggregator.submit(_packet(rank, world_size, 1))
    begun = time.monotonic()
    if rank == victim:
        report = aggregator.close()
        return report.failure, report, [], time.monotonic() - begun
    wait_until(lambda: aggregator._coordinator.num_settled == 1)
    aggregator.submit(_packet(rank, world_size, 2))
    failure = wait_for_failure(aggregator)
    return *_summary(aggregator, recorder, failure), time.monotonic() - begun


@pytest.mark.parametrize("victim", [1, 3])
def test_a_rank_that_closes_early_is_said_to_have_left_and_nobody_waits_for_a_deadline(victim):
    results = run_ranks(_rank_leaves_early, 4, victim)
    for failure, report, _, waited_s in results:
        assert type(failure) is PeerLostError
        assert set(failure.failures) == {victim}
        assert "left before step 2" in failure.failures[victim]
        assert (report.num_committed, report.missing_ranks) == (2, (victim,))
        assert waited_s < 15
    others = tuple(rank for rank in range(4) if rank != victim)
    assert results[0][2] == [(1, (0, 1, 2, 3), []), (2, others, [victim])]


def _steps_differ(rank, world_size):
    aggregator, recorder = attach(rank, world_size, PATIENT)
    aggregator.submit(_packet(rank, world_size, 20 if rank == 3 else 10))
    return _summary(aggregator, recorder, wait_for_failure(aggregator))


def test_ranks_that_log_different_steps_are_refused_by_name():
    results = run_ranks(_steps_differ, 4)
    for failure, report, _ in results:
        assert type(failure) is PacketMalformedError
        assert "ranks [3] brought run run-under-test segment 0 step 20" in str(failure)
        assert "step 10" in str(failure)
        assert report.missing_ranks == (3,)
    assert results[0][2] == [(10, (0, 1, 2), [3])]


def _disk_is_full(rank, world_size):
    from aggregator.collective import CollectiveAggregator

    recorder = MemoryRecorder(fail_at=2)
    aggregator = CollectiveAggregator(lambda: recorder, fan_in=2)
    aggregator.attach(offer(rank, world_size, PATIENT))
    for step in (1, 2, 3):
        aggregator.submit(_packet(rank, world_size, step))
    failure, report, steps = _summary(aggregator, recorder, wait_for_failure(aggregator))
    return failure, report, steps, recorder.is_closed


def test_a_record_that_cannot_be_written_stops_all_ranks_and_keeps_what_was_committed():
    results = run_ranks(_disk_is_full, 4)
    for failure, report, _, _ in results:
        assert type(failure) is HistoryError
        assert "no space left on device" in str(failure)
        assert (report.num_committed, report.last_committed_step) == (1, 1)
        assert type(report.failure) is HistoryError
    assert results[0][2] == [(1, (0, 1, 2, 3), [])]
    assert [closed for *_, closed in results] == [True, False, False, False]


def _undefined_site(rank, world_size):
    aggregator, recorder = attach(rank, world_size, PATIENT)
    aggregator.submit(make_packet(rank, world_size, 1, {"ghost": [1.0]}, define=False))
    return _summary(aggregator, recorder, wait_for_failure(aggregator))


def test_rows_of_a_site_that_nobody_defined_stop_the_merge_by_name():
    for failure, _, steps in run_ranks(_undefined_site, 2):
        assert type(failure) is PacketMalformedError
        assert "no rank has defined" in str(failure)
        assert steps == []


def _ends_without_closing(rank, world_size):
    aggregator, _ = attach(rank, world_size, PATIENT)
    aggregator.submit(_packet(rank, world_size, 1))
    _wait_until_all_have_settled_one_step(aggregator, world_size)
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("rankfold")] != []


def test_a_process_that_never_closes_still_ends_with_exit_code_zero():
    assert run_ranks(_ends_without_closing, 4) == [True] * 4
