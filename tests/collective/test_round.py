"""What a subtree makes of what its ranks brought, without any network."""

from __future__ import annotations

from aggregator.collective.round import Absent, Brought, Closed, merge_round
from aggregator.collective.tree import plan_tree
from telemetry.errors import HistoryError, MergeDeadlineError, PacketMalformedError, PeerLostError
from tests.packets import make_packet

# Rank 1 of seven at fan-in 2: children 3 and 4, none of which has any.
ROOT, POSITION, *_ = plan_tree(["host"] * 7, 2)
LATE = Absent("brought nothing", MergeDeadlineError("late"))
LOST = Absent("lost", PeerLostError("lost"))


def _brought(rank, step=1, **fields):
    return Brought(make_packet(rank, 7, step, {"a": [float(rank)]}), **fields)


def test_a_complete_round_has_nothing_missing():
    outcome = merge_round(POSITION, {4: _brought(4), 1: _brought(1), 3: _brought(3)})
    assert isinstance(outcome, Brought)
    assert (outcome.packet.ranks, outcome.missing, outcome.error) == ((1, 3, 4), {}, None)


def test_the_order_in_which_contributions_are_listed_does_not_matter():
    parts = {rank: _brought(rank) for rank in (1, 3, 4)}
    forward, backward = merge_round(POSITION, parts), merge_round(POSITION, dict(reversed(parts.items())))
    assert forward.packet.to_bytes() == backward.packet.to_bytes()


def test_an_absent_child_takes_its_whole_subtree_along():
    outcome = merge_round(ROOT, {0: _brought(0), 1: LOST, 2: _brought(2)})
    assert set(outcome.missing) == {1, 3, 4}
    assert type(outcome.error) is PeerLostError
    assert set(outcome.error.failures) == {1, 3, 4}


def test_an_absent_rank_leaves_its_children_in():
    outcome = merge_round(POSITION, {1: LATE, 3: _brought(3), 4: _brought(4)})
    assert outcome.packet.ranks == (3, 4)
    assert outcome.missing == {1: "brought nothing"}


def test_one_late_rank_makes_the_error_a_deadline():
    outcome = merge_round(POSITION, {1: _brought(1), 3: LOST, 4: LATE})
    assert type(outcome.error) is MergeDeadlineError
    assert outcome.error.failures == {3: "lost", 4: "brought nothing"}
    assert outcome.error.step == 1


def test_what_is_missing_further_below_is_named_in_the_error_above():
    below = _brought(1, missing={3: "lost"}, error=PeerLostError("rank 3", failures={3: "lost"}))
    outcome = merge_round(ROOT, {0: _brought(0), 1: below, 2: LATE})
    assert set(outcome.missing) == {2, 3, 5, 6}
    assert set(outcome.error.failures) == {2, 3, 5, 6}


def test_a_cause_other_than_absence_is_what_is_reported():
    broken = Absent("failed", HistoryError("disk full"))
    outcome = merge_round(POSITION, {1: _brought(1), 3: LATE, 4: broken})
    assert type(outcome.error) is HistoryError


def test_a_child_that_closed_has_left_before_the_step():
    outcome = merge_round(POSITION, {1: _brought(1, 5), 3: Closed(), 4: _brought(4, 5)})
    assert outcome.packet.ranks == (1, 4)
    assert outcome.missing == {3: "left before step 5: it had closed its session"}


def test_the_step_of_the_rank_itself_counts_and_another_is_refused_by_name():
    outcome = merge_round(POSITION, {1: _brought(1, 10), 3: _brought(3, 20), 4: _brought(4, 10)})
    assert outcome.packet.ranks == (1, 4)
    assert type(outcome.error) is PacketMalformedError
    assert "ranks [3] brought" in outcome.error.message
    assert outcome.error.failures == {3: "brought run run-under-test segment 0 step 20"}


def test_when_all_that_are_left_have_closed_the_round_is_the_close():
    assert merge_round(POSITION, {1: Closed(), 3: Closed(), 4: Closed()}) == Closed()
    outcome = merge_round(POSITION, {1: Closed(), 3: LOST, 4: Closed()})
    assert isinstance(outcome, Closed)
    assert outcome.missing == {3: "lost"}
    assert "missing at the close" in outcome.error.message


def test_outcomes_survive_their_frames():
    brought = _brought(1, missing={3: "lost"}, error=PeerLostError("rank 3"))
    copy = Brought.from_frame(brought.to_frame(), came_at=1.5)
    assert copy.packet.to_bytes() == brought.packet.to_bytes()
    assert (copy.missing, str(copy.error)) == (brought.missing, str(brought.error))
    assert Closed.from_frame(Closed().to_frame()) == Closed()
