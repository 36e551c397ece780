"""Where ranks deliver to: near them, and never too many at one actor."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator.ray_actor.placing import ROOT, plan_relays, require_fan_in
from telemetry.errors import ConfigurationError


def test_few_ranks_of_one_node_need_no_relay():
    plan = plan_relays(dict.fromkeys(range(8), "a"), 8)
    assert plan.relays == ()
    assert set(plan.targets.values()) == {ROOT}


def test_ranks_that_span_nodes_meet_on_their_node_first():
    plan = plan_relays({rank: f"node{rank // 4}" for rank in range(8)}, 16)
    assert [(relay.node, relay.target, relay.ranks) for relay in plan.relays] == [
        ("node0", ROOT, (0, 1, 2, 3)),
        ("node1", ROOT, (4, 5, 6, 7)),
    ]


@given(st.lists(st.integers(0, 20), min_size=1, max_size=200), st.integers(2, 9))
def test_no_actor_hears_more_than_the_fan_in_and_every_rank_reaches_the_root_once(nodes, fan_in):
    plan = plan_relays({rank: f"node{node}" for rank, node in enumerate(nodes)}, fan_in)
    relays = {relay.name: relay for relay in plan.relays}
    assert len(relays) == len(plan.relays)
    heard = Counter(plan.targets.values()) + Counter(relay.target for relay in plan.relays)
    assert max(heard.values()) <= fan_in
    for rank in range(len(nodes)):
        target, seen = plan.targets[rank], 0
        while target != ROOT:
            assert rank in relays[target].ranks
            target, seen = relays[target].target, seen + 1
        assert seen < 12
    tops = [relay.ranks for relay in plan.relays if relay.target == ROOT]
    assert sorted(rank for ranks in tops for rank in ranks) == (list(range(len(nodes))) if tops else [])


def test_ten_thousand_ranks_on_nodes_of_eight_are_two_relays_from_the_root():
    plan = plan_relays({rank: f"node{rank // 8}" for rank in range(10_000)}, 64)
    assert Counter(relay.name.split("-")[1] for relay in plan.relays) == {"0": 1250, "1": 20}


def test_a_fan_in_of_one_is_refused():
    with pytest.raises(ConfigurationError):
        require_fan_in(1)
