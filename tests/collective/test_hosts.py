"""Ranks of one host meet first, whatever a launcher says about local ranks."""

from __future__ import annotations

import os

import numpy as np

from aggregator.collective import CollectiveAggregator
from aggregator.merge import merge_packets
from telemetry.summary.fields import TOTAL
from tests.collective.worlds import MemoryRecorder, offer
from tests.packets import make_packet
from tests.ranks import run_ranks

FAN_IN = 4
# Three hosts of three, four and one ranks, in an order that no launcher would give.
HOSTS = ("a", "b", "a", "b", "c", "b", "a", "b")
PARENTS = [None, 0, 0, 1, 0, 1, 0, 3]


def _merge_on_hosts(rank, world_size, hosts):
    os.environ.update(LOCAL_WORLD_SIZE="8", LOCAL_RANK=str(rank))
    recorder = MemoryRecorder()
    host = None if hosts is None else hosts[rank]
    aggregator = CollectiveAggregator(lambda: recorder, fan_in=FAN_IN, host=host)
    aggregator.attach(offer(rank, world_size))
    aggregator.submit(_packet(rank, world_size))
    position = aggregator._coordinator._position
    num_links = len(aggregator._coordinator._neighbours._links)
    report = aggregator.close()
    return position.parent, num_links, report, [step.packet for step in recorder.steps]


def _packet(rank, world_size):
    return make_packet(rank, world_size, 1, {"a": np.random.default_rng(rank).normal(size=9), f"only.{rank}": [1.0]})


def test_ranks_of_one_host_meet_first_and_the_record_is_that_of_all():
    results = run_ranks(_merge_on_hosts, 8, HOSTS)
    assert [parent for parent, *_ in results] == PARENTS
    assert all(num_links <= FAN_IN + 1 for _, num_links, *_ in results)
    assert all(report == results[0][2] for _, _, report, _ in results)
    (packet,) = results[0][3]
    whole = merge_packets([_packet(rank, 8) for rank in range(8)])
    assert packet.ranks == tuple(range(8))
    np.testing.assert_array_equal(packet.ints, whole.ints)
    assert packet.ints[:, TOTAL].sum() == 8 * 9 + 8


def test_processes_of_one_machine_find_that_they_share_it():
    results = run_ranks(_merge_on_hosts, 3, None)
    assert [parent for parent, *_ in results] == [None, 0, 0]
    assert results[0][2].failure is None
