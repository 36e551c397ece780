"""The catalogue names the rows of merged steps, and grows without forgetting."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

from aggregator.catalogue import Catalogue, MergedStep
from aggregator.merge import merge_packets
from telemetry.packet import Packet
from telemetry.presence import Presence
from telemetry.summary.fields import TOTAL
from telemetry.summary.merge import identity
from tests.packets import make_packet, make_site


def test_a_site_is_new_once():
    catalogue = Catalogue()
    first = MergedStep.resolve(make_packet(0, 1, 1, {"a": [1.0]}), catalogue)
    second = MergedStep.resolve(make_packet(0, 1, 2, {"a": [1.0], "b": [1.0]}), catalogue)
    assert [site.name for site in first.new_sites] == ["a"]
    assert [site.name for site in second.new_sites] == ["b"]
    assert [site.name for site in catalogue] == ["a", "b"]


def test_rows_are_named_in_their_own_order():
    packet = make_packet(0, 1, 1, {name: [1.0] for name in "abcdef"})
    step = MergedStep.resolve(packet, Catalogue())
    assert [site.site_id for site in step.sites] == packet.sites.tolist()


def test_a_conflicting_definition_becomes_a_finding_and_the_first_one_stays():
    catalogue = Catalogue()
    catalogue.add([make_site("a", dtype="bfloat16")])
    step = MergedStep.resolve(make_packet(0, 1, 4, {"a": [1.0]}), catalogue)
    (finding,) = step.packet.findings
    assert (finding["code"], finding["step"]) == ("catalogue_conflict", 4)
    assert "dtype" in finding["message"]
    assert step.sites[0].dtype == "bfloat16"


def _defining(rank, step, **changes):
    packet = make_packet(rank, 4, step, {"a": [1.0] * (rank + 1), "b": [1.0]}, histograms=True)
    return replace(packet, definitions=(make_site("a", **changes), make_site("b")))


@pytest.mark.parametrize(
    "changes", [{"dtype": "bfloat16"}, {"placements": (("dp", "replica"),)}, {"numel": 7}, {"estimated": True}]
)
def test_ranks_that_define_a_site_differently_in_one_step_are_named(changes):
    packets = [_defining(rank, 5, **(changes if rank == 2 else {})) for rank in range(4)]
    step = MergedStep.resolve(merge_packets(packets), Catalogue())
    (finding,) = step.packet.findings
    assert (finding["code"], finding["site"], finding["step"]) == ("catalogue_conflict", "a", 5)
    assert (finding["ranks"], finding["other_ranks"]) == ([2], [0, 1, 3])
    assert "rank 2 against ranks 0, 1, 3" in finding["message"]
    assert next(iter(changes)) in finding["message"]


def test_a_site_in_conflict_has_no_numbers_from_then_on_and_every_other_site_keeps_its_own():
    catalogue = Catalogue()
    alone = MergedStep.resolve(merge_packets([_defining(rank, 1) for rank in (0, 1)]), catalogue)
    both = MergedStep.resolve(
        merge_packets([_defining(0, 2), replace(_defining(1, 2), definitions=()), _defining(3, 2, dtype="int8")]),
        catalogue,
    )
    known = replace(merge_packets([_defining(0, 3), _defining(3, 3)]), definitions=(), defined_by=())
    later = MergedStep.resolve(known, catalogue)
    rows = {name: [site.name for site in both.sites].index(name) for name in "ab"}
    assert alone.packet.ints[rows["a"], TOTAL] == 3
    for step, num_ranks in ((both, 3), (later, 2)):
        packet = step.packet
        assert packet.presence[rows["a"]] == Presence.UNSUPPORTED
        assert packet.ints[rows["a"]].sum() == packet.num_observed[rows["a"]] == 0
        assert "rank 3 against ranks 0, 1" in packet.reasons[packet.reason[rows["a"]]]
        assert packet.num_scheduled[rows["a"]] == num_ranks
        assert packet.hist_sites.tolist() == [make_site("b").site_id]
        assert packet.ints[rows["b"], TOTAL] == num_ranks
    assert len(both.packet.findings) == 1
    assert later.packet.findings == ()


def test_local_shapes_may_differ_and_make_one_definition():
    merged = merge_packets([_defining(rank, 1, shape=(rank,)) for rank in range(4)])
    assert [site.name for site in merged.definitions] == ["a", "b"]
    assert merged.defined_by == ((0, 1, 2, 3), (0, 1, 2, 3))


def test_who_defined_a_site_survives_the_bytes():
    merged = merge_packets([_defining(rank, 1, dtype="int8" if rank else "float64") for rank in range(3)])
    copy = Packet.from_bytes(merged.to_bytes())
    assert (copy.definitions, copy.defined_by) == (merged.definitions, merged.defined_by)
    assert len(copy.definitions) == 3


def test_aliases_of_several_ranks_are_joined():
    catalogue = Catalogue()
    catalogue.add([make_site("a", aliases=("x",)), make_site("a", aliases=("y",))])
    assert next(iter(catalogue)).aliases == ("x", "y")


def test_ranks_that_abstained_or_did_not_come_are_missing_from_the_step():
    packets = [make_packet(0, 3, 1, {"a": [1.0]}), make_packet(1, 3, 1, {"a": [1.0]}).abstaining("over budget")]
    step = MergedStep.resolve(merge_packets(packets), Catalogue(), {2: "lost"})
    assert step.missing == {1: "over budget", 2: "lost"}
    assert step.is_partial


def test_a_site_that_one_rank_left_out_to_keep_a_budget_has_no_numbers_of_the_others():
    whole = [make_packet(rank, 3, 1, {"a": [1.0 + rank], "b": [2.0]}, histograms=True) for rank in range(3)]
    row = whole[1].sites.tolist().index(make_site("a").site_id)
    dropping = _left_out(whole[1], row, "left out to keep budget_ms=1")
    for order in permutations([whole[0], dropping, whole[2]]):
        step = MergedStep.resolve(merge_packets(order), Catalogue())
        assert step.packet.presence[row] == Presence.BUDGET_DROPPED
        assert step.packet.reasons[step.packet.reason[row]] == "left out to keep budget_ms=1"
        assert (step.packet.num_scheduled[row], step.packet.num_observed[row]) == (3, 0)
        assert step.packet.ints[row].tolist() == [0] * step.packet.ints.shape[1]
        assert step.packet.hist_sites.tolist() == [make_site("b").site_id]
        assert step.packet.ints[1 - row, TOTAL] == 3


def test_a_site_that_one_rank_left_out_says_so_whatever_kept_the_others_from_it():
    failed = make_packet(0, 2, 1, {}, absent={"a": "OSError"})
    dropping = _left_out(make_packet(1, 2, 1, {"a": [1.0]}), 0, "left out")
    step = MergedStep.resolve(merge_packets([failed, dropping]), Catalogue())
    assert step.packet.presence.tolist() == [Presence.BUDGET_DROPPED]
    assert step.packet.reasons[step.packet.reason[0]] == "left out"


def _left_out(packet, row: int, reason: str):
    """Return the packet as a rank sends it that did not look at one of its sites."""
    presence, reasons, observed = packet.presence.copy(), packet.reason.copy(), packet.num_observed.copy()
    presence[row], reasons[row], observed[row] = Presence.BUDGET_DROPPED, len(packet.reasons), 0
    ints, floats = packet.ints.copy(), packet.floats.copy()
    ints[row], floats[row] = identity(1)
    counted = packet.hist_sites != packet.sites[row]
    return replace(
        packet,
        presence=presence,
        reason=reasons,
        reasons=(*packet.reasons, reason),
        num_observed=observed,
        num_contributing=observed,
        ints=ints,
        floats=floats,
        hist_sites=packet.hist_sites[counted],
        hist_counts=packet.hist_counts[counted],
    )


def test_a_site_that_its_own_ranks_define_anew_has_drifted_and_is_no_conflict():
    catalogue = Catalogue()
    before, after = make_site("w"), replace(make_site("w"), dtype="bfloat16")
    catalogue.add([before], ranks=(0, 1))
    new, conflicts = catalogue.add([after], ranks=(0, 1))
    assert (new, conflicts) == ((after,), ())
    assert catalogue[after.site_id] == after
    _, conflicts = catalogue.add([before], ranks=(1,))
    assert [finding["code"] for finding in conflicts] == ["catalogue_conflict"]
