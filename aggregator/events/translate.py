"""A merged step as events: unavailable, scalars of the step and of its sites, histograms, then findings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, Final

from aggregator.catalogue import MergedStep
from aggregator.events.event import Event, FindingEvent, HistogramEvent, ScalarEvent, UnavailableEvent
from aggregator.health.update_ratio import UPDATE_TO_WEIGHT, update_pairs, update_ratios
from aggregator.sinks.values import step_values
from telemetry.presence import Presence
from telemetry.summary import Histogram
from telemetry.summary.fields import FINITE

__all__ = ["events_of"]

_NOTHING_FINITE: Final = "no finite element"
_NO_NUMBER: Final = "undefined for these values"
_NO_RATIO: Final = "the weight is all zero, or one of the two has no finite element"


def events_of(step: MergedStep, fields: Sequence[str], types: frozenset[str]) -> Iterator[Event]:
    """Yield the events of a step.

    Args:
        step: the merged step.
        fields: which scalars: any of ``telemetry.summary.SUMMARY_FIELDS``, ``nonfinite`` and ``update_to_weight``.
        types: which events; what nobody wants is not computed.

    Findings come last, so that a bounded queue that is too short for a step loses numbers before it loses findings.
    """
    if UnavailableEvent.type in types:
        yield from _unavailable(step)
    if ScalarEvent.type in types:
        yield from _facts(step)
        for field in fields:
            yield from _ratios(step) if field == UPDATE_TO_WEIGHT else _scalars(step, field)
    if HistogramEvent.type in types:
        yield from _histograms(step)
    if FindingEvent.type in types:
        yield from map(_finding, step.packet.findings, repeat(step.step))


def _facts(step: MergedStep) -> Iterator[Event]:
    facts = step.packet.facts
    values = {"step_ms": facts.step_s * 1e3, "self_ms": facts.self_s * 1e3, "ranks_merged": step.num_ranks}
    for field, value in values.items():
        yield ScalarEvent(step.step, "step", "", field, value)


def _finding(finding: Mapping[str, Any], step: int) -> Event:
    kind, site = finding.get("kind"), finding.get("site")
    return FindingEvent(
        step=step,
        kind=kind if isinstance(kind, str) else "",
        site=site if isinstance(site, str) else "",
        code=str(finding["code"]),
        message=str(finding["message"]),
        details=finding,
    )


def _unavailable(step: MergedStep) -> Iterator[Event]:
    packet = step.packet
    for row, site in enumerate(step.sites):
        presence, reason = Presence(int(packet.presence[row])), int(packet.reason[row])
        if presence != Presence.OBSERVED:
            yield UnavailableEvent(
                step.step, site.kind, site.name, presence, packet.reasons[reason] if reason >= 0 else ""
            )


def _scalars(step: MergedStep, field: str) -> Iterator[Event]:
    finite, observed = step.packet.ints[:, FINITE].tolist(), (step.packet.presence == Presence.OBSERVED).tolist()
    for row, value in enumerate(step_values(step, field)):
        if observed[row]:
            yield _scalar(step, row, field, value, _NO_NUMBER if finite[row] else _NOTHING_FINITE)


def _ratios(step: MergedStep) -> Iterator[Event]:
    rows, ratios = update_ratios(step, *update_pairs(step.sites))
    for row, ratio in zip(rows.tolist(), ratios.tolist(), strict=True):
        yield _scalar(step, row, UPDATE_TO_WEIGHT, ratio, _NO_RATIO)


def _scalar(step: MergedStep, row: int, field: str, value: int | float | None, reason: str) -> Event:
    site = step.sites[row]
    if value is None or not math.isfinite(value):
        return ScalarEvent(step.step, site.kind, site.name, field, None, reason)
    return ScalarEvent(step.step, site.kind, site.name, field, value)


def _histograms(step: MergedStep) -> Iterator[Event]:
    packet = step.packet
    row_of = dict(zip(packet.sites.tolist(), range(packet.num_rows), strict=True))
    for site_id, counts in zip(packet.hist_sites.tolist(), packet.hist_counts, strict=True):
        site, row = step.sites[row_of[site_id]], row_of[site_id]
        if packet.presence[row] == Presence.OBSERVED:
            yield HistogramEvent(step.step, site.kind, site.name, Histogram(packet.descriptor, counts))
