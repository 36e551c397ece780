"""Packets for tests, made from tensors by the ordinary reduction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from telemetry.packet import NO_RANK, Packet, StepFacts
from telemetry.presence import Presence
from telemetry.sites import SiteSpec
from telemetry.summary import DEFAULT_DESCRIPTOR, HistogramDescriptor, summarize
from telemetry.summary.fields import FLOAT_FIELDS, INT_FIELDS

__all__ = ["RUN_ID", "make_packet", "make_site"]

RUN_ID = "run-under-test"


def make_site(name: str, **changes: Any) -> SiteSpec:
    """Return a definition of an activation that is a population over dp."""
    fields: dict[str, Any] = {
        "name": name,
        "kind": "activation",
        "dtype": "float64",
        "shape": (1,),
        "numel": None,
        "placements": (("dp", "shard(0)"),),
    }
    return SiteSpec(**{**fields, **changes})


def make_packet(
    rank: int,
    world_size: int = 8,
    step: int = 1,
    values: Mapping[str, Any] | None = None,
    *,
    absent: Mapping[str, str] | None = None,
    histograms: bool = False,
    descriptor: HistogramDescriptor = DEFAULT_DESCRIPTOR,
    facts: StepFacts | None = None,
    define: bool = True,
) -> Packet:
    """Return what one rank logs.

    Args:
        values: site name → elements (anything a float64 tensor is made of).
        absent: site name → reason of a failed capture.
        histograms: whether observed sites have one.
        define: whether the packet carries the definitions of its sites.
    """
    observed = {make_site(name).site_id: torch.as_tensor(v, dtype=torch.float64) for name, v in (values or {}).items()}
    failed = {make_site(name).site_id: reason for name, reason in (absent or {}).items()}
    reasons = tuple(dict.fromkeys(failed.values()))
    rows = sorted({*observed, *failed})
    made = [summarize(observed.get(key, torch.empty(0)), histogram=descriptor) for key in rows]
    counted = [key for key in rows if key in observed] if histograms else []
    nonfinite = [bool(m.nan + m.pos_inf + m.neg_inf) for m in made]
    ones = np.array([key in observed for key in rows], np.int32)
    ints = np.array([[getattr(m, f) for f in INT_FIELDS] for m in made], np.int64).reshape(-1, len(INT_FIELDS))
    ints[ones == 0] = 0
    names = (*(values or {}), *(absent or {}))
    return Packet(
        run_id=RUN_ID,
        segment=0,
        step=step,
        world_size=world_size,
        ranks=(rank,),
        descriptor=descriptor,
        sites=np.array(rows, np.uint64),
        ints=ints,
        floats=np.array([_floats(m) for m in made], np.float64).reshape(-1, len(FLOAT_FIELDS)),
        presence=np.array([0 if key in observed else Presence.CAPTURE_FAILED for key in rows], np.uint8),
        reason=np.array([reasons.index(failed[key]) if key in failed else -1 for key in rows], np.int32),
        num_scheduled=np.ones(len(rows), np.int32),
        num_observed=ones,
        num_contributing=ones.copy(),
        absmax_rank=np.array([rank if m.finite else NO_RANK for m in made], np.int32),
        num_nonfinite_ranks=np.array(nonfinite, np.int32),
        first_nonfinite_rank=np.array([rank if bad else NO_RANK for bad in nonfinite], np.int32),
        hist_sites=np.array(counted, np.uint64),
        hist_counts=np.array(
            [m.histogram.counts for key, m in zip(rows, made, strict=True) if key in counted and m.histogram], np.int64
        ).reshape(-1, descriptor.num_counts),
        facts=facts or StepFacts(num_applied=1),
        definitions=tuple(make_site(name) for name in names) if define else (),
        reasons=reasons,
    )


def _floats(summary: Any) -> list[float]:
    empty = {"min": np.inf, "max": -np.inf, "absmax": 0.0, "mean": 0.0}
    return [getattr(summary, f) if summary.finite else empty.get(f, 0.0) for f in FLOAT_FIELDS]
