"""Packets and merged steps made from tensors, for tests of whatever comes after the packet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from aggregator.catalogue import Catalogue, MergedStep
from telemetry.packet import NO_RANK, Packet, StepFacts
from telemetry.presence import Presence
from telemetry.sites import SiteSpec
from telemetry.summary import DEFAULT_DESCRIPTOR, HistogramDescriptor, TensorSummary
from telemetry.summary.fields import FLOAT_FIELDS, INT_FIELDS

__all__ = ["make_packet", "make_site", "make_step", "make_steps"]


def make_site(name: str, kind: str = "activation", **changes: Any) -> SiteSpec:
    """Return a float32 site that is sharded over ``dp``; ``changes`` replaces any attribute of ``SiteSpec``."""
    attributes: dict[str, Any] = {
        "dtype": "float32",
        "shape": (4,),
        "numel": None,
        "placements": (("dp", "shard"),),
        **changes,
    }
    return SiteSpec(name, kind, **attributes)


def make_packet(
    step: int,
    observed: Mapping[SiteSpec, TensorSummary],
    *,
    unobserved: Mapping[SiteSpec, tuple[Presence, str]] | None = None,
    rank: int = 0,
    world_size: int = 1,
    descriptor: HistogramDescriptor = DEFAULT_DESCRIPTOR,
    facts: StepFacts | None = None,
    findings: Sequence[Mapping[str, Any]] = (),
    run_id: str = "run",
    segment: int = 0,
) -> Packet:
    """Return the packet of one rank.

    Args:
        step: the caller's step number.
        observed: the summary of each site; those that have a histogram bring it along.
        unobserved: presence and reason of the sites that were scheduled and have no numbers.
        rank, world_size, descriptor, facts, findings, run_id, segment: as in ``telemetry.packet.Packet``.
    """
    missing = dict(unobserved or {})
    sites = sorted((*observed, *missing), key=lambda site: site.site_id)
    summaries = [observed.get(site, TensorSummary.empty()) for site in sites]
    ints = np.array([[getattr(s, name) for name in INT_FIELDS] for s in summaries], np.int64).reshape(-1, 8)
    floats = np.array([_stored_floats(summary) for summary in summaries], np.float64).reshape(-1, 10)
    present = np.array([site in observed for site in sites], bool)
    bad = ints[:, INT_FIELDS.index("total")] > ints[:, INT_FIELDS.index("finite")]
    finite = ints[:, INT_FIELDS.index("finite")] > 0
    counted = [(s.site_id, h.counts) for s, m in zip(sites, summaries, strict=True) if (h := m.histogram) is not None]
    return Packet(
        run_id=run_id,
        segment=segment,
        step=step,
        world_size=world_size,
        ranks=(rank,),
        descriptor=descriptor,
        sites=np.array([site.site_id for site in sites], np.uint64),
        ints=ints,
        floats=floats,
        presence=np.array([missing[s][0] if s in missing else Presence.OBSERVED for s in sites], np.uint8),
        reason=np.array([list(missing).index(site) if site in missing else -1 for site in sites], np.int32),
        num_scheduled=np.ones(len(sites), np.int32),
        num_observed=present.astype(np.int32),
        num_contributing=present.astype(np.int32),
        absmax_rank=np.where(finite, rank, NO_RANK).astype(np.int32),
        num_nonfinite_ranks=bad.astype(np.int32),
        first_nonfinite_rank=np.where(bad, rank, NO_RANK).astype(np.int32),
        hist_sites=np.array([site_id for site_id, _ in counted], np.uint64),
        hist_counts=np.array([counts for _, counts in counted], np.int64).reshape(-1, descriptor.num_counts),
        facts=facts if facts is not None else StepFacts(num_applied=1, num_micro_batches=1, step_s=0.5, self_s=0.001),
        definitions=tuple(sites),
        reasons=tuple(reason for _, reason in missing.values()),
        findings=tuple(findings),
    )


def _stored_floats(summary: TensorSummary) -> list[float]:
    # The public attributes say NaN where a summary has no value; a packet says the identity of merge.
    absent = {"min": np.inf, "max": -np.inf, "absmax": 0.0, "mean": 0.0}
    if summary.finite > 0:
        absent = {}
    return [absent.get(name, getattr(summary, name)) for name in FLOAT_FIELDS]


def make_step(
    packet: Packet, catalogue: Catalogue | None = None, missing: Mapping[int, str] | None = None
) -> MergedStep:
    """Return the step as history and sinks receive it; pass one ``catalogue`` to all steps of a segment."""
    return MergedStep.resolve(packet, Catalogue() if catalogue is None else catalogue, missing)


def make_steps(packets: Iterable[Packet]) -> list[MergedStep]:
    """Return the steps of one segment."""
    catalogue = Catalogue()
    return [make_step(packet, catalogue) for packet in packets]
