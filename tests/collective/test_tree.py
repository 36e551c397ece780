"""The tree spans every world, and a rank outwaits those below it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator.collective.tree import TreePosition
from aggregator.collective.waits import Waits
from telemetry.errors import ConfigurationError
from telemetry.protocol import Deadlines

WORLDS = st.tuples(st.integers(1, 80), st.integers(2, 20))


@given(WORLDS)
def test_every_rank_is_below_the_root_exactly_once(world):
    world_size, fan_in = world
    assert sorted(TreePosition(0, world_size, fan_in).subtree()) == list(range(world_size))


@given(WORLDS)
def test_parent_and_children_agree_and_nobody_has_more_than_fan_in(world):
    world_size, fan_in = world
    for rank in range(world_size):
        position = TreePosition(rank, world_size, fan_in)
        assert len(position.children) <= fan_in
        for child in position.children:
            assert TreePosition(child, world_size, fan_in).parent == rank
            assert TreePosition(child, world_size, fan_in).depth == position.depth + 1


@given(WORLDS)
def test_a_parent_waits_longer_than_its_children_for_a_step_and_at_close(world):
    world_size, fan_in = world
    deadlines = Deadlines()
    for rank in range(world_size):
        mine = Waits(TreePosition(rank, world_size, fan_in), deadlines)
        for child in mine.position.children:
            below = Waits(TreePosition(child, world_size, fan_in), deadlines)
            if below.position.children:
                assert mine.round_s >= below.round_s + mine.grace_s
            assert mine.offers_s > below.offers_s
            assert mine.close_rounds_s > below.close_rounds_s
            assert below.ack_s > mine.round_s


def test_ten_thousand_ranks_are_four_links_deep():
    root = TreePosition(0, 10_000, 16)
    assert (root.height, len(root.children)) == (4, 16)
    assert Waits(root, Deadlines()).round_s == 330


def test_an_impossible_position_is_refused():
    for rank, world_size, fan_in in ((0, 1, 1), (1, 1, 16), (-1, 4, 16)):
        with pytest.raises(ConfigurationError):
            TreePosition(rank, world_size, fan_in)
