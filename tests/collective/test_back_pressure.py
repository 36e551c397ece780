"""A rank never waits for the merge: beyond the bound it sends its steps without observations, and says so."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

from aggregator.collective import CollectiveAggregator
from telemetry.protocol import Deadlines
from tests.collective.worlds import PATIENT, MemoryRecorder, attach, offer
from tests.packets import make_packet
from tests.ranks import run_ranks


class _StalledRecorder(MemoryRecorder):
    """Takes nothing before it is let go."""

    def __init__(self):
        super().__init__()
        self.go = threading.Event()

    def append(self, step):
        assert self.go.wait(20)
        return super().append(step)


def _too_many_steps(rank, world_size):
    recorder = _StalledRecorder()
    aggregator = CollectiveAggregator(lambda: recorder, fan_in=2, max_in_flight=3)
    aggregator.attach(offer(rank, world_size))
    for step in range(1, 8):
        aggregator.submit(make_packet(rank, world_size, step, {"a": [1.0]}))
    recorder.go.set()
    report = aggregator.close()
    steps = [(s.step, s.packet.num_rows, sorted(s.packet.abstained)) for s in recorder.steps]
    reasons = {text for s in recorder.steps for text in s.missing.values()}
    return report, steps, reasons


def test_steps_beyond_the_bound_are_sent_empty_and_counted():
    results = run_ranks(_too_many_steps, 2)
    report, steps, reasons = results[0]
    assert report.failure is None
    assert [step for step, _, _ in steps] == [1, 2, 3, 4, 5, 6, 7]
    assert [rows for _, rows, _ in steps][:3] == [1, 1, 1]
    # Rank zero is stalled from its first step on; the fourth to seventh find three in flight.
    assert all(0 in abstained for _, _, abstained in steps[3:])
    assert report.num_abstained == sum(len(abstained) for _, _, abstained in steps) >= 4
    assert reasons == {"too many steps in flight: 3 are not merged yet"}
    assert results[1][0] == report


def _mixed_abstention(rank, world_size):
    aggregator, recorder = attach(rank, world_size)
    packet = make_packet(rank, world_size, 1, {"a": [2.0]})
    aggregator.submit(packet.abstaining("over budget") if rank == 1 else packet)
    report = aggregator.close()
    return report, [(s.packet.ints[0, 0], dict(s.missing)) for s in recorder.steps]


def test_a_rank_that_abstains_enters_the_merge_and_is_listed_with_its_reason():
    report, steps = run_ranks(_mixed_abstention, 4)[0]
    assert steps == [(3, {1: "over budget"})]
    assert (report.num_partial, report.num_abstained, report.failure) == (1, 1, None)


def test_submit_costs_the_training_thread_next_to_nothing():
    recorder = _StalledRecorder()
    aggregator = CollectiveAggregator(lambda: recorder, max_in_flight=100)
    aggregator.attach(offer(0, 1))
    packet = make_packet(0, 1, 1, {f"site.{i}": [1.0] for i in range(200)}, histograms=True)
    taken = []
    for step in range(1, 101):
        numbered = replace(packet, step=step)
        begun = time.perf_counter()
        aggregator.submit(numbered)
        taken.append(time.perf_counter() - begun)
    recorder.go.set()
    assert aggregator.close().num_committed == 100
    assert sorted(taken)[50] < 100e-6


def test_submit_after_the_merge_has_stopped_or_before_attach_is_ignored():
    recorder = MemoryRecorder(fail_at=1)
    aggregator = CollectiveAggregator(lambda: recorder)
    aggregator.submit(make_packet(0, 1, 1))
    assert aggregator.close().num_committed == 0
    aggregator.attach(offer(0, 1))
    aggregator.submit(make_packet(0, 1, 1))
    report = aggregator.close()
    aggregator.submit(make_packet(0, 1, 2))
    assert report.failure is aggregator.failure
    assert recorder.steps == []


def test_close_is_bounded_when_the_recorder_hangs():
    recorder = _StalledRecorder()
    aggregator = CollectiveAggregator(lambda: recorder)
    aggregator.attach(offer(0, 1, Deadlines(attach_s=5, merge_s=1, close_s=0.5)))
    aggregator.submit(make_packet(0, 1, 1))
    begun = time.monotonic()
    report = aggregator.close()
    assert time.monotonic() - begun < 10
    assert report.failure.code == "merge_deadline_missed"
    assert aggregator.close() is report
    recorder.go.set()


def test_close_is_idempotent():
    aggregator, _ = attach(0, 1, PATIENT)
    assert aggregator.close() is aggregator.close()
