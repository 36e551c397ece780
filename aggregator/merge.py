"""Packets of several ranks become one: where ranks meet.

The fold is over the packets in the order given, so callers fix the order and get the same bits each time. Rows pair by
site id; a rank without a site simply has no row for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from aggregator.checks import MAX_FINDINGS
from aggregator.definitions import defined_sites, join_definitions
from telemetry.errors import PacketMalformedError, SketchDescriptorMismatchError
from telemetry.packet import NO_RANK, Packet, StepFacts
from telemetry.presence import Presence
from telemetry.replicas import MAX_NAMED_RANKS
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
    return reduce(_merge_two, packets)


def _merge_two(a: Packet, b: Packet) -> Packet:
    _require_same_step(a, b)
    sites = np.union1d(a.sites, b.sites)
    reasons, renumber_b = _join_reasons(a.reasons, b.reasons)
    left, right = _aligned(a, sites), _aligned(replace(b, reason=_renumber(b.reason, renumber_b)), sites)
    ints, floats = merge_packed((left.ints, left.floats), (right.ints, right.floats))
    presence = np.minimum(left.presence, right.presence)
    hist_sites, hist_counts = _merge_histograms(a, b)
    defined = join_definitions((defined_sites(a), defined_sites(b)))
    return Packet(
        run_id=a.run_id,
        segment=a.segment,
        step=a.step,
        world_size=a.world_size,
        ranks=tuple(sorted((*a.ranks, *b.ranks))),
        descriptor=a.descriptor,
        sites=sites,
        ints=ints,
        floats=floats,
        presence=presence,
        reason=_worst_reason(left, right),
        num_scheduled=left.num_scheduled + right.num_scheduled,
        num_observed=left.num_observed + right.num_observed,
        num_contributing=left.num_contributing + right.num_contributing,
        absmax_rank=_absmax_rank(left, right),
        num_nonfinite_ranks=left.num_nonfinite_ranks + right.num_nonfinite_ranks,
        first_nonfinite_rank=_lower_rank(left.first_nonfinite_rank, right.first_nonfinite_rank),
        hist_sites=hist_sites,
        hist_counts=hist_counts,
        facts=merge_facts(a.facts, b.facts, a_first=min(a.ranks) < min(b.ranks)),
        abstained={**a.abstained, **b.abstained},
        definitions=tuple(site for site, _ in defined),
        defined_by=tuple(ranks for _, ranks in defined),
        reasons=reasons,
        findings=(*a.findings, *b.findings)[:MAX_FINDINGS],
        replicas=a.replicas.merge(b.replicas),
    )


def _require_same_step(a: Packet, b: Packet) -> None:
    if (a.run_id, a.segment, a.step) != (b.run_id, b.segment, b.step):
        raise PacketMalformedError(
            f"ranks {list(b.ranks)} brought run {b.run_id} segment {b.segment} step {b.step}, "
            f"ranks {list(a.ranks)} run {a.run_id} segment {a.segment} step {a.step}",
            step=a.step,
            remedy="every rank must log the same steps: open session.step with the same number on all of them",
        )
    shared = set(a.ranks) & set(b.ranks)
    if shared:
        raise PacketMalformedError(f"ranks {sorted(shared)} came twice", step=a.step, rank=min(shared))
    if a.descriptor != b.descriptor:
        raise SketchDescriptorMismatchError(
            f"ranks {list(a.ranks)} count on {a.descriptor}, ranks {list(b.ranks)} on {b.descriptor}", step=a.step
        )


def _aligned(packet: Packet, sites: NDArray[np.uint64]) -> Packet:
    """Spread the rows of a packet over ``sites``, a superset of its own; rows that it lacks become the identity."""
    if len(sites) == packet.num_rows:
        return packet
    where = np.searchsorted(sites, packet.sites)
    ints, floats = identity(len(sites))
    ints[where], floats[where] = packet.ints, packet.floats

    def spread(column: NDArray[np.int32], absent: int) -> NDArray[np.int32]:
        wide = np.full(len(sites), absent, dtype=column.dtype)
        wide[where] = column
        return wide

    presence = np.full(len(sites), Presence.NOT_SCHEDULED, dtype=np.uint8)
    presence[where] = packet.presence
    return replace(
        packet,
        sites=sites,
        ints=ints,
        floats=floats,
        presence=presence,
        reason=spread(packet.reason, -1),
        num_scheduled=spread(packet.num_scheduled, 0),
        num_observed=spread(packet.num_observed, 0),
        num_contributing=spread(packet.num_contributing, 0),
        absmax_rank=spread(packet.absmax_rank, NO_RANK),
        num_nonfinite_ranks=spread(packet.num_nonfinite_ranks, 0),
        first_nonfinite_rank=spread(packet.first_nonfinite_rank, NO_RANK),
    )


def _join_reasons(a: tuple[str, ...], b: tuple[str, ...]) -> tuple[tuple[str, ...], NDArray[np.int32]]:
    joined = tuple(dict.fromkeys((*a, *b)))
    index = {text: i for i, text in enumerate(joined)}
    return joined, np.array([index[text] for text in b], dtype=np.int32)


def _renumber(reason: NDArray[np.int32], numbers: NDArray[np.int32]) -> NDArray[np.int32]:
    # The appended -1 is what "no reason" (-1) indexes.
    return np.append(numbers, np.int32(-1))[reason]


def _worst_reason(a: Packet, b: Packet) -> NDArray[np.int32]:
    """Keep the reason of the less observed side, the earlier one on a tie, so that a partial failure is still told."""
    b_tells = (b.reason >= 0) & ((a.reason < 0) | (b.presence < a.presence) & (b.presence > Presence.OBSERVED))
    return np.where(b_tells, b.reason, a.reason)


def _lower_rank(a: NDArray[np.int32], b: NDArray[np.int32]) -> NDArray[np.int32]:
    return np.where((a == NO_RANK) | ((b != NO_RANK) & (b < a)), b, a)


def _absmax_rank(a: Packet, b: Packet) -> NDArray[np.int32]:
    top_a, top_b = a.floats[:, ABSMAX], b.floats[:, ABSMAX]
    equal = _lower_rank(a.absmax_rank, b.absmax_rank)
    larger = np.where(top_a > top_b, a.absmax_rank, b.absmax_rank)
    # A side without finite elements has absmax 0 and no rank, and must not win against a true 0.
    decided = (top_a != top_b) & (a.absmax_rank != NO_RANK) & (b.absmax_rank != NO_RANK)
    return np.where(decided, larger, equal)


def _merge_histograms(a: Packet, b: Packet) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    sites = np.union1d(a.hist_sites, b.hist_sites)
    counts = np.zeros((len(sites), a.descriptor.num_counts), dtype=np.int64)
    for packet in (a, b):
        counts[np.searchsorted(sites, packet.hist_sites)] += packet.hist_counts
    return sites, counts


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
        mode=a.mode if a.mode == b.mode else "mixed",
        wall_time_s=first.wall_time_s,
        step_s=max(a.step_s, b.step_s),
        self_s=max(a.self_s, b.self_s),
        skipped_ranks=tuple(sorted((*a.skipped_ranks, *b.skipped_ranks)))[:MAX_NAMED_RANKS],
    )
