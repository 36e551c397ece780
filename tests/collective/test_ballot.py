"""The agreement at attach, without any network: it may be counted in any grouping."""

from __future__ import annotations

import json

import pytest

from aggregator.collective.ballot import Ballot
from telemetry.errors import CatalogueConflictError, NothingSelectedError, SketchDescriptorMismatchError
from telemetry.summary import HistogramDescriptor
from tests.collective.worlds import offer
from tests.packets import make_site


def _count(*ballots):
    whole = Ballot()
    for ballot in ballots:
        whole.add(Ballot.from_wire(json.loads(json.dumps(ballot.to_wire()))))
    return whole


def test_equal_offers_agree_whatever_their_local_shapes():
    ballots = [Ballot.of(offer(rank, 3, sites=(make_site("a", shape=(rank,)),))) for rank in range(3)]
    whole = _count(_count(*ballots[:2]), ballots[2])
    assert whole.refusal() is None
    assert [site.name for site, _ in whole.sites] == ["a"]


def test_sites_of_all_ranks_are_united_with_their_aliases():
    one = Ballot.of(offer(0, 2, sites=(make_site("a", aliases=("x",)), make_site("b"))))
    two = Ballot.of(offer(1, 2, sites=(make_site("a", aliases=("y",)), make_site("c"))))
    sites = {site.name: site.aliases for site, _ in _count(one, two).sites}
    assert sites == {"a": ("x", "y"), "b": (), "c": ()}


def test_a_refusal_goes_before_every_difference():
    one = Ballot.of(offer(0, 2, failure=NothingSelectedError("nothing")))
    two = Ballot.of(offer(1, 2, descriptor=HistogramDescriptor(bins_per_octave=1)))
    assert type(_count(one, two).refusal()) is NothingSelectedError


def test_a_difference_in_the_grid_names_who_says_what():
    ballots = [Ballot.of(offer(r, 3, descriptor=HistogramDescriptor(bins_per_octave=8 if r else 4))) for r in range(3)]
    error = _count(*ballots).refusal()
    assert type(error) is SketchDescriptorMismatchError
    assert set(error.failures) == {0, 1, 2}
    assert "ranks 1, 2:" in error.message


def test_a_conflict_keeps_few_witnesses_however_many_ranks():
    ballots = [Ballot.of(offer(r, 100, sites=(make_site("a", numel=r % 2),))) for r in range(100)]
    whole = _count(*ballots)
    error = whole.refusal()
    assert type(error) is CatalogueConflictError
    assert error.site == "a"
    assert len(error.failures) == 16
    assert len(whole.to_wire()["sites"]) == 2


@pytest.mark.parametrize(
    "changes", [{"dtype": "int8"}, {"placements": (("dp", "replica"),)}, {"numel": 3}, {"estimated": True}]
)
def test_any_difference_that_makes_a_sum_meaningless_names_the_site_and_both_sides(changes):
    ballots = [
        Ballot.of(offer(r, 4, sites=(make_site("b"), make_site("a", **(changes if r == 2 else {}))))) for r in range(4)
    ]
    error = _count(_count(*ballots[2:]), _count(*ballots[:2])).refusal()
    assert type(error) is CatalogueConflictError
    assert error.site == "a"
    assert {rank: text for rank, text in error.failures.items() if text == error.failures[2]} == {2: error.failures[2]}
    assert next(iter(changes)) in error.message
