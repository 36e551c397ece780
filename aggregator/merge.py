"""Packets of several ranks become one: where ranks meet.

The fold is over the packets in the order given, so callers fix the order and get the same bits each time. Rows pair by
site id; a rank without a site simply has no row for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from itertools import islice, pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from aggregator.checks import MAX_FINDINGS
from aggregator.definitions import defined_sites, join_definitions
from telemetry.errors import PacketMalformedError, SketchDescriptorMismatchError
from telemetry.packet import NO_RANK, Packet, StepFacts
from telemetry.presence import Presence
from telemetry.replicas import MAX_NAMED_RANKS, ReplicaTable
from telemetry.summary.fields import ABSMAX
from telemetry.summary.merge import identity, merge_packed

__all__ = ["MAX_FINDINGS", "merge_facts", "merge_packets"]


def merge_packets(packets: Sequence[Packet]) -> Packet:
    """Merge packets of one step, each of other ranks, into one.

    Args:
        packets: at least one; their order is the order of float additions.

    Returns:
        A packet of all their ranks. Counts are exact and do not depend on the order.

    Raises:
        SketchDescriptorMismatchError: two packets use different grids.
        PacketMalformedError: two packets belong to different steps, or hold the same rank.
    """
    first = packets[0]
    if len(packets) == 1:
        return first
    ranks = _require_one_step(packets)
    sites, reasons = _union([packet.sites for packet in packets]), _join_reasons(packets)
    rows = reduce(_merge_rows, (_Rows.of(packet, sites, reasons) for packet in packets))
    hist_sites, hist_counts = _merge_histograms(packets)
    defined = join_definitions(defined_sites(packet) for packet in packets)
    return Packet(
        run_id=first.run_id,
        segment=first.segment,
        resume_step=first.resume_step,
        step=first.step,
        world_size=first.world_size,
        ranks=ranks,
        descriptor=first.descriptor,
        sites=sites,
        hist_sites=hist_sites,
        hist_counts=hist_counts,
        facts=_merge_all_facts(packets),
        abstained={rank: reason for packet in packets for rank, reason in packet.abstained.items()},
        definitions=tuple(site for site, _ in defined),
        defined_by=tuple(ranks for _, ranks in defined),
        reasons=reasons,
        findings=tuple(islice((finding for packet in packets for finding in packet.findings), MAX_FINDINGS)),
        replicas=reduce(ReplicaTable.merge, (packet.replicas for packet in packets)),
        **vars(rows),
    )


def _require_one_step(packets: Sequence[Packet]) -> tuple[int, ...]:
    """Return the ranks of all packets, ascending."""
    first = packets[0]
    for other in packets[1:]:
        if (first.run_id, first.segment, first.step) != (other.run_id, other.segment, other.step):
            raise PacketMalformedError(
                f"ranks {list(other.ranks)} brought run {other.run_id} segment {other.segment} step {other.step}, "
                f"ranks {list(first.ranks)} run {first.run_id} segment {first.segment} step {first.step}",
                step=first.step,
                remedy="every rank must log the same steps: open session.step with the same number on all of them",
            )
        if first.descriptor != other.descriptor:
            raise SketchDescriptorMismatchError(
                f"ranks {list(first.ranks)} count on {first.descriptor}, ranks {list(other.ranks)} on "
                f"{other.descriptor}",
                step=first.step,
            )
    ranks = sorted(rank for packet in packets for rank in packet.ranks)
    twice = sorted({a for a, b in pairwise(ranks) if a == b})
    if twice:
        raise PacketMalformedError(f"ranks {twice} came twice", step=first.step, rank=twice[0])
    return tuple(ranks)


def _union(arrays: Sequence[NDArray[np.uint64]]) -> NDArray[np.uint64]:
    """Return the ids of all arrays, ascending; the first array itself where all are equal, as in most steps."""
    if all(np.array_equal(arrays[0], other) for other in arrays[1:]):
        return arrays[0]
    return np.unique(np.concatenate(arrays))


@dataclass(frozen=True)
class _Rows:
    """The row columns of a packet, spread over sites that its ranks may not all have."""

    ints: NDArray[np.int64]
    floats: NDArray[np.float64]
    presence: NDArray[np.uint8]
    reason: NDArray[np.int32]
    num_scheduled: NDArray[np.int32]
    num_observed: NDArray[np.int32]
    num_contributing: NDArray[np.int32]
    absmax_rank: NDArray[np.int32]
    num_nonfinite_ranks: NDArray[np.int32]
    first_nonfinite_rank: NDArray[np.int32]

    @staticmethod
    def of(packet: Packet, sites: NDArray[np.uint64], reasons: tuple[str, ...]) -> _Rows:
        """Return the rows over ``sites``, a superset of the packet's own; rows that it lacks become the identity."""
        rows = _Rows(**{field.name: getattr(packet, field.name) for field in fields(_Rows)})
        if packet.reasons != reasons[: len(packet.reasons)]:
            numbers = np.array([reasons.index(text) for text in packet.reasons], dtype=np.int32)
            rows = replace(rows, reason=_renumber(rows.reason, numbers))
        return rows if len(sites) == packet.num_rows else rows._spread(np.searchsorted(sites, packet.sites), len(sites))

    def _spread(self, where: NDArray[np.intp], num_rows: int) -> _Rows:
        absent_ints, absent_floats = identity(num_rows)
        columns: dict[str, NDArray[Any]] = {"ints": absent_ints, "floats": absent_floats}
        for name, absent in _ABSENT.items():
            columns[name] = np.full(num_rows, absent, dtype=getattr(self, name).dtype)
        for name, column in columns.items():
            column[where] = getattr(self, name)
        return _Rows(**columns)


# What a rank says of a site that it does not have.
_ABSENT: Final = {
    "presence": Presence.NOT_SCHEDULED,
    "reason": -1,
    "num_scheduled": 0,
    "num_observed": 0,
    "num_contributing": 0,
    "absmax_rank": NO_RANK,
    "num_nonfinite_ranks": 0,
    "first_nonfinite_rank": NO_RANK,
}


# The presence that stands first wins: the values of ``Presence`` in order, but that one rank which leaves a site out to
# keep a budget takes it away from all, because a sum that lacks it would pass for the whole.
_PRECEDENCE: Final = np.array(
    [-1 if presence is Presence.BUDGET_DROPPED else presence for presence in Presence], dtype=np.int8
)


def _merge_rows(a: _Rows, b: _Rows) -> _Rows:
    ints, floats = merge_packed((a.ints, a.floats), (b.ints, b.floats))
    return _Rows(
        ints=ints,
        floats=floats,
        presence=np.where(_comes_before(b, a), b.presence, a.presence),
        reason=_worst_reason(a, b),
        num_scheduled=a.num_scheduled + b.num_scheduled,
        num_observed=a.num_observed + b.num_observed,
        num_contributing=a.num_contributing + b.num_contributing,
        absmax_rank=_absmax_rank(a, b),
        num_nonfinite_ranks=a.num_nonfinite_ranks + b.num_nonfinite_ranks,
        first_nonfinite_rank=_lower_rank(a.first_nonfinite_rank, b.first_nonfinite_rank),
    )


def _comes_before(a: _Rows, b: _Rows) -> NDArray[np.bool_]:
    return _PRECEDENCE[a.presence] < _PRECEDENCE[b.presence]


def _join_reasons(packets: Sequence[Packet]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text for packet in packets for text in packet.reasons))


def _renumber(reason: NDArray[np.int32], numbers: NDArray[np.int32]) -> NDArray[np.int32]:
    # The appended -1 is what "no reason" (-1) indexes.
    return np.append(numbers, np.int32(-1))[reason]


def _worst_reason(a: _Rows, b: _Rows) -> NDArray[np.int32]:
    """Keep the reason of the less observed side, the earlier one on a tie, so that a partial failure is still told."""
    b_tells = (b.reason >= 0) & ((a.reason < 0) | _comes_before(b, a) & (b.presence != Presence.OBSERVED))
    return np.where(b_tells, b.reason, a.reason)


def _lower_rank(a: NDArray[np.int32], b: NDArray[np.int32]) -> NDArray[np.int32]:
    return np.where((a == NO_RANK) | ((b != NO_RANK) & (b < a)), b, a)


def _absmax_rank(a: _Rows, b: _Rows) -> NDArray[np.int32]:
    top_a, top_b = a.floats[:, ABSMAX], b.floats[:, ABSMAX]
    equal = _lower_rank(a.absmax_rank, b.absmax_rank)
    larger = np.where(top_a > top_b, a.absmax_rank, b.absmax_rank)
    # A side without finite elements has absmax 0 and no rank, and must not win against a true 0.
    decided = (top_a != top_b) & (a.absmax_rank != NO_RANK) & (b.absmax_rank != NO_RANK)
    return np.where(decided, larger, equal)


def _merge_histograms(packets: Sequence[Packet]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    # Counts are integers: their order is free, and one array takes them all.
    sites = _union([packet.hist_sites for packet in packets])
    counts = np.zeros((len(sites), packets[0].descriptor.num_counts), dtype=np.int64)
    for packet in packets:
        if len(packet.hist_sites) == len(sites):
            counts += packet.hist_counts
        else:
            counts[np.searchsorted(sites, packet.hist_sites)] += packet.hist_counts
    return sites, counts


def _merge_all_facts(packets: Sequence[Packet]) -> StepFacts:
    facts, lowest = packets[0].facts, packets[0].ranks[0]
    for packet in packets[1:]:
        facts = merge_facts(facts, packet.facts, a_first=lowest < packet.ranks[0])
        lowest = min(lowest, packet.ranks[0])
    return facts


def merge_facts(a: StepFacts, b: StepFacts, *, a_first: bool) -> StepFacts:
    """Merge what two groups of ranks say of the step; ``a_first`` tells which group holds the lowest rank."""
    first = a if a_first else b
    return StepFacts(
        num_applied=a.num_applied + b.num_applied,
        num_skipped=a.num_skipped + b.num_skipped,
        num_unknown=a.num_unknown + b.num_unknown,
        num_micro_batches=max(a.num_micro_batches, b.num_micro_batches),
        num_optimizer_steps=max(a.num_optimizer_steps, b.num_optimizer_steps),
        grad_scale=first.grad_scale,
        grad_scale_state=_same_or_mixed(a.grad_scale_state, b.grad_scale_state),
        provenance=_same_or_mixed(a.provenance, b.provenance),
        mode=_same_or_mixed(a.mode, b.mode),
        wall_time_s=first.wall_time_s,
        step_s=max(a.step_s, b.step_s),
        self_s=max(a.self_s, b.self_s),
        read_bytes=a.read_bytes + b.read_bytes,
        transfer_s=max(a.transfer_s, b.transfer_s),
        transfer_bytes=a.transfer_bytes + b.transfer_bytes,
        num_budget_dropped=a.num_budget_dropped + b.num_budget_dropped,
        skipped_ranks=tuple(sorted((*a.skipped_ranks, *b.skipped_ranks)))[:MAX_NAMED_RANKS],
    )


def _same_or_mixed(a: str, b: str) -> str:
    return a if a == b else "mixed"
