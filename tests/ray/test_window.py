"""What a packet is when it comes, and when a step is due: laws of the window, on a clock of the tests' own."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from aggregator.merge import merge_packets
from aggregator.ray_actor.membership import Membership
from aggregator.ray_actor.window import Arrival, Window
from tests.packets import make_packet

WAIT_S = 10.0


def window(world_size=3, **options):
    return Window(Membership(range(world_size)), WAIT_S, **options)


def add(window, rank, step, now=0.0, previous=None, ack=None):
    before = None if previous is None else (0, previous)
    return window.add(make_packet(rank, 8, step, {"a": [1.0]}), before, ack, now)


def due(window, now=0.0):
    return [(step.key[1], sorted(step.ranks), sorted(step.missing)) for step in window.pop_due(now)]


def test_a_step_is_due_when_all_have_brought_it_and_its_acks_wait_until_it_is_durable():
    w = window()
    assert [add(w, rank, 1, ack=rank) for rank in (2, 0, 1)] == [Arrival.NEW] * 3
    assert due(w) == [(1, [0, 1, 2], [])]
    assert w.settle((0, 1), ()) == [2, 0, 1]


def test_a_packet_that_comes_again_is_counted_once_before_while_and_after_it_is_written():
    w = window(2)
    add(w, 0, 1)
    assert add(w, 0, 1, ack="again") is Arrival.REPEATED
    add(w, 1, 1)
    assert due(w) == [(1, [0, 1], [])]
    assert add(w, 1, 1, ack="while it is written") is Arrival.REPEATED
    assert "while it is written" in w.settle((0, 1), ())
    assert add(w, 1, 1) is Arrival.DURABLE
    assert w.num_repeated == 3


def test_at_the_deadline_a_step_goes_without_the_ranks_that_are_missing_and_later_ones_do_not_wait_for_them():
    w = window()
    add(w, 0, 1, now=0)
    add(w, 2, 1, now=1)
    assert w.next_deadline() == WAIT_S
    assert due(w, WAIT_S - 0.1) == []
    assert due(w, WAIT_S) == [(1, [0, 2], [1])]
    for rank in (0, 2):
        add(w, rank, 2, now=11)
    assert due(w, 11) == [(2, [0, 2], [1])]


def test_a_rank_that_was_silent_is_waited_for_again_once_it_is_heard_of():
    w = window(2)
    add(w, 0, 1)
    assert due(w, WAIT_S) == [(1, [0], [1])]
    assert add(w, 1, 2, now=11) is Arrival.NEW
    assert due(w, 11) == []
    add(w, 0, 2, now=12)
    add(w, 0, 3, now=12)
    assert due(w, 12) == [(2, [0, 1], [])]
    assert due(w, 13) == []


def test_a_packet_after_its_step_was_handed_on_is_late_and_one_before_is_folded_in():
    w = window(3)
    for step in (1, 2):
        add(w, 0, step)
        add(w, 1, step)
    assert add(w, 2, 2, now=WAIT_S - 1) is Arrival.NEW
    assert due(w, WAIT_S) == [(1, [0, 1], [2]), (2, [0, 1, 2], [])]
    w.settle((0, 1), {2})
    w.settle((0, 2), ())
    assert add(w, 2, 1, now=11) is Arrival.LATE
    assert w.num_late == 1


def test_a_step_that_is_known_to_be_under_way_is_not_overtaken():
    w = window(2)
    add(w, 0, 2, previous=1)
    add(w, 1, 2, previous=1)
    assert due(w) == []
    add(w, 0, 1)
    add(w, 1, 1)
    assert due(w) == [(1, [0, 1], []), (2, [0, 1], [])]


def test_a_step_that_was_announced_and_never_came_holds_up_the_others_for_one_deadline_and_silences_nobody():
    w = window(2)
    add(w, 0, 2, previous=1)
    add(w, 1, 2, previous=1)
    assert due(w, WAIT_S) == [(2, [0, 1], [])]
    add(w, 0, 3, now=11)
    assert due(w, 11) == []


def test_merged_packets_replace_what_they_contain_and_are_sent_back_where_they_cross():
    w = window(4)
    part = {rank: make_packet(rank, 4, 1, {"a": [1.0]}) for rank in range(4)}
    w.add(part[1], None, "1", 0.0)
    assert w.add(merge_packets([part[0], part[1]]), None, "01", 0.0) is Arrival.NEW
    assert w.add(merge_packets([part[1], part[2]]), None, "12", 0.0) is Arrival.CROSSING
    assert w.add(merge_packets([part[2], part[3]]), None, "23", 0.0) is Arrival.NEW
    ((step),) = w.pop_due(0.0)
    assert [p.ranks for p in step.parts] == [(0, 1), (2, 3)]
    assert w.settle((0, 1), ()) == ["1", "01", "23"]


def test_ranks_leave_and_join_at_a_step_boundary():
    members = Membership(range(2))
    w = Window(members, WAIT_S)
    for rank in (0, 1):
        add(w, rank, 1)
    members.leave(1, (0, 1))
    add(w, 0, 2)
    assert due(w) == [(1, [0, 1], []), (2, [0], [])]
    members.join(5, after=w.newest)
    add(w, 0, 3)
    assert due(w) == []
    add(w, 5, 3)
    assert due(w) == [(3, [0, 5], [])]


def test_a_step_that_is_run_again_in_a_later_segment_is_another_step_and_comes_after_all_of_the_earlier_one():
    w = window(2)
    for rank in (0, 1):
        again = replace(make_packet(rank, 2, 3, {"a": [1.0]}), segment=1)
        assert w.add(again, (0, 5), None, 0.0) is Arrival.NEW
    assert w.pop_due(0.0) == []
    for rank in (0, 1):
        add(w, rank, 5)
    assert [step.key for step in w.pop_due(0.0)] == [(0, 5), (1, 3)]
    w.settle((1, 3), ())
    assert add(w, 0, 3) is Arrival.LATE
    assert w.add(again, None, None, 0.0) is Arrival.DURABLE


def test_who_waits_is_told_when_nothing_more_is_written():
    w = window(2)
    add(w, 0, 1, ack="pending")
    add(w, 0, 2, ack="too")
    assert w.drop_all() == ["pending", "too"]
    assert w.num_pending == 0


@pytest.mark.parametrize("seed", range(200))
def test_over_any_network_and_any_restarts_each_packet_is_in_the_record_once(seed):
    """Packets are delayed, repeated and reordered, and the window is lost now and then with all that it held."""
    rng = random.Random(seed)
    world_size, steps = rng.choice([1, 2, 4]), list(range(1, rng.choice([3, 8])))
    record: dict[int, list[int]] = {}
    unanswered = {rank: list(steps) for rank in range(world_size)}
    w = Window(Membership(range(world_size)), float("inf"))
    # (rank, step) under way; a sender that has no answer sends everything again.
    network: list[tuple[int, int]] = []
    for _ in range(10_000):
        if not any(unanswered.values()):
            break
        if rng.random() < 0.03:
            w = Window(Membership(range(world_size)), float("inf"), {(0, s): frozenset() for s in record})
            network = []
        if not network:
            network = [(rank, step) for rank in range(world_size) for step in unanswered[rank]]
        rank, step = network.pop(rng.randrange(len(network)))
        if rng.random() < 0.2:
            network.append((rank, step))
        arrival = add(w, rank, step, previous=step - 1 if step > 1 else None, ack=(rank, step))
        assert arrival is not Arrival.LATE
        if arrival is Arrival.DURABLE and step in unanswered[rank]:
            unanswered[rank].remove(step)
        for ready in w.pop_due(0.0):
            written = ready.key[1]
            assert all(written > earlier for earlier in record)
            record[written] = sorted(r for part in ready.parts for r in part.ranks)
            if rng.random() < 0.9:  # else it is killed after the write and before the answers
                for of_rank, answered in w.settle(ready.key, ()):
                    if answered in unanswered[of_rank]:
                        unanswered[of_rank].remove(answered)
            else:
                w.settle(ready.key, ())
    assert record == {step: list(range(world_size)) for step in steps}
