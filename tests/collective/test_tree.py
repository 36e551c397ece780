"""The tree spans every world, host by host, and a rank outwaits those below it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator.collective.tree import TreePosition, plan_tree
from aggregator.collective.waits import Waits
from telemetry.errors import ConfigurationError
from telemetry.protocol import Deadlines

HOSTS = st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=60)
FAN_INS = st.integers(2, 20)


def one_host(world_size, fan_in):
    return plan_tree(["host"] * world_size, fan_in)


@given(HOSTS, FAN_INS)
def test_every_rank_is_below_rank_zero_exactly_once(hosts, fan_in):
    root, *_ = plan_tree(hosts, fan_in)
    below = [rank for ranks in root.below.values() for rank in ranks]
    assert sorted([0, *below]) == list(range(len(hosts)))


@given(HOSTS, FAN_INS)
def test_parent_and_children_agree_and_nobody_has_more_links_than_fan_in_and_one(hosts, fan_in):
    tree = plan_tree(hosts, fan_in)
    for position in tree:
        assert len(position.neighbours) <= fan_in + 1
        assert len(position.children) <= fan_in
        assert position.levels == tree[0].height
        for child, ranks in position.below.items():
            assert tree[child].parent == position.rank
            assert tree[child].depth == position.depth + 1
            assert ranks == tuple(sorted({child, *(low for below in tree[child].below.values() for low in below)}))


@given(HOSTS, FAN_INS)
def test_a_host_hangs_by_one_link_whatever_number_of_ranks_each_host_has(hosts, fan_in):
    for position in plan_tree(hosts, fan_in):
        is_leader = position.rank == hosts.index(hosts[position.rank])
        if position.parent is not None:
            assert (hosts[position.parent] != hosts[position.rank]) == is_leader


def test_ranks_of_one_host_meet_before_they_meet_others():
    tree = plan_tree(list("aaabbbbc"), 4)
    assert [position.parent for position in tree] == [None, 0, 0, 0, 3, 3, 4, 0]


def test_on_one_host_the_tree_is_the_heap():
    assert [position.parent for position in one_host(12, 3)] == [None, *((rank - 1) // 3 for rank in range(1, 12))]


def test_ranks_that_alternate_between_hosts_are_still_grouped_by_host():
    tree = plan_tree(list("abababab"), 4)
    assert [position.parent for position in tree] == [None, 0, 0, 1, 0, 1, 2, 3]


@given(HOSTS, FAN_INS)
def test_a_parent_waits_longer_than_its_children_for_a_step_and_at_close(hosts, fan_in):
    deadlines, tree = Deadlines(), plan_tree(hosts, fan_in)
    for position in tree:
        mine = Waits(position, deadlines)
        for child in position.children:
            below = Waits(tree[child], deadlines)
            if below.position.children:
                assert mine.round_s >= below.round_s + mine.grace_s
            assert mine.offers_s > below.offers_s
            assert mine.close_rounds_s > below.close_rounds_s
            assert below.ack_s > mine.round_s


@pytest.mark.parametrize(("num_local", "height"), [(1, 4), (8, 5), (16, 6)])
def test_ten_thousand_ranks_are_a_few_links_deep(num_local, height):
    tree = plan_tree([str(rank // num_local) for rank in range(10_000)], 16)
    assert tree[0].height == height
    assert max(len(position.neighbours) for position in tree) <= 17
    assert Waits(tree[0], Deadlines()).round_s == 300 + 10 * (height - 1)


def test_a_position_survives_the_way_through_the_store():
    for position in plan_tree(list("aaabbc"), 2):
        assert TreePosition.from_wire(position.to_wire()) == position


def test_an_impossible_tree_is_refused():
    for hosts, fan_in in ((["a"], 1), ([], 16)):
        with pytest.raises(ConfigurationError):
            plan_tree(hosts, fan_in)
