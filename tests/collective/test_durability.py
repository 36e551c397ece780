"""A step is merged before it is durable: merging goes on, and no rank is told more than what is in the record."""

from __future__ import annotations

from aggregator.collective import CollectiveAggregator
from tests.collective.worlds import PATIENT, MemoryRecorder, offer, wait_for_failure, wait_until
from tests.packets import make_packet
from tests.ranks import run_ranks

NUM_STEPS = 7
MAX_IN_FLIGHT = 3


class _WaitingRecorder(MemoryRecorder):
    """Makes nothing durable before it is flushed."""

    def __init__(self, **failures):
        super().__init__(**failures)
        self.defer = lambda write: None


def _attached(rank, world_size, recorder):
    aggregator = CollectiveAggregator(lambda: recorder, fan_in=2, max_in_flight=MAX_IN_FLIGHT)
    aggregator.attach(offer(rank, world_size, PATIENT))
    return aggregator


def _merge(aggregator, rank, world_size, steps):
    coordinator = aggregator._coordinator
    for step in steps:
        wait_until(lambda: aggregator._num_submitted - coordinator.num_settled < MAX_IN_FLIGHT)
        aggregator.submit(make_packet(rank, world_size, step, {"a": [1.0]}))
    wait_until(lambda: coordinator.num_settled == aggregator._num_submitted)


def _merge_more_than_may_be_in_flight(rank, world_size):
    import torch.distributed as dist

    recorder = _WaitingRecorder()
    aggregator = _attached(rank, world_size, recorder)
    _merge(aggregator, rank, world_size, range(1, NUM_STEPS + 1))
    told_before = aggregator._coordinator.account.num_committed
    dist.barrier()
    if rank == 0:
        recorder.flush()
    # No further step brings the news: what is durable is told by itself.
    wait_until(lambda: aggregator._coordinator.account.num_committed == NUM_STEPS)
    return told_before, aggregator.close(), [sorted(s.packet.abstained) for s in recorder.steps]


def test_steps_that_are_not_durable_hold_up_no_rank_and_are_not_said_to_be_committed():
    results = run_ranks(_merge_more_than_may_be_in_flight, 4)
    assert [told for told, _, _ in results] == [0] * 4
    assert {(report.num_committed, report.failure) for _, report, _ in results} == {(NUM_STEPS, None)}
    assert results[0][2] == [[]] * NUM_STEPS


def _fail_late(rank, world_size):
    import torch.distributed as dist

    recorder = _WaitingRecorder(fail_at=3)
    aggregator = _attached(rank, world_size, recorder)
    _merge(aggregator, rank, world_size, range(1, 5))
    assert aggregator.failure is None
    dist.barrier()
    if rank == 0:
        recorder.flush()
    failure = wait_for_failure(aggregator)
    return failure, aggregator.close(), [s.step for s in recorder.steps]


def test_a_failure_after_the_merge_stops_all_ranks_and_counts_only_what_is_durable():
    results = run_ranks(_fail_late, 4)
    for failure, report, _ in results:
        assert failure.code == "history_error"
        assert (report.num_committed, report.last_committed_step) == (2, 2)
        assert report.failure.code == "history_error"
    assert results[0][2] == [1, 2]


def _lose_a_rank(rank, world_size):
    import torch.distributed as dist

    recorder = _WaitingRecorder()
    aggregator = _attached(rank, world_size, recorder)
    _merge(aggregator, rank, world_size, range(1, 3))
    dist.barrier()
    if rank == 1:
        report = aggregator.close()
        return None, report, []
    aggregator.submit(make_packet(rank, world_size, 3, {"a": [1.0]}))
    failure = wait_for_failure(aggregator)
    durable = [s.step for s in recorder.steps]
    return failure, aggregator.close(), durable


def test_what_is_pending_becomes_durable_when_merging_stops_and_not_only_at_the_close():
    results = run_ranks(_lose_a_rank, 2)
    failure, report, durable = results[0]
    assert failure.code == "peer_lost"
    assert durable == [1, 2, 3]
    assert report.num_committed == 3


def test_the_recorder_is_told_to_guard_the_end_of_the_process_where_it_writes():
    recorder = MemoryRecorder()
    aggregator = _attached(0, 1, recorder)
    assert recorder.is_guarded
    aggregator.close()
