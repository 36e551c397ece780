"""The merge of packets, as laws: counts do not care about order or split, and every rank is attributed right."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregator.merge import MAX_FINDINGS, merge_facts, merge_packets
from telemetry.errors import PacketMalformedError, SketchDescriptorMismatchError
from telemetry.packet import NO_RANK, StepFacts
from telemetry.presence import Presence
from telemetry.summary import HistogramDescriptor, summarize
from telemetry.summary.fields import ABSMAX, FLOAT_FIELDS, INT_FIELDS
from tests.packets import make_packet, make_site

SITES = ("a", "b", "c")
FLOATS = st.floats(allow_nan=True, allow_infinity=True, width=32)
VALUES = st.dictionaries(st.sampled_from(SITES), st.lists(FLOATS, max_size=6), max_size=3)
WORLDS = st.lists(VALUES, min_size=1, max_size=5)
INTEGER_COLUMNS = (
    *("sites", "ints", "presence", "num_scheduled", "num_observed", "num_contributing"),
    *("absmax_rank", "num_nonfinite_ranks", "first_nonfinite_rank", "hist_sites", "hist_counts"),
)


def _packets(world):
    return [make_packet(r, len(world), 1, values, histograms=True) for r, values in enumerate(world)]


def _assert_same_integers(a, b):
    assert a.ranks == b.ranks
    for column in INTEGER_COLUMNS:
        np.testing.assert_array_equal(getattr(a, column), getattr(b, column), err_msg=column)


def _row(packet, name):
    (where,) = np.flatnonzero(packet.sites == np.uint64(make_site(name).site_id))
    return where


@given(WORLDS, st.randoms(use_true_random=False))
def test_counts_do_not_depend_on_the_order(world, random):
    packets = _packets(world)
    shuffled = random.sample(packets, len(packets))
    _assert_same_integers(merge_packets(packets), merge_packets(shuffled))


@given(WORLDS, st.integers(0, 5))
def test_counts_do_not_depend_on_the_grouping(world, cut):
    packets = _packets(world)
    cut = cut % len(packets)
    groups = [merge_packets(part) for part in (packets[:cut], packets[cut:]) if part]
    _assert_same_integers(merge_packets(packets), merge_packets(groups))


@given(VALUES)
def test_a_packet_without_rows_is_the_identity(values):
    packet = make_packet(0, 2, 1, values, histograms=True)
    merged = merge_packets([packet, make_packet(1, 2, 1)])
    for column in INTEGER_COLUMNS:
        np.testing.assert_array_equal(getattr(merged, column), getattr(packet, column))
    np.testing.assert_array_equal(merged.floats, packet.floats)


@settings(max_examples=50)
@given(st.lists(FLOATS, min_size=1, max_size=40), st.lists(st.integers(0, 3), min_size=40, max_size=40))
def test_any_split_of_the_elements_over_ranks_gives_the_same_counts(elements, owners):
    parts = [[x for x, o in zip(elements, owners, strict=False) if o == rank] for rank in range(4)]
    merged = merge_packets([make_packet(r, 4, 1, {"a": part}, histograms=True) for r, part in enumerate(parts)])
    whole = make_packet(0, 1, 1, {"a": elements}, histograms=True)
    calls = INT_FIELDS.index("calls")
    np.testing.assert_array_equal(np.delete(merged.ints, calls, 1), np.delete(whole.ints, calls, 1))
    np.testing.assert_array_equal(merged.hist_counts, whole.hist_counts)
    for field in ("min", "max", "absmax"):
        column = FLOAT_FIELDS.index(field)
        np.testing.assert_array_equal(merged.floats[:, column], whole.floats[:, column])


@given(WORLDS)
def test_the_rank_of_the_largest_magnitude_is_the_lowest_that_holds_it(world):
    merged = merge_packets(_packets(world))
    for name in {name for values in world for name in values}:
        finite = [[abs(x) for x in values.get(name, []) if np.isfinite(x)] for values in world]
        row, top = _row(merged, name), max((x for part in finite for x in part), default=None)
        expected = NO_RANK if top is None else next(r for r, part in enumerate(finite) if top in part)
        assert merged.absmax_rank[row] == expected
        assert merged.floats[row, ABSMAX] == (top or 0.0)


@given(WORLDS)
def test_ranks_with_values_that_are_not_finite_are_counted_and_the_first_is_named(world):
    merged = merge_packets(_packets(world))
    for name in {name for values in world for name in values}:
        bad = [r for r, values in enumerate(world) if not all(np.isfinite(values.get(name, [])))]
        row = _row(merged, name)
        assert merged.num_nonfinite_ranks[row] == len(bad)
        assert merged.first_nonfinite_rank[row] == (bad[0] if bad else NO_RANK)


@pytest.mark.parametrize("large", [2**24, 2**53])
def test_counts_stay_exact_where_floats_would_not(large):
    a, b = (make_packet(r, 2, 1, {"a": [1.0]}, histograms=True) for r in range(2))
    a.ints[:] *= large
    a = merge_packets([a, make_packet(5, 8, 1)])
    a.hist_counts[:] *= large
    merged = merge_packets([a, b])
    assert merged.ints[0, INT_FIELDS.index("total")] == large + 1
    assert merged.hist_counts.max() == large + 1


def test_reasons_are_renumbered_when_two_lists_meet():
    a = make_packet(0, 2, 1, absent={"a": "no grad", "b": "hook raised"})
    b = make_packet(1, 2, 1, absent={"c": "hook raised"})
    merged = merge_packets([a, b])
    told = {name: merged.reasons[merged.reason[_row(merged, name)]] for name in SITES}
    assert told == {"a": "no grad", "b": "hook raised", "c": "hook raised"}
    assert sorted(merged.reasons) == ["hook raised", "no grad"]


def test_a_failure_of_one_rank_keeps_its_reason_beside_the_numbers_of_another():
    merged = merge_packets([make_packet(0, 2, 1, {"a": [1.0]}), make_packet(1, 2, 1, absent={"a": "hook raised"})])
    assert merged.presence[0] == Presence.OBSERVED
    assert merged.reasons[merged.reason[0]] == "hook raised"
    assert (merged.num_scheduled[0], merged.num_observed[0]) == (2, 1)


def test_rows_without_a_reason_have_none_after_the_merge():
    merged = merge_packets([make_packet(0, 2, 1, {"a": [1.0]}), make_packet(1, 2, 1, absent={"b": "hook raised"})])
    assert merged.reason[_row(merged, "a")] == -1


def test_micro_means_divide_once():
    merged = merge_packets([make_packet(0, 2, 1, {"a": [1.0] * 4}), make_packet(1, 2, 1, {"a": [6.0]})])
    assert merged.floats[0, FLOAT_FIELDS.index("mean")] == 2.0


def test_the_variance_of_large_close_values_survives_a_split_over_ranks():
    values = np.tile([1e8 - 1, 1e8, 1e8 + 1], 1000)
    merged = merge_packets([make_packet(r, 4, 1, {"a": values[r::4]}) for r in range(4)])
    variance = merged.floats[0, FLOAT_FIELDS.index("m2")] / merged.ints[0, INT_FIELDS.index("finite")]
    assert variance == pytest.approx(2 / 3, rel=1e-9)


def test_floats_agree_with_one_summary_of_all_elements():
    rng = np.random.default_rng(3)
    values = rng.normal(5.0, 3.0, 4001)
    merged = merge_packets([make_packet(r, 7, 1, {"a": values[r::7]}) for r in range(7)])
    whole = summarize(torch.as_tensor(values))
    expected = [getattr(whole, field) for field in FLOAT_FIELDS]
    np.testing.assert_allclose(merged.floats[0], expected, rtol=1e-9)


def test_another_step_another_grid_and_a_rank_twice_are_refused_by_name():
    one = make_packet(0, 2, 1, {"a": [1.0]})
    with pytest.raises(PacketMalformedError, match=r"ranks \[1\] brought .* step 2"):
        merge_packets([one, make_packet(1, 2, 2)])
    with pytest.raises(PacketMalformedError, match=r"ranks \[0\] came twice"):
        merge_packets([one, one])
    with pytest.raises(SketchDescriptorMismatchError, match=r"ranks \[1\] on"):
        merge_packets([one, make_packet(1, 2, 1, descriptor=HistogramDescriptor(bins_per_octave=8))])


def test_findings_are_kept_up_to_a_bound():
    finding = {"code": "drift", "message": "x"}
    packets = [replace(make_packet(r, 2), findings=(finding,) * 200) for r in range(2)]
    assert len(merge_packets(packets).findings) == MAX_FINDINGS


def test_facts_of_the_step_merge_by_their_own_rules():
    a = StepFacts(num_applied=1, num_micro_batches=3, grad_scale=2.0, wall_time_s=10.0, step_s=0.1, self_s=0.02)
    b = StepFacts(num_skipped=1, num_micro_batches=1, grad_scale=4.0, wall_time_s=11.0, step_s=0.3, mode="eval")
    merged = merge_facts(a, b, a_first=False)
    assert merged == StepFacts(
        num_applied=1,
        num_skipped=1,
        num_micro_batches=3,
        grad_scale=4.0,
        mode="mixed",
        wall_time_s=11.0,
        step_s=0.3,
        self_s=0.02,
    )
