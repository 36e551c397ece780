"""The catalogue names the rows of merged steps, and grows without forgetting."""

from __future__ import annotations

from aggregator.catalogue import Catalogue, MergedStep
from aggregator.merge import merge_packets
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


def test_aliases_of_several_ranks_are_joined():
    catalogue = Catalogue()
    catalogue.add([make_site("a", aliases=("x",)), make_site("a", aliases=("y",))])
    assert next(iter(catalogue)).aliases == ("x", "y")


def test_ranks_that_abstained_or_did_not_come_are_missing_from_the_step():
    packets = [make_packet(0, 3, 1, {"a": [1.0]}), make_packet(1, 3, 1, {"a": [1.0]}).abstaining("over budget")]
    step = MergedStep.resolve(merge_packets(packets), Catalogue(), {2: "lost"})
    assert step.missing == {1: "over budget", 2: "lost"}
    assert step.is_partial
